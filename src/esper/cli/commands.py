"""All commands: their options, and what they do with them.

What is heavy is imported by the command that needs it, so that help is instant.
"""

import json
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from esper.cli.arguments import (
    RNG_SEED,
    add_option,
    add_run,
    add_runs,
    add_settings,
    add_workers,
    file,
    folder,
    path_text,
    positive,
    whole,
)
from esper.contracts.errors import InvalidInputError
from esper.workers.deadline import TIMEOUT

if TYPE_CHECKING:
    from esper.tamiyo.registry import Maker
    from esper.training.callbacks import ConsoleProgress
    from esper.training.recovery import RunResult
    from esper.workers.jobs import Workers

NEWEST: Final = "latest"
"""The controller of the newest finished training; no run can be called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of `esper`."""

    run: Callable[[Namespace], object]
    """Carries it out; returns an exit code, or None for 0."""
    help: str
    examples: str
    options: Callable[[ArgumentParser], None] | None = None
    """Adds its options."""
    description: str = ""
    """If it is longer than the help."""
    settings: bool = False
    """Whether its options are settings, which take long to import."""
    torch: bool = True
    """Whether it needs torch."""
    environments: bool = False
    """Whether it calls environments, which may hang or end their process."""


def train_options(parser: ArgumentParser) -> None:
    """The settings of a training, presets and files of them, and `--resume`."""
    parser.add_argument(
        "--resume",
        default=SUPPRESS,
        metavar="RUN",
        help="resume an interrupted run, given by name or folder",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also show KL divergence, entropy and speed of every round",
    )
    add_workers(parser)
    config_options(parser)


def config_options(parser: ArgumentParser) -> None:
    """The settings of a training, and presets and files of them."""
    from esper.runs.train_config import DEFAULT, PRESETS

    parser.add_argument(
        "--preset",
        default=SUPPRESS,
        metavar="NAME",
        help=f"base settings: {', '.join(PRESETS)} (default: {DEFAULT})",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=SUPPRESS,
        metavar="FILE",
        help="TOML file with settings that replace those of the preset; can be given "
        "several times",
    )
    add_settings(parser, PRESETS[DEFAULT])


def train(options: Namespace) -> int:
    """Begin a run, or go on with one, and write its report."""
    from esper.runs.train_config import resolve
    from esper.training.callbacks import ConsoleProgress

    given = _given(options)
    console = ConsoleProgress(details=given.pop("verbose"))
    start_workers = _workers(given)
    if "resume" in given:
        return _resume(given, console, start_workers)
    config = resolve(given, draw_seed=True)
    from esper.training.train import begin_run

    with start_workers() as workers:
        return _end(begin_run(config, [console], workers))


def _workers(given: dict[str, Any]) -> Callable[[], "Workers"]:
    """What starts those who work; takes its options out of those that are given.

    They come when all else is known to be right: a cluster takes its time.
    """
    from esper.workers.jobs import DEADLINE, available_cores, workers

    count, ray = given.pop("workers"), given.pop("ray")
    if count is None:
        count = 0 if ray else available_cores()
    deadline = given.pop("deadline") or DEADLINE
    return partial(workers, count, ray=ray, deadline=deadline)


def _resume(
    given: dict[str, Any],
    console: "ConsoleProgress",
    start_workers: Callable[[], "Workers"],
) -> int:
    from esper.contracts.messages import quoted, refusal
    from esper.runs.run import Run, find_run
    from esper.training.train import resume_run, settings_of

    name, root = given.pop("resume"), Path(given.pop("runs", "runs"))
    if given:
        raise refusal(
            f"--{min(given)} cannot be combined with --resume, which keeps the run's "
            "settings. Omit it, or start a new run with --start_from "
            f"{quoted(name)}."
        )
    path = find_run(name, root)
    run = Run.read(path)
    settings_of(run)  # refuses other kinds of runs
    if run.finished is not None:
        _say(f"Run {run.name} is already complete. See: esper report {path}")
        return 0
    with start_workers() as workers:
        return _end(resume_run(path, [console], workers))


def _end(result: "RunResult") -> int:
    """Print the results and write the report."""
    from esper.evaluation.summary import print_training
    from esper.report import write_report

    if result.signal is not None:
        return _interrupted(result, "train")
    print_training(result.path)
    _say(f"The report is in {write_report(result.path)}.")
    return 0


