"""`esper evaluate` and `esper record`."""

from argparse import ArgumentParser, Namespace
from typing import Final

from esper.cli.arguments import (
    Command,
    add_settings,
    add_workers,
    folder_path,
    given_options,
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
    """Add the folder and the settings of `esper record`."""
    from esper.training.recordings import RecordConfig

    parser.add_argument(
        "folder", type=folder_path, metavar="FOLDER", help="output folder"
    )
    add_workers(parser)
    add_settings(parser, RecordConfig())


def record(options: Namespace) -> None:
    """Record all tasks that the folder does not contain yet."""
    from esper.runs.progress import Progress
    from esper.runs.settings import construct, parsed_options
    from esper.training.recordings import RecordConfig, record

    given = given_options(options)
    folder, start_workers = given.pop("folder"), worker_starter(given)
    settings = construct(RecordConfig, *parsed_options(RecordConfig, given))
    with start_workers() as workers, Progress(unit="task") as progress:

        def show(done: int, total: int) -> None:
            progress.update("recording", done, total, "done", workers.active_jobs)

        record(settings, folder, workers, show)
    print_line(f"{settings.tasks} tasks are in {folder}.")


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
    settings=True,
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
