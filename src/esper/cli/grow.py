"""`esper grow`: one network, grown for real and written."""

from argparse import ArgumentParser, Namespace

from esper.cli.arguments import RNG_SEED, add_runs, file, path_text, positive

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
    parser.add_argument(
        "--controller",
        type=path_text,
        default="early",
        metavar="NAME",
        help="what decides: never, random, early, periodic, plateau, promise; tamiyo: "
        "the trained one that comes with Esper; latest: what the newest finished "
        "training learned; or a run (default: early)",
    )
    parser.add_argument(
        "--budget",
        type=positive,
        default=4.0,
        metavar="X",
        help="parameters that may be added, as a multiple of the host's (default: 4)",
    )
    parser.add_argument(
        "--out",
        type=file,
        default=None,
        metavar="FILE",
        help="where the grown network goes, NAME.pt2 (default: TASK-CONTROLLER.pt2)",
    )
    parser.add_argument(
        "--rng-seed",
        type=RNG_SEED,
        default=0,
        metavar="N",
        help="decides everything (default: 0)",
    )
    add_runs(parser)


def run(options: Namespace) -> int:
    """Grow one network and print its history."""
    from esper.experiment.grow import GrowConfig, run_grow

    run_grow(
        GrowConfig(
            task=options.task,
            controller=options.controller,
            budget=options.budget,
            rng_seed=options.rng_seed,
            out=options.out,
            runs=options.runs,
        )
    )
    return 0