def _interrupted(result: "RunResult", command: str) -> int:
    from esper.runs.run import OWN_RECORDINGS, Run

    again = f"esper {command} --resume {quote(str(result.path))}"
    if command == "ppo":
        from esper.rl.training import ppo_settings_of, resume_command

        again = resume_command(result.path, ppo_settings_of(Run.read(result.path)).env)

    saved = Run.read(result.path).checkpoints().steps()
    when, kept = f"after round {result.rounds}", "everything is saved"
    if not saved:
        when, kept = "before round 1", "pretraining will be repeated"
        if recorded := len([*(result.path / OWN_RECORDINGS).glob("*.safetensors")]):
            kept = f"{recorded} recordings are kept, {kept}"
    elif max(saved) < result.rounds:
        kept = f"rounds after {max(saved)} will be repeated"
    _say(f"Interrupted {when}; {kept}. Resume with: {again}")
    return 128 + (result.signal or 0)


def config(options: Namespace) -> None:
    """Print the resolved settings of a training."""
    from esper.runs.settings import as_toml
    from esper.runs.train_config import resolve

    print(as_toml(resolve(_given(options)), explain=True), end="")


def grow_options(parser: ArgumentParser) -> None:
    """Task, controller, and where the network goes."""
    parser.add_argument(
        "--task", required=True, metavar="NAME", help="task to learn (see esper tasks)"
    )
    deciders = (
        "a rule such as never or early (see esper evaluate --help), tamiyo (trained, "
        "comes with Esper), latest (from the newest finished run), a run, or the "
        "folder of an exported controller"
    )
    added = "maximum added parameters, as a multiple of the network's"
    out = "output file, NAME.pt2 (default: TASK-CONTROLLER.pt2)"
    add_option(parser, "--controller", path_text, "early", "NAME", deciders)
    add_option(parser, "--budget", positive, 4.0, "X", added)
    add_option(parser, "--out", file, None, "FILE", out)
    add_option(parser, "--rng-seed", RNG_SEED, 0, "N", "random seed")
    add_runs(parser)


def grow(options: Namespace) -> None:
    """Grow one network, write it and print its history."""
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
    _say(f"The network is in {out}; it loads without Esper: torch.export.load.")


def _controller(name: str, runs: Path) -> "Maker | str":
    """The controller that a name stands for."""
    from esper.runs.controllers import find_controller, newest_controller
    from esper.tamiyo.registry import NAMES

    if name in NAMES:
        return name
    if name == NEWEST:
        return newest_controller(runs)
    try:
        return find_controller(name, runs)
    except InvalidInputError as error:
        known = ", ".join((*NAMES, NEWEST))
        raise InvalidInputError(f"{error} Other controllers: {known}.") from None


def evaluate_options(parser: ArgumentParser) -> None:
    """The settings of an evaluation, some by a shorter name too."""
    from esper.evaluation.evaluate import EvaluateConfig

    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    add_workers(parser)
    short = {"tasks": "task", "controllers": "controller", "world.rent": "rent"}
    add_settings(parser, EvaluateConfig(), short)


def evaluate(options: Namespace) -> None:
    """Judge, print and store."""
    from esper.evaluation.evaluate import EvaluateConfig, run_evaluation
    from esper.report import write_report
    from esper.runs.settings import construct, parsed_options

    given = _given(options)
    as_json = given.pop("json")
    start_workers = _workers(given)
    settings = construct(EvaluateConfig, *parsed_options(EvaluateConfig, given))
    with start_workers() as workers:
        page = write_report(run_evaluation(settings, as_json=as_json, workers=workers))
    if not as_json:
        _say(f"The report is in {page}.")


def record_options(parser: ArgumentParser) -> None:
    """What is recorded, and where."""
    parser.add_argument("folder", type=folder, metavar="FOLDER", help="output folder")
    number = whole(1, 1_000_000)
    for name, kind, default, metavar, text in (
        ("--stop", str, "anytime", "WHEN", "when episodes are scored: end or anytime"),
        ("--tasks", number, 100, "N", "number of tasks to draw"),
        ("--hosts", number, 1, "N", "hosts per task"),
        ("--scripts", whole(2, 1_000), 20, "N", "growth scripts per host"),
        ("--rng_seed", RNG_SEED, 0, "N", "random seed of the tasks"),
    ):
        add_option(parser, name, kind, default, metavar, text)
    add_workers(parser)


