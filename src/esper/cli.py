"""The command line: parses, refuses in one line, and hands over.

Nothing heavy is imported before a command is known, so `esper --help` is instant.
"""

import argparse
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

BENCHMARKS = (
    "gae",
    "masks",
    "features",
    "buffer",
    "policy",
    "update",
    "simulated",
    "growth",
    "widening",
    "cohort",
    "env",
    "store",
)

COMMANDS = ("train", "grow", "evaluate", "bench", "tasks", "blueprints")
OPTIONS = (
    "--task",
    "--controller",
    "--hosts",
    "--rounds",
    "--envs",
    "--rng-seed",
    "--repeats",
    "--ablations",
    "--json",
)
WORDS = (*COMMANDS, *BENCHMARKS, *OPTIONS, "--processes", "--help")

EXAMPLES = """\
examples:
  esper train                          train Tamiyo on the simulated world
  esper train --repeats 5 --ablations  five random seeds, and the same without
                                       memory and without relevance masks
  esper train --task letter            train Tamiyo on real networks and real data
  esper grow --task letter             grow one network and tell its story
  esper evaluate                       every task with every controller that does
                                       not learn
  esper tasks                          what she can be trained on
  esper bench gae                      the naive loop beside ours, in one process
  esper bench update --json            the same as data
"""

