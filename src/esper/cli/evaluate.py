"""`esper evaluate`: controllers and static networks on the same hosts."""

from argparse import ArgumentParser, Namespace

from esper.cli.arguments import (
    RNG_SEED,
    add_option,
    add_runs,
    finite,
    names,
    whole,
)

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
        help="never, random, early, periodic, plateau; tamiyo: the trained "
        "one that comes with Esper; static: a plain network of equal size; longer: "
        "never grown, for equal work; or folders of runs (default: all but tamiyo and "
        "longer)",
    )
    for name, kind, default, metavar, text in (
        ("--hosts", whole(1, 65_536), 16, "N", "hosts of each task"),
        ("--rng-seed", RNG_SEED, 0, "N", "decides which hosts"),
        (
            "--rent",
            finite,
            None,
            "X",
            "score charged per added multiple of the host (default: 0.01)",
        ),
        ("--processes", whole(1, 64), 2, "N", "arms judged at the same time"),
        ("--name", str, None, "TEXT", "of the run that keeps the figures"),
    ):
        add_option(parser, name, kind, default, metavar, text)
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print data, not tables")


def run(options: Namespace) -> int:
    """Judge, print and store."""
    from esper.experiment.config import World
    from esper.experiment.evaluate import EvaluateConfig, run_evaluation
    from esper.report import write_report

    given = {
        name: getattr(options, name)
        for name in ("hosts", "rng_seed", "processes", "name", "runs")
    }
    if options.controller:
        given["controllers"] = _names(options.controller)
    if options.rent is not None:
        given["world"] = World(rent=options.rent)
    config = EvaluateConfig(tasks=_names(options.task), **given)
    path = run_evaluation(config, as_json=options.json)
    page = write_report(path)
    if not options.json:
        print(f"The report is in {page}.")
    return 0


def _names(lists: list[list[str]]) -> tuple[str, ...]:
    """Every name once, in order."""
    return tuple(dict.fromkeys(name for each in lists for name in each))