def record(options: Namespace) -> None:
    """Record what is missing."""
    from esper.runs.progress import Progress
    from esper.training.recordings import RecordConfig, record

    names = ("stop", "tasks", "hosts", "scripts", "rng_seed")
    settings = RecordConfig(**{name: getattr(options, name) for name in names})
    with _workers(vars(options))() as workers, Progress(unit="task") as progress:

        def show(done: int, total: int) -> None:
            progress.update("recording", done, total, "done", workers.active_jobs)

        record(settings, options.folder, workers, show)
    _say(f"{options.tasks} tasks are in {options.folder}.")


def report_options(parser: ArgumentParser) -> None:
    """The run, and where the page goes."""
    add_run(parser)
    add_option(
        parser,
        "--out",
        file,
        None,
        "FILE",
        "output file (default: report.html of the run)",
    )


def report(options: Namespace) -> None:
    """Write the page and print where it is."""
    from esper.report import write_report
    from esper.runs.run import find_run

    page = write_report(find_run(options.run, Path(options.runs)), options.out)
    _say(f"The report is in {page}.")


def runs_options(parser: ArgumentParser) -> None:
    """The folder of runs."""
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def runs(options: Namespace) -> None:
    """Print a table of all runs, or data."""
    from esper.runs.run import Run

    found = Run.list(Path(options.runs))
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        print(f"No runs in {options.runs!r}. Start one with: esper train")
    else:
        rows = [
            (
                each.name,
                f"{each.state}: {each.trouble}" if each.trouble else each.state,
                "-" if each.step is None else str(each.step),
                "-" if each.score is None else f"{each.score:.4f}",
                f"{each.size / 1e6:.1f} MB",
            )
            for each in found
        ]
        _print_table(("name", "state", "rounds", "return", "size"), rows, left=2)


def export_options(parser: ArgumentParser) -> None:
    """The run, what to write and where."""
    add_run(parser)
    parser.add_argument(
        "--format",
        choices=("parquet", "csv", "controller"),
        default="parquet",
        help="tables of the run as parquet (requires DuckDB) or csv, or the trained "
        "controller (default: parquet)",
    )
    add_option(
        parser,
        "--out",
        folder,
        None,
        "FOLDER",
        "output folder (default: export of the run)",
    )


def export(options: Namespace) -> None:
    """Write files and print where they are."""
    from esper.runs.controllers import export_controller
    from esper.runs.run import STORE, find_run
    from esper.runs.store import export

    path = find_run(options.run, Path(options.runs))
    out = path / "export" if options.out is None else options.out
    if options.format == "controller":
        export_controller(path, out)
        _say(f"The controller is in {out}.")
    else:
        files = export(path / STORE, out, options.format)
        _say(f"{len(files)} tables are in {out}.")


def tasks(options: Namespace) -> None:
    """Print all tasks with their sizes, or what to install for them."""
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
    _print_table(columns, rows, left=2)


def blueprints(options: Namespace) -> None:
    """Print what can be planted."""
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
    _print_table(("name", "form", "folds into the host", "size"), rows, left=3)


def completion_options(parser: ArgumentParser) -> None:
    """The name of the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="your shell")


def completion(options: Namespace) -> None:
    """Print the script, with the settings of all commands that are installed."""
    from importlib.util import find_spec

    import shtab

    from esper.cli import parser

    known = {*COMMANDS} - ({"ppo"} if find_spec("gymnasium") is None else set())
    print(shtab.complete(parser(known), options.shell))


def _given(options: Namespace) -> dict[str, Any]:
    """Options that were given, by name."""
    given = vars(options)
    return {name: value for name, value in given.items() if name != "command"}


def _say(text: str) -> None:
    """Print a line in which a path stands, which may hold anything."""
    from esper.contracts.messages import printable

    print(printable(text))


def _print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int
) -> None:
    """Print texts as they are; all columns but some at the left end with numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table()
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        shown.add_row(*map(Text, row))
    Console().print(shown)