EVALUATE_DESCRIPTION = """\
Judge controllers that do not learn on real tasks, all of them on the same hosts.
The return is the score that was gained, less rent for what was added; the test
score is that of rows which no decision and no reward has seen."""
GROW_EXAMPLES = """\
examples:
  esper grow --task letter
  esper grow --task mnist1d --controller promise --out grown.pt2

The file loads without Esper: torch.export.load("grown.pt2").module()
"""
EVALUATE_EXAMPLES = """\
examples:
  esper evaluate                       every task, every controller
  esper evaluate --task letter --task digits --hosts 32
  esper evaluate --controller never --controller early
  esper evaluate --json > figures.json the same as data, host by host
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import torch

        torch.set_num_threads(1)
        commands = {
            "train": _train,
            "grow": _grow,
            "evaluate": _evaluate,
            "bench": _bench,
            "tasks": _tasks,
            "blueprints": _blueprints,
        }
        return commands[options.command](options)
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        return _explain(error)


def _train(options: argparse.Namespace) -> int:
    if options.task is not None:
        from esper.experiment.real import RealConfig, run_real

        run_real(
            RealConfig(
                task=options.task,
                rounds=options.rounds,
                envs=16 if options.envs is None else options.envs,
                rng_seed=options.rng_seed,
            )
        )
        return 0
    from esper.experiment.studies.study import StudyConfig, run_study

    run_study(
        StudyConfig(
            rounds=options.rounds,
            envs=256 if options.envs is None else options.envs,
            rng_seed=options.rng_seed,
            repeats=options.repeats,
            ablations=options.ablations,
            processes=options.processes,
        )
    )
    return 0


def _grow(options: argparse.Namespace) -> int:
    from esper.experiment.grow import GrowConfig, run_grow

    run_grow(
        GrowConfig(
            task=options.task,
            controller=options.controller,
            budget=options.budget,
            rng_seed=options.rng_seed,
            out=options.out,
        )
    )
    return 0


def _blueprints(options: argparse.Namespace) -> int:
    """What can be planted."""
    from rich.console import Console
    from rich.table import Table

    from esper.contracts.blueprints import BLUEPRINTS

    shown = Table()
    for column in ("name", "form", "size", "folds into the host"):
        shown.add_column(column, justify="right" if column == "size" else "left")
    for blueprint in BLUEPRINTS:
        form, merges = blueprint.form.name.lower(), "yes" if blueprint.merges else "no"
        shown.add_row(blueprint.name, form, str(blueprint.size), merges)
    Console().print(shown)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from esper.experiment.evaluate import EvaluateConfig, run_evaluation

    run_evaluation(
        EvaluateConfig(
            tasks=tuple(options.task),
            controllers=tuple(options.controller),
            hosts=options.hosts,
            rng_seed=options.rng_seed,
            processes=options.processes,
        ),
        as_json=options.json,
    )
    return 0


def _bench(options: argparse.Namespace) -> int:
    """Run a benchmark of the source checkout, where the naive twins live."""
    from importlib import import_module

    from esper.contracts.errors import BadInput

    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "timing.py").is_file():
        raise BadInput("benchmarks need a source checkout; clone the repository.")
    sys.path.insert(0, str(root))
    show = import_module("benchmarks.timing").show
    show(import_module(f"benchmarks.{options.name}").run(), as_json=options.json)
    return 0


def _tasks(options: argparse.Namespace) -> int:
    """What there is to learn, with sizes, or what to install for it."""
    from rich.console import Console
    from rich.table import Table

    from esper.tasks.catalogue import table

    shown = Table()
    columns = ("name", "rows", "inputs", "classes", "host", "parameters", "macs")
    for column in columns:
        shown.add_column(
            column, justify="left" if column in ("name", "host") else "right"
        )
    for row in table():
        if row["missing"]:
            shown.add_row(row["name"], "-", row["missing"])
        else:
            shown.add_row(*(_number(row[column]) for column in columns))
    Console().print(shown)
    return 0


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _explain(error: Exception) -> int:
    """One line for people; the traceback of our own bugs goes to a file."""
    from esper.contracts.errors import EsperError, RunTaken, StorageTrouble

    if isinstance(error, EsperError):
        print(f"esper: {error}", file=sys.stderr)
        codes = {RunTaken: 3, StorageTrouble: 5}
        return next(
            (code for kind, code in codes.items() if isinstance(error, kind)), 2
        )
    with tempfile.NamedTemporaryFile(
        "w", prefix="esper-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    print(
        f"esper: a bug in Esper: {type(error).__name__}; details in {file.name}",
        file=sys.stderr,
    )
    return 70


class _Parser(argparse.ArgumentParser):
    """Says what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """One line with the nearest right word, exit code 2."""
        named = re.search(r"(?:choice: '|arguments: )(-*[\w-]+)", message)
        near = get_close_matches(named[1], WORDS, n=1, cutoff=0.5) if named else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        self.exit(2, f"esper: {message}{hint} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="esper",
        description="A controller that watches a neural network train and grows it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser(
        "train",
        help="train Tamiyo on the simulated world, or on a real task",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument(
        "--rounds", type=_Whole(1, 1_000_000), default=None, help="rollouts and updates"
    )
    train.add_argument(
        "--envs",
        type=_Whole(1, 65_536),
        default=None,
        help="environments at once; 256 in the simulated world, 16 real hosts",
    )
    train.add_argument(
        "--task", default=None, help="a real task (see esper tasks), not the simulation"
    )
    train.add_argument(
        "--rng-seed",
        type=_Whole(0, 2**32 - 1),
        default=0,
        help="start of every random stream",
    )
    train.add_argument(
        "--repeats",
        type=_Whole(1, 1_000),
        default=1,
        help="train this many times, each from its own random seed",
    )
    train.add_argument(
        "--ablations",
        action="store_true",
        help="also train without memory and without relevance masks",
    )
    train.add_argument(
        "--processes", type=_Whole(1, 64), default=2, help="trainings at the same time"
    )
    _add_evaluate(commands)
    grow = commands.add_parser(
        "grow",
        help="grow one network of a task and write it",
        epilog=GROW_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grow.add_argument("--task", required=True, help="what it learns (see esper tasks)")
    grow.add_argument(
        "--controller",
        default="early",
        help="who decides: never, random, early, periodic, plateau, promise",
    )
    grow.add_argument(
        "--budget",
        type=_positive,
        default=4.0,
        help="parameters that may be added, as a multiple of the host's (4)",
    )
    grow.add_argument(
        "--out", type=Path, default=None, help="file for the grown network, NAME.pt2"
    )
    grow.add_argument(
        "--rng-seed", type=_Whole(0, 2**32 - 1), default=0, help="decides everything"
    )
    bench = commands.add_parser("bench", help="measure a hot path beside a naive twin")
    bench.add_argument("name", choices=BENCHMARKS, help="what to measure")
    bench.add_argument("--json", action="store_true", help="print data, not a table")
    commands.add_parser("tasks", help="list what networks can be grown on")
    commands.add_parser("blueprints", help="list what can be planted")
    return parser


def _add_evaluate(commands: "argparse._SubParsersAction[_Parser]") -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="judge controllers that do not learn on real tasks",
        description=EVALUATE_DESCRIPTION,
        epilog=EVALUATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME",
        help="a task (see esper tasks), as often as wanted; none: all of them",
    )
    evaluate.add_argument(
        "--controller",
        action="append",
        default=[],
        metavar="NAME",
        help="who decides, such as never or early; none: all of them",
    )
    evaluate.add_argument(
        "--hosts",
        type=_Whole(1, 65_536),
        default=16,
        metavar="N",
        help="hosts of each task (default: 16)",
    )
    evaluate.add_argument(
        "--rng-seed",
        type=_Whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="decides which hosts (default: 0)",
    )
    evaluate.add_argument(
        "--processes",
        type=_Whole(1, 64),
        default=2,
        metavar="N",
        help="controllers judged at the same time (default: 2)",
    )
    evaluate.add_argument("--json", action="store_true", help="print data, not tables")


def _positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


class _Whole:
    """Parses a whole number in a range, in plain ASCII digits."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) < 20:
            number = int(text)
            if self._low <= number <= self._high:
                return number
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {self._low} to {self._high}, got {text!r}"
        )


if __name__ == "__main__":
    sys.exit(main())
