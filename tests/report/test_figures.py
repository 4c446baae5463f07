"""Figures of a Grower and of a PPO agent: their numbers are the recorded ones."""

import re
import subprocess
import sys
from functools import cache
from math import nan

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from esper import PPO, Grower
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage, StageChanged
from esper.growth.history import GrowthDecision, changed_widths, layer_widths
from esper.report.figures import MAX_POINTS, MISSING, growth_figure, growth_table
from esper.rl.curve import SIZE, LearningCurve
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from tests.growth.hosts import make_batch, make_host
from tests.resume_script import SLOTS, Training

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@cache
def trained():
    training = Training("never")
    training.run(26)
    return training


def line(axes, marker):
    return next(one for one in axes.lines if one.get_marker() == marker)


def heights(axes, x):
    """Height of every area just right of x."""
    found = {}
    for area in axes.collections:
        inside = [
            y
            for y in np.arange(0.5, 200)
            if area.get_paths()[0].contains_point((x + 1e-3, y))
        ]
        found[area.get_label()] = len(inside)
    return found


def test_a_figure_of_growth_has_the_recorded_numbers():
    grower = trained().grower
    metric, loss, widths = grower.plot().axes
    history = grower.history
    batches = [5, 10, 15, 20, 25]
    assert [one.batches for one in history] == batches
    x, y = line(metric, ".").get_data()
    assert_allclose(x[:-1], batches)
    assert_allclose(y[:-1], [one.metric for one in history])
    assert (x[-1], np.isnan(y[-1])) == (26, True)  # not yet decided
    assert_allclose(line(loss, ".").get_ydata()[:-1], [one.loss for one in history])
    marks = {
        label: line(metric, sign)
        for label, sign in zip(("planted", "kept", "pruned"), "^oX", strict=True)
    }
    assert {label: [*one.get_xdata()] for label, one in marks.items()} == {
        "planted": [5, 10, 15, 25],
        "kept": [20],
        "pruned": [20],
    }
    for mark in marks.values():
        assert_allclose(mark.get_ydata(), np.interp(mark.get_xdata(), x[:-1], y[:-1]))
    first = {"first": 12, "second": 12, "last": 5}
    assert heights(widths, 0) == first
    now = first
    for decision in history:
        now = changed_widths(now, decision)
        assert heights(widths, decision.batches) == now
    assert now == layer_widths(grower.model)
    assert now["first"] > 12


def test_a_saved_and_resumed_grower_has_the_figure_of_the_whole_run():
    whole, halved, resumed = trained(), Training("never"), Training("never")
    halved.run(18)
    resumed.load_state_dict(halved.state_dict())
    resumed.run(26)
    for mine, other in zip(
        whole.grower.plot().axes, resumed.grower.plot().axes, strict=True
    ):
        assert len(mine.lines) == len(other.lines)
        for line, twin in zip(mine.lines, other.lines, strict=True):
            assert_allclose(line.get_xydata(), twin.get_xydata())
        for x in (0, 5, 10, 15, 20, 25):
            assert heights(mine, x) == heights(other, x)
    assert whole.grower._repr_html_() == resumed.grower._repr_html_()


def test_a_grower_that_takes_over_says_that_its_history_is_shorter():
    training = Training("never")
    training.run(26)

    def grower_of(host):
        optimizer = torch.optim.SGD(host.parameters(), 0.1)
        x = make_batch("vector", 4)[0]
        return Grower(host, optimizer, SLOTS, example=x, seeds_per_slot=2)

    with pytest.warns(match="taken over"):
        grower = grower_of(training.host)
    assert grower.plot().get_supxlabel() == MISSING
    resumed = grower_of(make_host("vector"))
    assert resumed.plot().get_supxlabel() == ""
    resumed.load_state_dict(grower.state_dict())
    assert resumed.plot().get_supxlabel() == MISSING
    assert trained().grower.plot().get_supxlabel() == ""


def decision(step, **changed):
    about = {"step": step, "metric": float(step), "loss": nan, "batches": 3 * step}
    return GrowthDecision(**{**about, **changed})


def test_a_long_history_is_thinned_and_nothing_measured_is_said():
    event = StageChanged(
        env=0, slot=0, step=0, before=Stage.DORMANT, after=Stage.TRAINING, reason=""
    )
    long = [decision(n, events=(event,), widths=(("a", n + 1),)) for n in range(5000)]
    metric, loss, widths = growth_figure(long, {"a": 1}, missing=False).axes
    x, y = line(metric, ".").get_data()
    assert (len(x), x[0], x[-1], y[-1]) == (MAX_POINTS, 0, 3 * 4999, 4999)
    assert len(line(metric, "^").get_xdata()) <= MAX_POINTS
    assert not loss.lines
    assert [text.get_text() for text in loss.texts] == ["not measured: use grower.loss"]
    assert widths.get_ylim()[1] >= 5000
    wide = {f"layer{n}": n + 1 for n in range(40)}
    _, _, widths = growth_figure([decision(1)], wide, missing=False).axes
    labels = [area.get_label() for area in widths.collections]
    assert (len(labels), labels[-1]) == (8, "33 other layers")


