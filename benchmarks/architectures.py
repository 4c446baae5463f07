"""Do many architectures grow in every kind of training loop, and is it kept?

Every network is grown in every loop: one seed takes part at once, another trains in
shadow passes first. Then it is tried whether

    grow      the seed has learnt and changes the output
    save      `esper.save`, or the checkpoint of the framework, is written
    load      a fresh network becomes the saved one, to the bit
    resume    training goes on from a save as it would have without, to the bit
    export    a plain module answers alike and has as many parameters as were counted
    onnx      so does ONNX Runtime (in the plain loop: the network is what matters)

A cell says "works" if all of it does; what is refused, or fails, is named below. What
raises is tried without a Grower too, since some of it is impossible for everybody.
"""

import copy
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import esper
from benchmarks import timing
from benchmarks.timing import Report
from benchmarks.zoo import ARCHITECTURES, Architecture
from esper.contracts.errors import EsperError
from esper.grower import Grower
from esper.growth.analysis.tracing import eval_outputs

BATCHES, MORE = 5, 2
"""Batches until a network is saved, and after that."""
OPTIONS = {"controller": "never", "tick": 2, "seeds_per_slot": 2}
CLOSE = 1e-3
"""Relative difference between a network and its export."""
Found = dict[str, str]
"""What came of every action: "works", or what was said."""


class NoGrower:
    """Stands for a Grower in a loop that is tried without one."""

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The user's own loss."""
        return closure()

    def follow(self, average: nn.Module) -> None:
        """Nothing grows."""


class Run:
    """One network in the user's own loop, which may be tried without growing."""

    loop = "plain loop"

    def __init__(self, architecture: Architecture, *, growing: bool = True) -> None:
        self.architecture, self.growing = architecture, growing
        self.model = architecture.make()
        self.called: Callable[..., Any] = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.attach()

    def attach(self) -> None:
        """Build the Grower."""
        self.grower = self.make_grower(self.model)

    def make_grower(self, model: nn.Module) -> Any:  # noqa: ANN401
        """A Grower over the network, or over its wrapper."""
        if not self.growing:
            return NoGrower()
        example = self.architecture.example()
        slot = self.architecture.slot
        slots = slot if slot == "auto" else [slot]
        return Grower(model, self.optimizer, slots, example=example, **OPTIONS)

    def train(self, batches: range) -> None:
        """Batches by number; seeds are planted before the first and third."""
        for index in batches:
            first, *_, last = self.grower.model.slots
            if index in (0, 2):
                tempo = "FAST" if index else "AT_ONCE"
                kind = self.architecture.blueprint
                self.grower.plant(last if index else first, kind, tempo=tempo)
            self.step(self.batch(index))
        self.grower.step(metric=0.5)

    def batch(self, index: int) -> dict[str, Tensor]:
        """A batch by its number."""
        return self.architecture.batch(index)

    def step(self, batch: dict[str, Tensor]) -> None:
        """One step of the optimiser."""
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batch: dict[str, Tensor], share: float = 1.0) -> None:
        """The gradients of a batch."""
        loss = self.grower.loss(lambda: self.called(**batch)["loss"] * share)
        loss.backward()

    @property
    def shipped(self) -> nn.Module:
        """The network that is saved."""
        return self.model


class Amp(Run):
    """Autocast to bfloat16."""

    loop = "AMP"

    def backward(self, batch: dict[str, Tensor], share: float = 1.0) -> None:
        """The same under autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            super().backward(batch, share)


class Accumulation(Run):
    """Two halves of a batch per step."""

    loop = "accumulation"

    def step(self, batch: dict[str, Tensor]) -> None:
        """Both halves, then the step."""
        rows = len(next(iter(batch.values()))) // 2
        for part in (slice(rows), slice(rows, None)):
            self.backward({name: t[part] for name, t in batch.items()}, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ema(Run):
    """An average that follows, and is what is saved."""

    loop = "EMA"

    def attach(self) -> None:
        """The average is made after the Grower."""
        super().attach()
        average = get_ema_multi_avg_fn(0.5)
        self.average = AveragedModel(self.model, multi_avg_fn=average)
        self.grower.follow(self.average)

    def step(self, batch: dict[str, Tensor]) -> None:
        """A step, and the average."""
        super().step(batch)
        self.average.update_parameters(self.model)

    @property
    def shipped(self) -> nn.Module:
        """The average."""
        module: nn.Module = self.average.module
        return module


class Compiled(Run):
    """Compiled after the Grower was attached."""

    loop = "torch.compile"

    def attach(self) -> None:
        """The user calls the compiled one."""
        super().attach()
        torch.compiler.reset()
        self.called = torch.compile(self.model, backend="eager")
        self.called(**self.batch(0))  # a graph without seeds


class Ddp(Run):
    """One rank of two."""

    loop = "DDP x 2"

    def attach(self) -> None:
        """The Grower is given the wrapper."""
        # Some layers of the hosts are not used for every kind of output.
        wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.called, self.grower = wrapped, self.make_grower(wrapped)

    def batch(self, index: int) -> dict[str, Tensor]:
        """This rank's half."""
        whole, rank = super().batch(index), dist.get_rank()
        rows = len(next(iter(whole.values()))) // 2
        return {n: t[rank * rows : (rank + 1) * rows] for n, t in whole.items()}


