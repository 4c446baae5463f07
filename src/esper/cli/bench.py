"""`esper bench`: a hot path beside a naive twin, or a promise beside its proof."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

from esper.cli.words import RNG_SEED, Whole

HELP = "measure a hot path beside a naive twin, or try a promise"
BENCHMARKS: Final = {
    "gae": "advantages, a loop over steps beside one scan",
    "masks": "masks of 128 environments",
    "features": "what the policy reads of 128 environments",
    "buffer": "adding and batching a rollout",
    "policy": "one decision, and the memory beside nn.LSTM",
    "update": "one PPO update, and its device reads",
    "simulated": "the simulated world",
    "growth": "what a slot and a seed cost a training step",
    "widening": "whether growing early pays, in 408 trainings",
    "cohort": "many hosts at once beside one after the other",
    "env": "decisions per second in real worlds",
    "store": "rows per second into a run's store",
    "round": "where the time of a round goes",
    "overhead": "what store and checkpoints cost",
    "resume": "kill -9 at random moments, and whether runs go on to the bit",
    "learning": "Tamiyo on the simulated world beside the exact optimum",
    "out-of-the-box": "the shipped Tamiyo beside never growing, in 40 trainings",
}
OPTIONS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "resume": {
        "--kills": {
            "type": Whole(1, 10_000),
            "metavar": "N",
            "help": "how often to kill (default: 50)",
        },
    },
    "learning": {
        "--rounds": {
            "type": Whole(1, 1_000_000),
            "metavar": "N",
            "help": "rollouts and updates",
        },
        "--repeats": {
            "type": Whole(1, 1_000),
            "metavar": "N",
            "help": "trainings, each from its own random seed",
        },
        "--ablations": {
            "action": "store_true",
            "help": "also without memory and without relevance masks",
        },
        "--rng-seed": {
            "type": RNG_SEED,
            "metavar": "N",
            "help": "random seed of the first training (default: 0)",
        },
    },
}
"""What some of them can be told."""
EXAMPLES = """\
examples:
  esper bench gae
  esper bench resume --kills 50
  esper bench learning --repeats 5 --ablations
"""


def add(parser: ArgumentParser) -> None:
    """One command for each."""
    names = parser.add_subparsers(dest="name", required=True, metavar="name")
    for name, about in BENCHMARKS.items():
        own = names.add_parser(name, help=about, description=about, allow_abbrev=False)
        own.add_argument("--json", action="store_true", help="print data, not a table")
        for option, details in OPTIONS.get(name, {}).items():
            own.add_argument(option, default=None, **details)


def run(options: Namespace) -> int:
    """Run a benchmark of the source checkout, where the naive twins live."""
    from importlib import import_module

    from esper.contracts.errors import BadInput

    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "timing.py").is_file():
        raise BadInput("benchmarks need a source checkout; clone the repository.")
    sys.path.insert(0, str(root))
    names = [name[2:].replace("-", "_") for name in OPTIONS.get(options.name, {})]
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value}
    options.name = options.name.replace("-", "_")
    show = import_module("benchmarks.timing").show
    found = import_module(f"benchmarks.{options.name}").run(**given)
    show(found, as_json=options.json)
    return 0