def ppo_options(parser: ArgumentParser) -> None:
    """The environment, the settings of a run in it, and `--resume`."""
    from esper.rl.training import PPORunConfig

    parser.add_argument(
        "env_id", nargs="?", default=SUPPRESS, metavar="ENV_ID", help="Gymnasium id"
    )
    parser.add_argument(
        "--resume",
        default=SUPPRESS,
        metavar="RUN",
        help="resume an interrupted run, given by name or folder",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: allow the import of the module in the run's environment "
        "id (module:Id-v0). Alternatively, repeat --env. A run folder alone cannot "
        "import code",
    )
    add_settings(parser, PPORunConfig())


def ppo(options: Namespace) -> int:
    """Learn an environment in a run of its own, or go on with one."""
    from esper.contracts.messages import refusal
    from esper.rl.training import (
        AGENT,
        PPORunConfig,
        begin_ppo,
        ppo_settings_of,
        resume_ppo,
    )
    from esper.runs.run import Run, find_run
    from esper.runs.settings import construct, parsed_options
    from esper.training.callbacks import ConsoleProgress

    given = _given(options)
    trust = given.pop("trust")
    if "env_id" in given:
        given.setdefault("env", given.pop("env_id"))
    if "resume" in given:
        path = find_run(given.pop("resume"), Path(given.pop("runs", "runs")))
        env = given.pop("env", None)
        kept = {name: given.pop(name) for name in ("env_timeout",) if name in given}
        if given:
            raise refusal(
                f"--{min(given)} cannot be combined with --resume, which keeps the "
                "run's settings. Omit it."
            )
        run = Run.read(path)
        ppo_settings_of(run)  # refuses other kinds of runs
        if run.finished is not None:
            _say(f"Run {run.name} is already complete. See: esper report {path}")
            return 0
        console = ConsoleProgress(details=True)
        more, _ = parsed_options(PPORunConfig, kept)
        result = resume_ppo(path, [console], env=env, trust=trust, **more)
    else:
        if "env" not in given:
            raise refusal("expected the id of an environment, or --resume RUN.")
        config = construct(PPORunConfig, *parsed_options(PPORunConfig, given))
        result = begin_ppo(config, [ConsoleProgress(details=True)])
    if result.signal is not None:
        return _interrupted(result, "ppo")
    from esper.report import write_report

    _say(f"The agent is in {result.path / AGENT}.")
    _say(f"The report is in {write_report(result.path)}.")
    return 0


def doctor_options(parser: ArgumentParser) -> None:
    """The environment, and how long to play it."""
    parser.add_argument("env", type=path_text, metavar="ENV_ID", help="Gymnasium id")
    add_option(parser, "--steps", whole(1, 10**9), 2_000, "N", "number of steps")
    add_option(
        parser, "--rng-seed", RNG_SEED, 0, "N", "random seed of resets and actions"
    )
    seconds = "time limit of one environment call in seconds"
    add_option(parser, "--timeout", positive, TIMEOUT, "X", seconds)


def doctor(options: Namespace) -> int:
    """Say what in an environment will hurt learning."""
    from esper.rl.doctor import examine

    findings = examine(
        options.env, options.steps, options.rng_seed, timeout=options.timeout
    )
    for finding in findings:
        _say(str(finding))
    if any(finding.is_fault for finding in findings):
        return 1
    _say(f"{options.env}: no faults found in {options.steps} steps.")
    return 0


