"""Where metrics go: CSV, TensorBoard, W&B, MLflow, Trackio or an object of your own.

    sinks = Sinks(["csv", "wandb:logs", mine], info)
    sinks.log({"round/mean_return": 1.5}, step=2048)

A library is imported when its logger is opened. Metrics stay on this machine, unless
WANDB_MODE, MLFLOW_TRACKING_URI or Trackio's own variables say otherwise.
"""

import csv
import io
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeGuard, runtime_checkable

from pydantic import AfterValidator

from esper.contracts.errors import EsperWarning
from esper.contracts.messages import (
    described,
    one_line,
    quoted,
    refusal,
    short,
    unknown,
)
from esper.files import Disk, publish, read_text, storage
from esper.runs.run import invented_name

PROGRESS: Final = "progress.csv"
PROJECT: Final = "esper"
"""Project or experiment in W&B, MLflow and Trackio."""
MAX_CSV: Final = 1 << 30
"""Maximum number of bytes of a table that rows are added to."""
BATCH: Final = 100
"""Parameters that MLflow accepts at once."""
SECONDS_BETWEEN: Final = 10.0
"""Time between two calls of MLflow, each of which takes many milliseconds."""


@runtime_checkable
class SupportsLog(Protocol):
    """A logger of your own, such as a run of W&B."""

    def log(self, values: dict[str, float], step: int) -> object:
        """Record named values of one step."""
        ...


class Sink(SupportsLog, Protocol):
    """A logger that is opened here."""

    def close(self) -> None:
        """Finish writing and release resources."""
        ...


Log = Callable[[dict[str, float], int], object]
Logger = str | os.PathLike[str] | SupportsLog
"""A name such as "csv" or "csv:FOLDER", the folder of a run, or an object."""
Loggers = Logger | Sequence[Logger] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a sink needs to know about the run that it records."""

    name: str
    folder: Path
    """Folder of tables and TensorBoard files that have none of their own."""
    settings: Mapping[str, object]
    step: int = 0
    """Environment steps before the first round."""
    resumed: bool = False
    """Whether metrics after `step` may exist and are written again."""


class CsvSink:
    """`progress.csv`: one row for every step, one column for every name."""

    def __init__(self, folder: Path | None, info: RunInfo) -> None:
        self._path = _made(folder or info.folder) / PROGRESS
        self._names: list[str] = []
        rows = self._rows()
        kept = [row for row in rows if int(row["step"]) <= info.step]
        if len(kept) < len(rows):
            if not info.resumed:
                raise refusal(
                    f"{short(self._path)} has rows of another training, after step "
                    f"{info.step}. Give another folder."
                )
            self._write(kept)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row; a new name adds a column."""
        row = {"step": step, **values}
        if not row.keys() <= {*self._names}:
            rows = self._rows()
            self._names = [*dict.fromkeys((*self._names, *row))]
            self._write(rows)
        with (
            storage(self._path, "write"),
            self._path.open("a", newline="", encoding="utf-8") as stream,
        ):
            csv.DictWriter(stream, self._names).writerow(row)

    def close(self) -> None:
        """Do nothing: every row is written at once."""

    def _rows(self) -> list[dict[str, str]]:
        """All rows; refuses a file that has no steps."""
        if not self._path.exists():
            return []
        table = csv.DictReader(io.StringIO(read_text(self._path, MAX_CSV)))
        self._names, rows = [*(table.fieldnames or ())], [*table]
        if not all((row.get("step") or "").isdecimal() for row in rows):
            raise refusal(
                f"{short(self._path)} has no column of steps. Give another folder."
            )
        return rows

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._names)
        writer.writeheader()
        writer.writerows(rows)
        publish(Disk(), self._path, text.getvalue().encode())


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path | None, info: RunInfo) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        later = info.step + 1 if info.resumed else None
        self._writer = writer(
            str(folder or info.folder / "tensorboard"), purge_step=later
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write every value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class TrackerSink:
    """A run of a tracker with `log` and `finish`, such as W&B and Trackio."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log all values at once."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def wandb_sink(folder: Path | None, info: RunInfo) -> TrackerSink:
    """A run of W&B, offline unless WANDB_MODE says otherwise."""
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=info.name,
        config=dict(info.settings),
        dir=folder and _made(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        reinit="create_new",  # a run that is open already stays as it is
    )
    return TrackerSink(run)


def trackio_sink(folder: Path | None, info: RunInfo) -> TrackerSink:
    """A run of Trackio, in its own folder on this machine."""
    if folder is not None:  # Trackio reads the variable when it is imported
        os.environ["TRACKIO_DIR"] = str(_made(folder))
    trackio: Any = import_module("trackio")
    used = Path(import_module("trackio.utils").TRACKIO_DIR).absolute()
    if folder is not None and used != folder.absolute():
        raise refusal(
            f"Trackio already uses {short(used)} in this process. Give its folder "
            "before Trackio is imported, or none."
        )
    run = trackio.init(
        project=PROJECT, name=info.name, config=dict(info.settings), embed=False
    )
    return TrackerSink(run)


class MlflowSink:
    """A run of MLflow, in a local SQLite file unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path | None, info: RunInfo) -> None:
        place, where = _made(folder or Path()), os.environ.get(MLFLOW_URI)
        if where is None:  # its telemetry would use the network
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        client = import_module("mlflow").MlflowClient(
            where or f"sqlite:///{place / 'mlflow.db'}"
        )
        found = client.get_experiment_by_name(PROJECT)
        files = None if where else (place / "mlartifacts").as_uri()
        experiment = (
            found.experiment_id if found else client.create_experiment(PROJECT, files)
        )
        run = client.create_run(experiment, run_name=info.name)
        self._client, self._id = client, run.info.run_id
        self._entities = import_module("mlflow.entities")
        self._metrics: list[Any] = []  # a call costs more than its metrics
        self._sent_at = time.monotonic()
        kind = self._entities.Param
        params = [kind(name, str(value)) for name, value in info.settings.items()]
        for part in _batches(params):
            client.log_batch(self._id, params=part)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep all values, and send what is kept every few seconds."""
        now, kind = int(time.time() * 1000), self._entities.Metric
        # MLflow refuses some signs in names.
        named = {re.sub(r"[^\w\-. /:]", "_", name): values[name] for name in values}
        self._metrics += [kind(name, value, now, step) for name, value in named.items()]
        if time.monotonic() - self._sent_at > SECONDS_BETWEEN:
            self._send()

    def close(self) -> None:
        """Send the rest and mark the run as finished."""
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        for part in _batches(self._metrics):
            self._client.log_batch(self._id, metrics=part)
        self._metrics, self._sent_at = [], time.monotonic()


MLFLOW_URI: Final = "MLFLOW_TRACKING_URI"
SINKS: Final[Mapping[str, Callable[[Path | None, RunInfo], Sink]]] = {
    "csv": CsvSink,
    "mlflow": MlflowSink,
    "tensorboard": TensorBoardSink,
    "trackio": trackio_sink,
    "wandb": wandb_sink,
}
"""Loggers by name; all but csv need the package of that name."""


def parse_logger(text: str) -> tuple[str, Path | None]:
    """Name and folder of a logger such as "csv" or "csv:FOLDER"."""
    name, colon, folder = text.partition(":")
    if name not in SINKS:
        raise unknown("there is no logger", name, SINKS)
    if colon and not (folder and folder.isprintable()):
        raise refusal(f"logger {quoted(text)} needs a folder after the colon.")
    return name, Path(folder) if colon else None


def _checked(text: str) -> str:
    parse_logger(text)
    return text


LoggerName = Annotated[str, AfterValidator(_checked)]
"""Name of a logger in settings."""


def require_loggers(loggers: Loggers) -> list[Logger]:
    """Loggers as a list; refuses unknown ones and those that are not installed."""
    if loggers is None:
        return []
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        loggers = [loggers]
    for each in loggers:
        if isinstance(each, str) and not is_folder(each):
            name, _ = parse_logger(each)
            if name != "csv" and find_spec(name) is None:
                raise refusal(f"{name} is not installed. Run pip install {name}.")
        elif not isinstance(each, str | os.PathLike | SupportsLog):
            raise refusal(
                "logger must be a name, a folder or an object with log(values, step), "
                f"got {quoted(each)}."
            )
    return [*loggers]


def resumed_loggers(
    before: Sequence[str], given: Sequence[str] | None
) -> tuple[str, ...]:
    """Loggers of a resumed run; only `given` ones may name a folder to write to."""
    for each in before if given is None else ():
        if parse_logger(each)[1] is not None:
            raise refusal(
                f"use --logger {each} to resume: a run's file alone chooses no folder "
                "to write to."
            )
    loggers = before if given is None else given
    require_loggers([*loggers])
    return tuple(loggers)


def is_folder(logger: Logger) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a logger is the folder of a run; refuses what is almost a name."""
    if not isinstance(logger, str):
        return isinstance(logger, os.PathLike)
    name = logger.partition(":")[0]
    if name not in SINKS and get_close_matches(name, SINKS, cutoff=0.8):
        raise unknown("there is no logger", name, SINKS)
    return name not in SINKS