OWN = (Run, Amp, Accumulation, Ema, Compiled)
LOOPS = (
    *(kind.loop for kind in (*OWN, Ddp)),
    *("Lightning", "HF Trainer", "from_pretrained"),
)


def run(
    only: str = "", loops: str = "", skip_onnx: bool = False, table: str = ""
) -> Report:
    """Try everything.

    Args:
        only: Parts of the names of the architectures to try, with commas between.
        loops: The same for the loops.
        skip_onnx: Leave ONNX out, which takes the longest.
        table: A file to write the table to, as Markdown.
    """
    names, tries = _named(ARCHITECTURES, only), _named(LOOPS, loops)
    names = names[:1] if timing.QUICK else names
    _quiet()
    found: dict[tuple[str, str], Found] = {}
    with TemporaryDirectory() as folder:
        ranks = _start_ranks(names, Path(folder)) if Ddp.loop in tries else []
        for name in names:
            architecture = ARCHITECTURES[name]
            for kind in (kind for kind in OWN if kind.loop in tries):
                with_onnx = kind is Run and not skip_onnx
                cell = name, kind.loop
                found[cell] = tried(kind, architecture, Path(folder), onnx=with_onnx)
            for loop in (loop for loop in FRAMEWORKS if loop in tries):
                fit, inside = FRAMEWORKS[loop], Path(folder) / name / loop
                found[name, loop] = fit(architecture, inside)
            troubles = {
                f"{loop}: {action}: {text}"
                for (one, loop), outcomes in found.items()
                for action, text in outcomes.items()
                if one == name and text != "works"
            }
            print(name, *(sorted(troubles) or ["works"]), sep="\n  ", file=sys.stderr)
        for rank in ranks:
            rank.wait()
        for name in names if ranks else []:
            found[name, Ddp.loop] = _from_ranks(Path(folder), name)
    report = as_report(names, found)
    if table:
        Path(table).write_text(_markdown(report), encoding="utf-8")
    return report


def _named(names: Iterable[str], parts: str) -> list[str]:
    """Names that contain one of several parts, with commas between."""
    wanted = parts.lower().split(",")
    return [name for name in names if any(part in name.lower() for part in wanted)]


def as_report(names: list[str], found: Mapping[tuple[str, str], Found]) -> Report:
    """One row per architecture; what does not work is numbered and named below."""
    report = Report("Architectures and loops", ("architecture", *LOOPS, "ONNX"))
    said: dict[str, int] = {}

    def cell(outcomes: Found) -> str:
        if not outcomes:
            return "not tried"
        troubles = [f"{a}: {text}" for a, text in outcomes.items() if text != "works"]
        numbers = [str(said.setdefault(text, len(said) + 1)) for text in troubles]
        return "works" if not numbers else f"but [{', '.join(numbers)}]"

    for name in names:
        cells = []
        for loop in LOOPS:
            outcomes = dict(found.get((name, loop), {}))
            outcomes.pop("onnx", None)
            cells.append(cell(outcomes))
        plain = found.get((name, Run.loop), {})
        exported = {k: v for k, v in plain.items() if k == "onnx"}
        report.add(name, *cells, cell(exported))
    report.notes += [f"[{number}] {text}" for text, number in said.items()]
    beside = [n for n in names if "widen" not in ARCHITECTURES[n].blueprint]
    if beside:
        report.notes.append(
            f"{', '.join(beside)}: no pair of layers can be widened (the Grower names "
            "the operation in the way). A low-rank seed beside one layer was planted."
        )
    report.notes.append(
        "works: grow, save, load (to the bit), resume (to the bit) and export "
        f"(to {CLOSE:g} of the largest output)."
    )
    return report


