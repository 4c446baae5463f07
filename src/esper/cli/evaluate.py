"""`esper evaluate`: controllers and static networks on the same hosts."""

from argparse import ArgumentParser, Namespace
from typing import Any

from esper.cli.arguments import RNG_SEED, Whole, add_runs, finite, names

HELP = "judge controllers and static networks on the same hosts"
DESCRIPTION = """\
Judge controllers on real tasks, all of them on the same hosts. The return is the score
that was gained, less rent for what was added; the test score is that of rows which no
decision and no reward has seen. A run that learned is named by its folder."""
EXAMPLES = """\
examples:
  esper evaluate                       every task, every controller that does not learn
  esper evaluate --task letter,digits --hosts 32
  esper evaluate --controller never,early,static,tamiyo
  esper evaluate --controller never,early,static,runs/NAME
  esper evaluate --json > figures.json the same as data
"""


def add(parser: ArgumentParser) -> None:
    """Add its options."""
    parser.add_argument(
        "--task",
        type=names,
        action="append",
        default=[],
        metavar="NAMES",
        help="tasks, with commas between or one by one (default: all; esper tasks)",
    )
    parser.add_argument(
        "--controller",
        type=names,
        action="append",
        default=[],
        metavar="NAMES",
        help="never, random, early, periodic, plateau, promise; tamiyo: the trained "
        "one that comes with Esper; static: a plain network of equal size; longer: "
        "never grown, for equal work; or folders of runs (default: all but tamiyo and "
        "longer)",
    )
    parser.add_argument(
        "--hosts",
        type=Whole(1, 65_536),
        default=16,
        metavar="N",
        help="hosts of each task (default: 16)",
    )
    parser.add_argument(
        "--rng-seed",
        type=RNG_SEED,
        default=0,
        metavar="N",
        help="decides which hosts (default: 0)",
    )
    parser.add_argument(
        "--rent",
        type=finite,
        default=None,
        metavar="X",
        help="score charged per added multiple of the host (default: 0.01)",
    )
    parser.add_argument(
        "--processes",
        type=Whole(1, 64),
        default=2,
        metavar="N",
        help="arms judged at the same time (default: 2)",
    )
    parser.add_argument(
        "--name", default=None, metavar="TEXT", help="of the run that keeps the figures"
    )
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print data, not tables")


def run(options: Namespace) -> int:
    """Judge, print and store."""
    from esper.experiment.config import World
    from esper.experiment.evaluate import EvaluateConfig, run_evaluation
    from esper.report import write_report

    given: dict[str, Any] = {}
    if options.controller:
        given["controllers"] = _names(options.controller)
    if options.rent is not None:
        given["world"] = World(rent=options.rent)
    path = run_evaluation(
        EvaluateConfig(
            tasks=_names(options.task),
            hosts=options.hosts,
            rng_seed=options.rng_seed,
            processes=options.processes,
            name=options.name,
            runs=options.runs,
            **given,
        ),
        as_json=options.json,
    )
    page = write_report(path)
    if not options.json:
        print(f"The report is in {page}.")
    return 0


def _names(lists: list[list[str]]) -> tuple[str, ...]:
    """Every name once, in order."""
    return tuple(dict.fromkeys(name for each in lists for name in each))
