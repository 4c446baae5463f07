"""How much faster do N hosts train as one cohort than one after the other?

One minibatch of every host: forward, backward, shadow pass, AdamW. Every environment
holds other blueprints in other stages. The twin is plain PyTorch, host by host, with an
`AdamW(fused=True)` each; it is spared what ours includes: gathering the rows, and the
learning rates of newborns. Ours is given the minibatches of one decision at a time, as
the world gives them. Then the same in two processes, how the time grows, and how well
`cohort_cost` tells it beforehand. All of it, about seven minutes:

    python -c "from benchmarks.cohort import main; main('cohort.json', 'cohort.svg')"
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.cohort_growth import (
    CNN,
    KNOWN,
    MIXED,
    PER_PLACE,
    STEPS,
    Case,
    Cohorts,
    Point,
    curves,
    draw,
    fit,
    grow,
)
from benchmarks.timing import Report, alternate, machine, micro, show
from esper.contracts.stages import Stage
from esper.tasks.hosts import Host, MlpHost

STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.TRAINING, Stage.DORMANT)
"""By environment and slot in turn: two of four seeds are in training."""
TENSOR_STEPS = {"mlp": 4, "cnn": 1}
"""Minibatches per call: fewer than ours, since they are slow."""


def run(save: str | Path | None = None, plot: str | Path | None = None) -> list[Report]:
    """Measure, fit, and put it into tables.

    Args:
        save: Where to write everything that was found, as one JSON document.
        plot: Where to draw how the time grows; needs matplotlib.
    """
    beside, checks = compare()
    both = in_processes()
    _say("how it grows: about three minutes")
    points = list(grow())
    fitted, told = fit(points, checks)
    grown = curves(points, fitted)
    reports = [beside, both, grown, told]
    if save is not None:
        document = {
            "machine": machine(),
            "seconds": asdict(fitted),
            "tables": [report.as_data() for report in reports],
        }
        Path(save).parent.mkdir(parents=True, exist_ok=True)
        Path(save).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        _say(f"everything that was found is in {save}")
    if plot is not None:
        draw(grown.as_data()["rows"], plot)
        _say(f"how the time grows is drawn in {plot}")
    return reports


def main(
    save: str | Path | None = None,
    plot: str | Path | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Run and print, on one thread."""
    torch.set_num_threads(1)
    show(run(save, plot), as_json=as_json)


# Beside plain PyTorch.


def mixed(host: Host, envs: int, steps: int = STEPS) -> Case:
    """Other blueprints in other stages everywhere."""
    names, slots = MIXED[host.kind], PER_PLACE * (host.layers - 1)
    seeds = [
        {
            slot: (KNOWN[names[(3 * env + slot + slot // 2) % len(names)]], stage)
            for slot in range(slots)
            if (stage := STAGES[(env + slot) % len(STAGES)]) is not Stage.DORMANT
        }
        for env in range(envs)
    ]
    return Case(host, envs, seeds, steps=steps)


def compare(sweeps: int = 4) -> tuple[Report, list[Point]]:
    """One minibatch of every host, for cohorts of growing size."""
    if timing.QUICK:
        sweeps = 1
    report = Report(
        "One minibatch of 64 rows for every host, up to 4 seeds each",
        (
            "host", "envs", "seeds", "training", "µs per env", "tensors µs",
            "one by one µs", "ratio", "tensors' ratio",
        ),
        notes=[
            "Included: forward, backward, shadow pass, AdamW; in ours also the rows.",
            "Tensors: the same cohort by batched products and grouped convolutions.",
        ],
    )  # fmt: skip
    mlps = [(MlpHost((16, w, w, 26)), envs) for w in (12, 64) for envs in (4, 16, 64)]
    cases = [mixed(host, envs) for host, envs in mlps]
    cases += [mixed(CNN, envs, steps=4) for envs in (4, 16)]
    sides = [side_by_side(case) for case in cases]
    best = [dict.fromkeys(each, float("inf")) for each in sides]
    for sweep in range(sweeps):  # a slow minute spoils one of them
        _say(f"side by side: {sweep + 1} of {sweeps}")
        for each, least in zip(sides, best, strict=True):
            took = alternate(each, seconds=0.5, rounds=10, budget=2.0)
            least.update({name: min(least[name], took[name]) for name in took})
    points = []
    for case, least in zip(cases, best, strict=True):
        ours = least["ours"] / case.steps / case.envs
        tensors = least["tensors"] / TENSOR_STEPS[case.host.kind] / case.envs
        plain = least["plain"] / case.envs
        stages = [s for env in range(case.envs) for _, s in case.of(env).values()]
        report.add(
            str(case.host),
            case.envs,
            len(stages),
            stages.count(Stage.TRAINING),
            *map(micro, (ours, tensors, plain)),
            plain / ours,
            plain / tensors,
        )
        points.append(Point("mixed", case.envs, case, ours))
    return report, points


def side_by_side(case: Case) -> dict[str, Callable[[], object]]:
    """What to time: minibatches of our cohort, of one of tensors, and one by one."""
    ours = Cohorts(case, plain=True)
    fewer = replace(case, steps=TENSOR_STEPS[case.host.kind])
    tensors = Cohorts(fewer, "tensors", plain=False)
    return {"ours": ours.train, "tensors": tensors.train, "plain": ours.one_by_one}


# Two processes.


def in_processes(turns: int = 5) -> Report:
    """Half of the hosts in each of two processes, beside one loop in one process."""
    case, each = mixed(CNN, 16, steps=4), 2
    own = Cohorts(case, plain=True)
    spawn = multiprocessing.get_context("spawn")
    gate, times = spawn.Barrier(3), spawn.Array("d", 2)
    halves = [
        spawn.Process(target=_half, args=(number, gate, times, each, turns))
        for number in range(2)
    ]
    for half in halves:
        half.start()
    own.one_by_one()
    own.train()
    gate.wait()  # both are warm
    plain = alone = both = float("inf")
    for _ in range(turns):
        plain = min(plain, _took(own.one_by_one, 2 * each) / (2 * each))
        alone = min(alone, _took(own.train, each) / (each * case.steps))
        gate.wait()
        gate.wait()
        both = min(both, max(times) / (each * case.steps))
    for half in halves:
        half.join()
    report = Report(
        f"{case.envs} hosts, {CNN}, up to 4 seeds each: two processes of one thread",
        ("what", "µs per env", "minibatches per second", "ratio"),
        notes=["Both processes measure at the same time; the slower one counts."],
    )
    for name, seconds in (
        ("one by one, one process", plain),
        ("a cohort of 16, one process", alone),
        ("two cohorts of 8, two processes", both),
    ):
        report.add(
            name, micro(seconds / case.envs), case.envs / seconds, plain / seconds
        )
    return report


def _half(number: int, gate: Barrier, times: Any, each: int, turns: int) -> None:  # noqa: ANN401
    """Train every second host of sixteen whenever the gate opens."""
    torch.set_num_threads(1)
    whole = mixed(CNN, 16, steps=4)
    mine = Cohorts(replace(whole, envs=8, seeds=whole.seeds[number::2]), plain=False)
    mine.train()
    gate.wait()
    for _ in range(turns):
        gate.wait()
        times[number] = _took(mine.train, each)
        gate.wait()


def _took(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - began


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
