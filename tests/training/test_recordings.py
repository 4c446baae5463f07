"""Recordings: common random numbers under many scripts, scored under any terms."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    NotFiniteError,
    RunLockedError,
)
from esper.environment.growing import GrowingWorld
from esper.environment.settings import LEAST_ERROR
from esper.files import manifest_of
from esper.files import pack as pack_tensors
from esper.runs.run import Lock
from esper.tamiyo.rollout import play
from esper.training.recordings import (
    RecordConfig,
    pack,
    read_recording,
    read_recordings,
    record,
    record_task,
    world_settings,
)
from tests.environment.test_growing import LONG

SCRIPTS = 8


@pytest.fixture(scope="module", params=["end", "anytime"])
def recorded(request):
    settings = replace(world_settings(request.param), first=2.0)
    return settings, record_task(LONG, settings, 2, SCRIPTS, 7)


class Again:
    """Does what was recorded."""

    def __init__(self, actions):
        self.actions = actions

    def decide(self, observation, masks, state, generator):
        at = 0 if state is None else int(state)
        return self.actions[:, at], torch.tensor(at + 1)


def test_scores_under_other_terms_are_those_of_a_world_with_them(recorded):
    settings, recording = recorded
    rent = 0.03
    other = replace(settings, rent=rent, group_size=SCRIPTS)
    world = GrowingWorld(LONG, 2 * SCRIPTS, 7, settings=other)
    returns = play(world, Again(recording.tensor("actions")), Generator())
    worth = recording.objective(torch.full((recording.envs,), rent))
    never = recording.tensor("score")[::SCRIPTS].double()
    weights = recording.clock.weights()[1:].double()
    error = (1 - (weights * never).sum(dim=1)).float().clamp(min=LEAST_ERROR)
    expected = (worth[:, -1] - worth[:, 0]) * error.repeat_interleave(SCRIPTS)
    assert_close(expected, returns, rtol=0.0, atol=2e-3)  # kept in half precision


def test_observations_under_other_terms_are_those_of_a_world_with_them(recorded):
    settings, recording = recorded
    other = replace(settings, rent=0.05, budget=3.0, group_size=SCRIPTS)
    shown = GrowingWorld(LONG, 2 * SCRIPTS, 7, settings=other).reset()
    terms = (torch.full((recording.envs,), value) for value in (0.05, 3.0))
    seen = recording.observed(*terms)
    first = seen.episode_start.nonzero().flatten()
    assert len(first) == recording.envs
    for part in ("host", "slots", "offers"):
        for name in (own := getattr(shown, part)).__dataclass_fields__:
            read = getattr(getattr(seen, part), name)[first]
            expected = getattr(own, name).to(read.dtype)
            assert_close(read, expected, rtol=1e-3, atol=1e-3, msg=f"{part}.{name}")


def test_scripts_are_the_same_network_until_they_part(recorded):
    _, recording = recorded
    actions, score = recording.arrays["actions"], recording.arrays["score"]
    pairs = 0
    for tree in range(2):
        own = slice(tree * SCRIPTS, (tree + 1) * SCRIPTS)
        for a, b in zip(actions[own], np.roll(actions[own], 1, axis=0), strict=True):
            differ = (a != b).any(axis=1)
            pairs += int(differ.any())
        same = (actions[own][0] == actions[own]).all(axis=2).cumprod(axis=1) == 1
        assert (np.where(same, score[own] == score[own][0], True)).all()
    assert pairs  # or nothing was compared


def test_a_file_gives_back_what_was_recorded(recorded, tmp_path):
    _, recording = recorded
    file = tmp_path / "000000.safetensors"
    file.write_bytes(pack(recording))
    again = read_recording(file)
    assert (again.clock, again.scripts) == (recording.clock, SCRIPTS)
    for name, array in recording.arrays.items():
        assert np.array_equal(again.arrays[name], array), name


def test_ages_beyond_127_are_kept():
    """At one place for 160 decisions, as a seed that was planted at first."""
    settings = replace(world_settings("end"), horizon=160, decision_every=1)
    ages = record_task(LONG, settings, 1, 6, 3).tensor("slots.age")
    assert int(ages.min()) == 0
    assert int(ages.max()) > 127
    longer = ages[:, 1:] - ages[:, :-1]
    assert int(longer.max()) == 1


@pytest.mark.parametrize("name", ["warm", "recordings", "none"])
def test_folders_that_no_training_would_read_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=f"'{name}' is a reserved name"):
        record(RecordConfig(stop="end", tasks=1), Path(name))
    assert not [*tmp_path.iterdir()]


def other(recording, name, change):
    return replace(
        recording,
        arrays={**recording.arrays, name: change(recording.arrays[name].copy())},
    )


def filled(value):
    return lambda array: np.full_like(array, value)


def test_damaged_or_foreign_files_are_refused_in_one_line(recorded, tmp_path):
    _, recording = recorded
    data = pack(recording)
    facts = {**recording.facts, "actions": 2}
    arrays = {k: v for k, v in recording.arrays.items() if k != "host.score"}
    bad = other(recording, "host.score", filled(np.nan))
    tensors = {n: torch.from_numpy(a) for n, a in recording.arrays.items()}
    manifest = manifest_of({**recording.facts, "scripts": 8, "clock": [1, 2, 3]})
    file = tmp_path / "000001.safetensors"
    for bytes_, words in (
        (data[:1000], "damaged"),
        (data[:-1], "damaged"),
        (data[:-1] + b"x", "damaged"),
        (b"", "damaged"),
        (pack_tensors({"a": torch.zeros(3)}, manifest_of({})), "not a recording"),
        (pack(replace(recording, facts=facts)), "is not a recording"),
        (pack(replace(recording, arrays=arrays)), "other inputs"),
        (pack(replace(recording, scripts=7)), "contradict each other"),
        (pack(other(recording, "score", lambda a: a.astype(np.float64))), "float64"),
        (pack(other(recording, "slots.age", lambda a: a > 0)), "slots.age is bool"),
        (pack(other(recording, "added", lambda a: a[:, :-1])), "added is float16"),
        (pack(other(recording, "slots.stage", filled(6))), "slots.stage has choices"),
        (pack(other(recording, "actions", filled(-1))), "actions has choices"),
        (pack_tensors(tensors, manifest), "is not a recording"),
    ):
        file.write_bytes(bytes_)
        with pytest.raises(InvalidInputError, match=words) as refused:
            read_recording(file)
        assert "000001.safetensors" in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(NotFiniteError, match=r"'host.score' holds NaN"):
        pack(bad)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    file = tmp_path / "000000.safetensors"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(InvalidInputError, match=r"is not a regular file|is a link"):
        read_recordings(tmp_path)


def test_a_damaged_file_is_recorded_again(tmp_path):
    config = RecordConfig(stop="end", tasks=2, hosts=1, scripts=2)
    record(config, tmp_path)
    files = sorted(tmp_path.glob("0*"))
    good = [file.read_bytes() for file in files]
    files[0].write_bytes(good[0][:-3])
    files[1].write_bytes(good[0])  # of another task
    with pytest.warns(EsperWarning, match="It is recorded again"):
        record(config, tmp_path)
    assert [file.read_bytes() for file in files] == good


def test_two_processes_do_not_record_in_one_folder(tmp_path):
    config = RecordConfig(stop="end", tasks=1, scripts=2)
    with closing(Lock(tmp_path)), pytest.raises(RunLockedError, match="is in use"):
        record(config, tmp_path)
    record(config, tmp_path)


def test_an_interrupted_recording_goes_on_with_the_same_bytes(tmp_path):
    config = RecordConfig(stop="end", tasks=2, hosts=1, scripts=3)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    record(config, whole)

    def interrupt(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(config, broken, report=interrupt)
    with pytest.raises(InvalidInputError, match="has 1 of 2 recordings\\. Continue"):
        read_recordings(broken)
    record(config, broken)
    for file in sorted(whole.glob("*[0-9g].*")):
        assert file.read_bytes() == (broken / file.name).read_bytes()
    with pytest.raises(InvalidInputError, match="other settings"):
        record(replace(config, tasks=3), broken)
    with pytest.raises(InvalidInputError, match="no recordings"):
        read_recordings(tmp_path)