def split_loggers(
    loggers: Sequence[Logger],
) -> tuple[list[Path], Path, list[str | SupportsLog]]:
    """Folders of runs, a folder for loggers without one, and those other loggers.

    Each folder gets a table of metrics. Without folders it is a new one in `logs`.
    """
    folders = [Path(each).expanduser() for each in loggers if is_folder(each)]
    others = [
        each
        for each in loggers
        if isinstance(each, str | SupportsLog) and not is_folder(each)
    ]
    if folders:
        tables = [f"csv:{folder}" for folder in folders]
        others = [*tables, *(each for each in others if each != "csv")]
    return folders, folders[0] if folders else Path("logs") / invented_name(), others


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an error into a warning: a logger must not end a training."""
    try:
        yield
    except Exception as error:
        text = f"{what} is not written any more: {described(error)}."
        warnings.warn(one_line(text), EsperWarning, stacklevel=4)


class Sinks:
    """Several loggers as one sink; closes those that it has opened itself.

    One that fails is not used any more, with a warning.
    """

    def __init__(self, loggers: Sequence[str | SupportsLog], info: RunInfo) -> None:
        self._logs: list[tuple[str, Log]] = []
        with ExitStack() as opened:
            for logger in loggers:
                if isinstance(logger, str):
                    name, folder = parse_logger(logger)
                    sink = SINKS[name](folder, info)
                    opened.callback(sink.close)
                    self._logs.append((quoted(logger), sink.log))
                else:
                    self._logs.append((type(logger).__name__, logger.log))
            self._opened = opened.pop_all()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record named values of one step in every logger."""
        given, self._logs = self._logs, []
        for name, log in given:
            with warned(f"logger {name}"):
                log({**values}, step)
                self._logs.append((name, log))

    def close(self) -> None:
        """Finish writing."""
        with warned("a logger"):
            self._opened.close()


def _made(folder: Path) -> Path:
    """The absolute path of a folder, which exists from now on."""
    with storage(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def _batches(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), BATCH):
        yield entries[start : start + BATCH]
