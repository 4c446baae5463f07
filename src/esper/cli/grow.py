"""`esper grow`: one network, grown for real and written."""

from argparse import ArgumentParser, Namespace

from esper.cli.arguments import (
    RNG_SEED,
    add_option,
    add_runs,
    file,
    path_text,
    positive,
)

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
        "what decides: never, random, early, periodic, plateau, promise; tamiyo: the "
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
    """Grow one network and print its history."""
    from esper.experiment.grow import GrowConfig, run_grow

    given = vars(options)
    del given["command"]
    run_grow(GrowConfig(**given))
    return 0