def tried(
    kind: type[Run], architecture: Architecture, folder: Path, *, onnx: bool
) -> Found:
    """All actions on one network in one of the user's own loops."""
    found: Found = {}
    held: dict[str, Any] = {}

    def grow() -> None:
        held["run"] = one = kind(architecture)
        one.train(range(BATCHES))
        _check_grown(one.grower)
        sizes = [
            sum(p.numel() for p in m.parameters()) for m in (one.model, one.shipped)
        ]
        if sizes[0] != sizes[1]:
            raise RuntimeError("what is saved has not grown")

    def save() -> None:
        folder.mkdir(exist_ok=True, parents=True)
        held["file"] = folder / f"{os.getpid()}.safetensors"
        esper.save(held["run"].shipped, held["file"])

    def load() -> None:
        again = esper.load(held["file"], architecture.make())
        _check_alike(held["run"].shipped, again, architecture, 0.0)

    def resume() -> None:
        one = held["run"]
        saved = copy.deepcopy(one.grower.state_dict())
        other = kind(architecture)
        other.grower.load_state_dict(saved)
        rest = range(BATCHES, BATCHES + MORE)
        one.train(rest)
        random = saved["random"]["cpu"]
        torch.set_rng_state(random)
        other.train(rest)
        _check_same_weights(one.model, other.model)

    def export() -> None:
        _check_export(held["run"].grower, architecture)

    def to_onnx() -> None:
        _check_onnx(held["run"].grower.export(), architecture, folder)

    without: dict[Callable[[], None], Callable[[], object]] = {
        grow: lambda: kind(architecture, growing=False).step(architecture.batch(0)),
        to_onnx: lambda: _check_onnx(architecture.make(), architecture, folder),
    }
    actions = [grow, save, load, resume, export, *([to_onnx] if onnx else [])]
    for action in actions:
        name = action.__name__.removeprefix("to_")
        found[name] = _outcome(action, without.get(action))
        if found["grow"] != "works":
            break
    return found


# Frameworks.


