"""Pictures of `esper watch --web` for the documentation, in docs/images.

python scripts/screenshots.py [FOLDER]

Trains a small controller for about a minute and opens the page in Chromium, in light
and dark mode and as wide as a phone.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.watch import served
from esper.runs.train_config import DEFAULT, Budget, preset
from esper.training.train import begin_run
from esper.watch.reading import run_id
from tests.browser import open_browser

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000
NAME = "first-run"
TASK = "teacher"
PICTURES = {
    "watch-learning": ("view=learning", 1_100, 620, "light"),
    "watch-hosts": (f"view=hosts&task={TASK}", 1_100, 560, "light"),
    "watch-host": (f"view=hosts&task={TASK}&env=0&step=0", 1_100, 1_350, "dark"),
    "watch-phone": ("view=learning", 390, 700, "dark"),
}
"""Address, width, height and mode of each picture."""


def train(root: Path) -> None:
    """Train a small controller in a folder of runs."""
    options = {
        "name": NAME,
        "runs": str(root),
        "tasks": (TASK,),
        "num_envs": 4,
        "rng_seed": 1,
        "start_from": None,
        "budget": Budget(rounds=12),
    }
    config: Any = preset(DEFAULT)
    evaluation = config.evaluation
    hosts = replace(evaluation, every=6, hosts=4, controllers=("never", "early"))
    begin_run(replace(config, evaluation=hosts, **options))


def main(folder: Path = FOLDER, root: Path | None = None) -> None:
    """Write all pictures into a folder; `root` has a run already."""
    with TemporaryDirectory() as name, open_browser() as browser:
        if root is None:
            train(Path(name))
            root = Path(name)
        with served(root) as (address, _):
            for picture, (view, width, height, mode) in PICTURES.items():
                page: Any = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=mode
                )
                page.goto(f"{address}#{view}&run={run_id(NAME)}")
                page.wait_for_selector("main[data-view]")
                page.wait_for_timeout(1_000)
                file = folder / f"{picture}.png"
                page.screenshot(path=file)
                page.close()
                size = file.stat().st_size
                if size > MAX_BYTES:
                    raise SystemExit(f"{file} has {size:,} bytes; make it smaller.")
                print(f"{file}: {size:,} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
