"""`esper grow`, `esper tasks` and `esper blueprints`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from esper.cli.arguments import (
    RNG_SEED,
    Command,
    add_option,
    add_runs,
    file_path,
    path_text,
    positive_float,
)
from esper.cli.output import print_line, print_table
from esper.contracts.errors import InvalidInputError

if TYPE_CHECKING:
    from esper.tamiyo.registry import Maker

LATEST: Final = "latest"
"""Stands for the controller of the newest finished run. No run can have this name."""


def add_grow_options(parser: ArgumentParser) -> None:
    """Add the options of `esper grow`."""
    parser.add_argument(
        "--task", required=True, metavar="NAME", help="task to learn (see esper tasks)"
    )
    names = (
        "a rule such as early (see esper evaluate --help); tamiyo: the controller that "
        "comes with Esper; latest: the one of the newest finished run; or a run, or "
        "the folder of an exported controller"
    )
    added = "maximum added parameters, as a multiple of the initial network's"
    out = "output file, must end in .pt2 (default: TASK-CONTROLLER.pt2)"
    add_option(parser, "--controller", path_text, "early", "NAME", names)
    add_option(parser, "--budget", positive_float, 4.0, "X", added)
    add_option(parser, "--out", file_path, None, "FILE", out)
    add_option(
        parser,
        "--rng-seed",
        RNG_SEED,
        0,
        "N",
        "random seed of the network and its training",
    )
    add_runs(parser)


def grow(options: Namespace) -> None:
    """Grow one network, save it and print its history."""
    from esper.fitting import check_free, free_name, grow, summary_lines, write
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
    print_line(f"The network is in {out}. Load it with torch.export.load.")


def _controller(name: str, runs: Path) -> "Maker | str":
    """The controller with this name: a rule, `latest`, a run or a folder."""
    from esper.runs.controllers import find_controller, newest_controller
    from esper.tamiyo.registry import NAMES

    if name in NAMES:
        return name
    if name == LATEST:
        return newest_controller(runs)
    try:
        return find_controller(name, runs)
    except InvalidInputError as error:
        known = ", ".join((*NAMES, LATEST))
        raise InvalidInputError(f"{error} Other controllers: {known}.") from None


def tasks(options: Namespace) -> None:
    """Print all tasks with their sizes, or the packages that they need."""
    from esper.tasks.catalogue import table

    columns = ("name", "host", "rows", "inputs", "classes", "parameters", "macs")
    rows = [
        (row["name"], row["missing"])
        if row["missing"]
        else [
            f"{value:,}" if isinstance(value, int) else str(value)
            for value in (row[column] for column in columns)
        ]
        for row in table()
    ]
    print_table(columns, rows, left=2)


def blueprints(options: Namespace) -> None:
    """Print all blueprints."""
    from esper.contracts.blueprints import BLUEPRINTS

    rows = [
        (
            each.name,
            each.form.name.lower(),
            "yes" if each.merges else "no",
            f"+{each.share:.0%}" if each.share else str(each.size),
        )
        for each in BLUEPRINTS
    ]
    print_table(("name", "form", "folds into the host", "size"), rows, left=3)


GROW: Final = Command(
    run=grow,
    options=add_grow_options,
    help="grow one network on a task and save it",
    examples="""\
examples:
  esper grow --task letter
  esper grow --task letter --controller tamiyo
  esper grow --task mnist1d --controller runs/NAME --out grown.pt2

To load the file, Esper is not needed: torch.export.load("grown.pt2").module()
""",
)

TASKS: Final = Command(
    run=tasks,
    help="list the tasks",
    examples="""\
examples:
  esper tasks
  esper grow --task letter             grow a network on one of them
""",
)

BLUEPRINTS: Final = Command(
    run=blueprints,
    torch=False,
    help="list the blueprints (kinds of growth)",
    examples="""\
examples:
  esper blueprints
  esper train --world.blueprints widen_8,widen_16
                                       train with these blueprints only
""",
)