COMMANDS: Final = {
    "train": Command(
        run=train,
        options=train_options,
        settings=True,
        help="train a controller and compare it with rules, or resume a run",
        description="""\
Train Tamiyo, the controller that decides when and where networks grow. At the end,
compare it with rule-based controllers and static networks, and write a report.""",
        examples="""\
Write values as in TOML. Text needs no quotes, a list of names no brackets.
A range is [low, high]. Write none for no value.

examples:
  esper train                          default settings, about five minutes
  esper train --preset quick           about one minute
  esper train --tasks letter,digits --budget.minutes 10
  esper train --tasks letter --world.rent "[0.0, 0.05]"
  esper train --config mine.toml --learner.ppo.learning_rate 1e-3
""",
    ),
    "grow": Command(
        run=grow,
        options=grow_options,
        help="grow one network on a task and save it",
        examples="""\
examples:
  esper grow --task letter
  esper grow --task letter --controller tamiyo
  esper grow --task mnist1d --controller runs/NAME --out grown.pt2

The file loads without Esper: torch.export.load("grown.pt2").module()
""",
    ),
    "evaluate": Command(
        run=evaluate,
        options=evaluate_options,
        settings=True,
        help="compare controllers and static networks on the same hosts",
        description="""\
Compare controllers on real tasks. All of them grow the same hosts (initial networks).

The return is the gain in validation score minus rent for added parameters. With
--world.relative true, it is the fraction of the errors without growth that was removed,
minus rent. The test score uses rows that decisions and rewards do not use.

Rules: never, random, early, periodic, doubling, large-then-cut, plateau, by-rent,
timetable-by-rent. Trained controllers: tamiyo (comes with Esper), a run, or the folder
of an exported controller. Controls: static (a plain network of the final size of the
reference) and longer (no growth, but as much training compute as the reference). The
reference is the first trained controller, otherwise early.""",
        examples="""\
examples:
  esper evaluate                       all tasks, all rules, static
  esper evaluate --task letter,digits --hosts 32
  esper evaluate --controller never,early,static,tamiyo
  esper evaluate --controller never,early,static,runs/NAME
  esper evaluate --json > figures.json print JSON
""",
    ),
    "ppo": Command(
        run=ppo,
        options=ppo_options,
        settings=True,
        environments=True,
        help="train PPO on a Gymnasium environment, or resume a run",
        examples="""\
examples:
  esper ppo CartPole-v1
  esper ppo CartPole-v1 --memory mingru --total_steps 300000 --num_envs 64
  esper ppo my_package:Mine-v0
  esper ppo --resume RUN
  esper ppo --resume RUN --env my_package:Mine-v0
""",
    ),
    "doctor": Command(
        run=doctor,
        options=doctor_options,
        environments=True,
        help="find problems in a Gymnasium environment",
        description="""\
Step an environment with random legal actions and report problems that prevent learning.
Each finding names the step and a fix. The exit code is 1 if there are findings.""",
        examples="""\
examples:
  esper doctor CartPole-v1
  esper doctor my_package:Mine-v0 --steps 10000
""",
    ),
    "record": Command(
        run=record,
        options=record_options,
        help="record how random hosts grow, to pretrain a controller",
        description="Grow each randomly drawn host under many fixed scripts that share "
        "random numbers, and save the observations and scores. Pretrain on them with "
        "esper train --start_from FOLDER. If interrupted, run the same command again.",
        examples="""\
examples:
  esper record recordings/anytime --tasks 200
  esper record recordings/end --stop end --tasks 200 --rng_seed 1
""",
    ),
    "report": Command(
        run=report,
        options=report_options,
        help="write the report of a run as an HTML page",
        examples="""\
examples:
  esper report NAME                    writes runs/NAME/report.html and plots
  esper report runs/NAME --out page.html
""",
    ),
    "runs": Command(
        run=runs,
        torch=False,
        options=runs_options,
        help="list runs with state, rounds, return and size",
        examples="""\
examples:
  esper runs
  esper runs --json --runs /data/runs  JSON, for another folder
""",
    ),
    "export": Command(
        run=export,
        options=export_options,
        help="export the tables of a run, or its trained controller",
        examples="""\
examples:
  esper export NAME                    writes runs/NAME/export/*.parquet
  esper export NAME --format csv --out tables
  esper export NAME --format controller --out tamiyo

An exported controller is two files: the policy of the best checkpoint, and a
manifest with its training settings.
""",
    ),
    "config": Command(
        run=config,
        options=config_options,
        settings=True,
        help="print all training settings with descriptions",
        examples="""\
examples:
  esper config > mine.toml             then: esper train --config mine.toml
  esper config --preset thorough --tasks letter
""",
    ),
    "tasks": Command(
        run=tasks,
        help="list the tasks",
        examples="""\
examples:
  esper tasks
  esper grow --task letter             grow a network on one of them
""",
    ),
    "blueprints": Command(
        run=blueprints,
        torch=False,
        help="list the blueprints (kinds of growth)",
        examples="""\
examples:
  esper blueprints
  esper train --world.blueprints widen_8,widen_16
                                       train with these blueprints only
""",
    ),
    "completion": Command(
        run=completion,
        options=completion_options,
        help="print a shell completion script",
        examples="""\
examples:
  eval "$(esper completion bash)"                       in ~/.bashrc
  esper completion zsh > ~/.zfunc/_esper                with fpath+=(~/.zfunc)
""",
    ),
}
