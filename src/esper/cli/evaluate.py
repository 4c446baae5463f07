"""`esper evaluate` and `esper record`."""

from argparse import ArgumentParser, Namespace
from typing import Final

from esper.cli.arguments import (
    RNG_SEED,
    Command,
    add_option,
    add_settings,
    add_workers,
    folder_path,
    given_options,
    integer,
    worker_starter,
)
from esper.cli.output import print_line


def add_evaluate_options(parser: ArgumentParser) -> None:
    """Add the settings of an evaluation, some with a second, shorter name."""
    from esper.evaluation.evaluate import EvaluateConfig

    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )
    add_workers(parser)
    short = {"tasks": "task", "controllers": "controller", "world.rent": "rent"}
    add_settings(parser, EvaluateConfig(), short)


def evaluate(options: Namespace) -> None:
    """Evaluate controllers, print and store the results, and write the report."""
    from esper.evaluation.evaluate import EvaluateConfig, run_evaluation
    from esper.report import write_report
    from esper.runs.settings import construct, parsed_options

    given = given_options(options)
    as_json = given.pop("json")
    start_workers = worker_starter(given)
    settings = construct(EvaluateConfig, *parsed_options(EvaluateConfig, given))
    with start_workers() as workers:
        page = write_report(run_evaluation(settings, as_json=as_json, workers=workers))
    if not as_json:
        print_line(f"The report is in {page}.")


def add_record_options(parser: ArgumentParser) -> None:
    """Add the options of `esper record`."""
    parser.add_argument(
        "folder", type=folder_path, metavar="FOLDER", help="output folder"
    )
    number = integer(1, 1_000_000)
    for name, kind, default, metavar, text in (
        ("--stop", str, "anytime", "WHEN", "when to score episodes: end or anytime"),
        ("--tasks", number, 100, "N", "number of tasks to draw"),
        ("--hosts", number, 1, "N", "number of hosts per task"),
        (
            "--scripts",
            integer(2, 1_000),
            20,
            "N",
            "number of growth schedules per host",
        ),
        ("--rng_seed", RNG_SEED, 0, "N", "random seed of the tasks"),
    ):
        add_option(parser, name, kind, default, metavar, text)
    add_workers(parser)


def record(options: Namespace) -> None:
    """Record all tasks that the folder does not contain yet."""
    from esper.runs.progress import Progress
    from esper.training.recordings import RecordConfig, record

    names = ("stop", "tasks", "hosts", "scripts", "rng_seed")
    settings = RecordConfig(**{name: getattr(options, name) for name in names})
    with worker_starter(vars(options))() as workers, Progress(unit="task") as progress:

        def show(done: int, total: int) -> None:
            progress.update("recording", done, total, "done", workers.active_jobs)

        record(settings, options.folder, workers, show)
    print_line(f"{options.tasks} tasks are in {options.folder}.")


EVALUATE: Final = Command(
    run=evaluate,
    options=add_evaluate_options,
    settings=True,
    help="compare controllers and static networks on the same hosts",
    description="""\
Compare controllers on tasks. All of them start from the same hosts (initial networks).

The return is the gain in validation score minus rent for added parameters. With
--world.relative true, the gain is relative: the fraction of errors that growth removed.
The test score uses rows that no decision and no reward used.

Rules: never, random, early, periodic, doubling, large-then-cut, plateau, by-rent,
timetable-by-rent.

Trained controllers: tamiyo (comes with Esper), a run, or the folder of an exported
controller.

Controls: static is a network that has the reference's final size from the start. longer
does not grow, but trains with as much compute as the reference. The reference is the
first trained controller, or early if there is none.""",
    examples="""\
examples:
  esper evaluate                       all tasks, all rules and static
  esper evaluate --task letter,digits --hosts 32
  esper evaluate --controller never,early,static,tamiyo
  esper evaluate --controller never,early,static,runs/NAME
  esper evaluate --json > figures.json print JSON
""",
)

RECORD: Final = Command(
    run=record,
    options=add_record_options,
    help="record how networks grow on random tasks, to pretrain a controller",
    description="""\
Draw random tasks, grow each host by many fixed schedules, and save the observations and
scores. All schedules of a host use common random numbers.

Pretrain on the result with esper train --start_from FOLDER. To continue after an
interruption, run the same command again.""",
    examples="""\
examples:
  esper record recordings/anytime --tasks 200
  esper record recordings/end --stop end --tasks 200 --rng_seed 1
""",
)