def in_lightning(architecture: Architecture, folder: Path) -> Found:
    """The same, by Lightning's Trainer and its checkpoints."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from esper.lightning import GrowCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = architecture.make()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("fit", loss.detach().clamp(max=1.0), on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Plant(Callback):
        def __init__(self, growing: GrowCallback) -> None:
            self.growing = growing

        def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
            grower = self.growing.grower
            assert grower is not None
            if trainer.current_epoch == 0 and not len(grower.model.seeds):
                slot = grower.model.slots[0]
                grower.plant(slot, architecture.blueprint, tempo="AT_ONCE")

        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            torch.manual_seed(trainer.global_step)  # Lightning resumes no streams

    def fit(
        epochs: int, resumed: str | None = None, *, grows: bool = True
    ) -> tuple[Module, Any, Any]:
        growing = GrowCallback(
            [architecture.slot],
            architecture.example(),
            monitor="fit",
            mode="min",
            host="net",
            **OPTIONS,
        )
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[growing, Plant(growing)] if grows else [],
        )
        module = Module()
        batches = [architecture.batch(index) for index in range(3)]
        loader = DataLoader(batches, batch_size=None)
        trainer.fit(module, loader, ckpt_path=resumed)
        return module, growing.grower, trainer

    folder.mkdir(parents=True, exist_ok=True)
    file = str(folder / "lightning.ckpt")

    def load(module: Module) -> nn.Module:
        state = torch.load(file, weights_only=False)["state_dict"]
        again: nn.Module = esper.rebuild(Module(), state)
        del module
        return again.get_submodule("net")

    return _framework(
        architecture,
        fit,
        net=lambda module: module.net,
        save=lambda trainer: trainer.save_checkpoint(file),
        load=load,
        resume=lambda: fit(2, file),
    )


def in_trainer(architecture: Architecture, folder: Path) -> Found:
    """The same, by the Trainer of Hugging Face and its checkpoints."""
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from esper.huggingface import GrowCallback

    rows = [architecture.batch(index) for index in range(3)]
    data = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in rows
        for row in range(len(next(iter(batch.values()))))
    ]

    class Plant(TrainerCallback):
        def __init__(self, growing: GrowCallback) -> None:
            self.growing = growing

        def on_epoch_begin(self, *_: object, **__: object) -> None:
            grower = self.growing.grower
            assert grower is not None
            if not len(grower.model.seeds):
                slot = grower.model.slots[0]
                grower.plant(slot, architecture.blueprint, tempo="AT_ONCE")

    def fit(
        epochs: int, resumed: str | None = None, *, grows: bool = True
    ) -> tuple[nn.Module, Any, Any]:
        growing = GrowCallback([architecture.slot], merge=False, **OPTIONS)
        where = Path(resumed).parent if resumed else folder / f"{epochs}"
        arguments = TrainingArguments(
            output_dir=str(where),
            num_train_epochs=2,
            max_steps=3 * epochs if not resumed else -1,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="epoch",
            eval_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_strategy="no",
            seed=0,
        )
        model = architecture.make()
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[growing, Plant(growing)] if grows else [],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=resumed)
        return model, growing.grower, trainer

    checkpoint = folder / "1" / "checkpoint-3"

    def load(_: nn.Module) -> nn.Module:
        return esper.load(checkpoint / "model.safetensors", architecture.make())

    def save(_: object) -> None:
        if not (checkpoint / "model.safetensors").exists():
            raise FileNotFoundError("the Trainer wrote no model.safetensors")

    return _framework(
        architecture,
        fit,
        net=lambda model: model,
        save=save,
        load=load,
        resume=lambda: fit(2, str(checkpoint)),
    )


def in_pretrained(architecture: Architecture, folder: Path) -> Found:
    """Whether `save_pretrained` and `from_pretrained` keep what grew, to the bit."""
    from esper.huggingface import merge_into_model

    one: Any = Run(replace(architecture, slot="auto"))
    if not hasattr(one.model, "save_pretrained"):
        return {}

    def grow() -> None:
        before = sum(p.numel() for p in one.model.parameters())
        one.train(range(BATCHES))
        merge_into_model(one.grower)
        after = sum(p.numel() for p in one.model.parameters())
        if after == before and "widen" in architecture.blueprint:
            raise RuntimeError("the model has not grown")

    def load() -> None:
        one.model.save_pretrained(folder)
        again = type(one.model).from_pretrained(folder)
        _check_alike(one.model, again, architecture, 0.0)

    found = {"grow": _outcome(grow)}
    return {**found, "load": _outcome(load)} if found["grow"] == "works" else found


FRAMEWORKS = {
    "Lightning": in_lightning,
    "HF Trainer": in_trainer,
    "from_pretrained": in_pretrained,
}


def _framework(
    architecture: Architecture,
    fit: Callable[..., tuple[Any, Any, Any]],
    *,
    net: Callable[[Any], nn.Module],
    save: Callable[[Any], None],
    load: Callable[[Any], nn.Module],
    resume: Callable[[], tuple[Any, Any, Any]],
) -> Found:
    """All actions on a network that a framework trains for one epoch, and for two."""
    held: dict[str, Any] = {}

    def grow() -> None:
        torch.manual_seed(0)
        held["model"], held["grower"], held["trainer"] = fit(1)
        _check_grown(held["grower"])

    def saving() -> None:
        save(held["trainer"])

    def loading() -> None:
        _check_alike(net(held["model"]), load(held["model"]), architecture, 0.0)

    def exporting() -> None:
        _check_export(held["grower"], architecture)

    def resuming() -> None:
        torch.manual_seed(0)
        whole, *_ = fit(2)
        continued, *_ = resume()
        _check_same_weights(net(whole), net(continued))

    found = {"grow": _outcome(grow, lambda: fit(1, grows=False))}
    if found["grow"] == "works":
        found |= {
            "save": _outcome(saving),
            "load": _outcome(loading),
            "export": _outcome(exporting),
            "resume": _outcome(resuming),
        }
    return found


# Two ranks.


def _start_ranks(names: list[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Two processes that try all architectures one after the other."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.architectures"]
    return [
        subprocess.Popen([*command, str(folder), str(rank), *names])
        for rank in range(2)
    ]


def _try_ranks(folder: Path, rank: int, names: list[str]) -> None:
    """All architectures as one rank of two; writes what came of it."""
    torch.set_num_threads(1)
    _quiet()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    for name in names:
        mine = folder / f"rank{rank}"
        found = tried(Ddp, ARCHITECTURES[name], mine, onnx=False)
        torch.save(found, folder / f"{name} {rank}.pt")
    dist.destroy_process_group()


def _from_ranks(folder: Path, name: str) -> Found:
    """What both ranks have found; the worse of the two."""
    files = [folder / f"{name} {rank}.pt" for rank in range(2)]
    if not all(file.exists() for file in files):
        return {"grow": "the ranks ended before"}
    one, other = (torch.load(file) for file in files)
    return {a: one[a] if one[a] != "works" else other.get(a, one[a]) for a in one}


# Checks.


def _check_grown(grower: Grower) -> None:
    """Refuse a seed that has learnt nothing or changes nothing."""
    model = grower.model
    with model.seeds.flow.using(left_out=[0]):
        without = model.example_outputs()
    pairs = zip(model.example_outputs(), without, strict=True)
    if not any(bool((one != two).any()) for one, two in pairs):
        raise RuntimeError("the seed changes nothing")


def _check_alike(
    one: nn.Module, other: nn.Module, architecture: Architecture, close: float
) -> None:
    """Refuse networks that answer differently, by more than a share of the largest."""
    example = architecture.example()
    found = eval_outputs(one, example), eval_outputs(other, example)
    for a, b in zip(*found, strict=True):
        gap = float((a - b).abs().max() / a.abs().max())
        if not gap <= close:
            raise RuntimeError(f"the answers differ by {gap:.1g} of the largest")


def _check_same_weights(one: nn.Module, other: nn.Module) -> None:
    weights = dict(other.state_dict())
    for name, mine in one.state_dict().items():
        if isinstance(mine, Tensor) and not torch.equal(mine, weights[name]):
            raise RuntimeError(f"{name.split('.')[-1]} is not the same after resuming")


def _check_export(grower: Grower, architecture: Architecture) -> None:
    plain = grower.export()
    told = grower.model.count(exported=True).parameters
    there = sum(p.numel() for p in plain.parameters())
    if told != there:
        raise RuntimeError(f"it has {there} parameters, {told} were counted")
    _check_alike(grower.model.host, plain, architecture, CLOSE)


def _check_onnx(plain: nn.Module, architecture: Architecture, folder: Path) -> None:
    import onnxruntime

    plain, example = plain.eval(), architecture.example()
    file = str(folder / "model.onnx")
    with open(os.devnull, "w") as nowhere, _stdout(nowhere):
        torch.onnx.export(plain, (), file, kwargs=example, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file)
    given = {one.name: example[one.name].numpy() for one in session.get_inputs()}
    with torch.no_grad():
        wanted = plain(**example)["logits"]
    found = [torch.from_numpy(x) for x in session.run(None, given)]
    gaps = [
        float((x - wanted).abs().max() / wanted.abs().max())
        for x in found
        if x.shape == wanted.shape
    ]
    if not gaps or min(gaps) > CLOSE:
        raise RuntimeError(f"ONNX Runtime answers differently, by {gaps}")


@contextmanager
def _stdout(stream: Any) -> Iterator[None]:  # noqa: ANN401
    before, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = before


def _outcome(
    action: Callable[[], None], without: Callable[[], object] | None = None
) -> str:
    """That it works, or the first line of what was raised, without a Grower too."""
    said = _raised(action)
    if said.startswith("fails") and without is not None and _raised(without) == said:
        return said.replace("fails", "fails without a Grower too", 1)
    return said


def _raised(action: Callable[[], object]) -> str:
    try:
        action()
    except EsperError as error:
        return f"refused: {error}"
    except Exception as error:  # whatever it is, it is the outcome
        lines = re.sub(r"\x1b\[\d+m", "", str(error)).strip().splitlines() or [""]
        return f"fails: {type(error).__name__}: {lines[0][:160]}"
    return "works"


def _quiet() -> None:
    """No warnings and progress of other libraries."""
    import logging

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _markdown(report: Report) -> str:
    """A page with the table and its notes."""
    head = (
        "# Architectures and loops\n\n"
        "Written by `python -m benchmarks architectures --table docs/architectures.md`."
        f"\n{len(report.rows)} small networks grow in eight kinds of training loops. "
        "Then they are saved,\nloaded, resumed and exported. ONNX is tried on the "
        "export of the plain loop,\n`from_pretrained` on models of `transformers` "
        'that grew with `slots="auto"`.\n"not tried" marks what was not run for a '
        "row.\n"
    )
    lines = [" | ".join(map(str, row)) for row in (report.columns, *report.rows)]
    lines.insert(1, "|".join("---" for _ in report.columns))
    table = [f"| {line} |" for line in lines]
    notes = [f"- {note}" for note in report.notes]
    return "\n".join([head, *table, "", *notes, ""])


if __name__ == "__main__":
    _try_ranks(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
