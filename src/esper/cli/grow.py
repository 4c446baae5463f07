"""`esper grow`: one network, grown for real and written."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from esper.cli.arguments import (
    RNG_SEED,
    add_option,
    add_runs,
    file,
    path_text,
    positive,
)
from esper.contracts.errors import BadInput

if TYPE_CHECKING:
    from esper.tamiyo.registry import Maker

NEWEST: Final = "latest"
"""The controller of the newest finished training; no run can be called so."""
HELP = "grow one network of a task and write it"
EXAMPLES = """\
examples:
  esper grow --task letter
  esper grow --task letter --controller tamiyo
  esper grow --task mnist1d --controller runs/NAME --out grown.pt2

The file loads without Esper: torch.export.load("grown.pt2").module()
"""


def add(parser: ArgumentParser) -> None:
    """Add its options."""
    parser.add_argument(
        "--task", required=True, metavar="NAME", help="what it learns (esper tasks)"
    )
    deciders = (
        "what decides: never, random, early, periodic, plateau; tamiyo: the "
        "trained one that comes with Esper; latest: what the newest finished training "
        "learned; or a run"
    )
    added = "parameters that may be added, as a multiple of the host's"
    out = "where the grown network goes, NAME.pt2 (default: TASK-CONTROLLER.pt2)"
    for name, kind, default, metavar, text in (
        ("--controller", path_text, "early", "NAME", deciders),
        ("--budget", positive, 4.0, "X", added),
        ("--out", file, None, "FILE", out),
        ("--rng-seed", RNG_SEED, 0, "N", "decides everything"),
    ):
        add_option(parser, name, kind, default, metavar, text)
    add_runs(parser)


def run(options: Namespace) -> int:
    """Grow one network, write it and print its history."""
    from esper.experiment.grow import check_free, free_name, grow, summary_lines, write
    from esper.tasks.catalogue import task as find_task

    if options.out is not None:
        check_free(options.out)
    task, name = find_task(options.task), options.controller
    controller = _controller(name, Path(options.runs))
    out = options.out or free_name(f"{task.name}-{Path(name).name or 'run'}")
    check_free(out)
    fitted, test = grow(
        task, controller, budget=options.budget, rng_seed=options.rng_seed
    )
    write(fitted.model, task, out)
    after = sum(parameter.numel() for parameter in fitted.model.parameters())
    print(*summary_lines(fitted.history), sep="\n")
    before = task.host.parameters
    print(f"Test score {test:.1%}; {before:,} parameters became {after:,}.")
    print(f"The network is in {out}; it loads without Esper: torch.export.load.")
    return 0


def _controller(name: str, runs: Path) -> "Maker | str":
    """The controller that a name stands for."""
    from esper.experiment.controllers import find_controller, newest_controller
    from esper.tamiyo.registry import NAMES

    if name in NAMES:
        return name
    if name == NEWEST:
        return newest_controller(runs)
    try:
        return find_controller(name, runs)
    except BadInput as error:
        known = ", ".join((*NAMES, NEWEST))
        raise BadInput(f"{error} Who else decides: {known}.") from None