def test_what_a_table_shows_is_escaped_and_little():
    html = trained().grower._repr_html_()
    assert len(html) < 3000
    assert "353 → " in html
    history = [decision(0, action=HOSTILE, grew=True), decision(1)]
    html = growth_table(history, {HOSTILE: 1}, {HOSTILE: 2}, (1, 2))
    assert "<script" not in html
    assert "\x1b" not in html
    assert html.count("&lt;script&gt;") == 2
    figure = growth_figure(history, {HOSTILE: 1}, missing=False)
    (area,) = figure.axes[2].collections
    assert area.get_label().isprintable()


def test_the_summary_names_layers_with_both_widths_and_no_change_of_zero():
    page = trained().grower.summary()
    assert re.search(r"^  first +12 -> 18 units$", page, flags=re.MULTILINE)
    assert "  planted widen_x1.5 at first->second\n" in page
    assert "changed the output by 0\n" not in page
    assert not re.search("GERMINATE|FOSSILIZE |AT_ONCE", page)


class Recorded:
    """Callback: what a figure of the agent must show."""

    def __init__(self):
        self.rows = []

    def __call__(self, record):
        update = record.update
        (head,) = update.heads.values()
        returns = record.mean_return
        health = update.kl, head.entropy, update.clip_fraction
        health = *health, update.explained_variance
        self.rows.append((record.env_steps, returns, *health))


def drawn(agent):
    """Steps, returns, KL, entropy, clip fraction and explained variance in a figure."""
    lines = [next(iter(axes.lines), None) for axes in agent.plot().axes]
    steps = next(line.get_xdata() for line in lines if line)
    empty = np.full(len(steps), nan)
    return np.array([steps, *(line.get_ydata() if line else empty for line in lines)]).T


def test_a_figure_of_an_agent_has_the_recorded_numbers_also_after_loading(tmp_path):
    seen = Recorded()
    learner = PPO("CartPole-v1", num_envs=4, rollout_steps=16, epochs=1)
    learner.learn(64 * 10, callback=seen)
    assert_allclose(drawn(learner), seen.rows, rtol=1e-6)
    learner.save(tmp_path / "agent.safetensors")
    learner = PPO.load(tmp_path / "agent.safetensors", "CartPole-v1")
    learner.learn(64 * 5, callback=seen)
    assert len(seen.rows) == 15
    assert_allclose(drawn(learner), seen.rows, rtol=1e-6)
    learner.learn(64, reset_num_timesteps=True)
    assert len(drawn(learner)) == 1


def test_a_long_curve_keeps_few_points_and_the_last_one():
    curve = LearningCurve(["head"])
    head = HeadRecord(kl=0.1, entropy=0.5, openness=1.0, grad_norm=0.0)
    names = dict.fromkeys(UpdateRecord.__dataclass_fields__, 0.25)
    names |= {name: 1 for name in names if name.startswith(("s", "refused"))}
    update = UpdateRecord(**{**names, "heads": {"head": head}})
    for number in range(1, 5001):
        returns = torch.full((number % 2,), float(number))  # every second has none
        curve.add(number, returns, update)
    points, entropies = curve.columns()
    assert SIZE // 2 <= len(points["env_steps"]) <= SIZE
    assert points["env_steps"][-1] == 5000
    assert {*np.diff(points["env_steps"])[:-1]} == {curve.stride}
    # A return is the mean of all since the point before.
    assert points["return"][-2] == points["env_steps"][-2] - curve.stride / 2
    assert {*entropies["head"]} == {0.5}
    curve.length = SIZE
    with pytest.raises(InvalidInputError, match="curve of this agent is damaged"):
        curve.loaded()


def test_figures_need_no_display_and_change_nothing_for_others(tmp_path):
    script = (
        "import sys\n"
        "from tests.report.test_figures import trained\n"
        "trained()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "trained().grower.plot().savefig(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "now = matplotlib.rcParams\n"
        "assert all(before[k] == now[k] for k in before if k != 'backend')\n"
    )
    file = tmp_path / "grown.png"
    subprocess.run([sys.executable, "-c", script, str(file)], check=True)
    assert file.read_bytes().startswith(b"\x89PNG")
