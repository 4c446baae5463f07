"""Features are bounded, say what their source says, and keep the unknown unknown."""

from dataclasses import fields, replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import InvalidInputError
from esper.contracts.slots import SlotConfig, SlotStates
from esper.contracts.world import BlueprintOffers, HostStates, Observation
from esper.tamiyo.policy.features import (
    BLUEPRINT_COLUMNS,
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
    blueprint_table,
    compute_features,
)
from tests.device_reads import count_device_reads
from tests.references.features import (
    features_of,
    listed_features,
    naive_features,
    reports_of,
)
from tests.strategies import action_specs, floats, observations
from tests.worlds import blank_observation

TABLES = ("host", "slots", "offers")
SPEC = ActionSpec(SlotConfig(max_slots=2), BLUEPRINTS[:3], measured=True)


def quiet(envs: int = 2) -> Observation:
    """Empty hosts of which nothing is known and in which nothing can be planted."""
    seen = change(blank_observation(envs, SPEC), "host", budget_left=0.0)
    seen = change(seen, "slots", alpha_settled=False)
    return change(seen, "offers", fits=False)


def change(observation: Observation, record: str, **values) -> Observation:
    """The observation with fields of one record filled with given values."""
    old = getattr(observation, record)
    new = {
        name: torch.full_like(getattr(old, name), value)
        for name, value in values.items()
    }
    return replace(observation, **{record: replace(old, **new)})


def column(features: Features, table: str, name: str) -> torch.Tensor:
    columns = {"host": HOST_COLUMNS, "slots": SLOT_COLUMNS, "offers": OFFER_COLUMNS}
    names = [column.name for column in columns[table]]
    return getattr(features, table)[..., names.index(name)]


def mapped(observation: Observation, function) -> Observation:
    """The observation with every tensor changed."""

    def each(record):
        return {f.name: function(getattr(record, f.name)) for f in fields(record)}

    return Observation(
        episode_start=function(observation.episode_start),
        host=HostStates(**each(observation.host)),
        slots=SlotStates(**each(observation.slots)),
        offers=BlueprintOffers(**each(observation.offers)),
    )


@settings(max_examples=40)
@given(st.data())
def test_features_are_those_of_a_loop_over_environments_slots_and_blueprints(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    features = compute_features(observation, spec)
    reports = reports_of(observation)
    for env, report in enumerate(reports):
        for table, rows in zip(TABLES, features_of(report), strict=True):
            actual, expected = getattr(features, table)[env], torch.tensor(rows)
            # Columns of measurements come last.
            expected = expected[..., : actual.shape[-1]]
            assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for twin in (naive_features, listed_features):
        for name, stacked in twin(reports).items():
            actual = getattr(features, name)
            stacked = stacked[..., : actual.shape[-1]]
            assert_close(actual, stacked, rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.data())
def test_features_of_values_up_to_1e30_are_finite_and_bounded(data):
    spec = data.draw(action_specs(max_slots=2))
    observation = data.draw(observations(spec, values=floats(1e30)))
    features = compute_features(observation, spec)
    for table in (features.host, features.slots, features.offers):
        assert table.dtype is torch.float32
        assert table.isfinite().all()
        assert table.abs().max() <= 1.0


@pytest.mark.parametrize("noise", [0.3, -1e30, inf, nan])
def test_what_was_not_measured_changes_nothing(noise):
    seen = change(quiet(), "host", rent=0.5)
    seen = change(seen, "slots", parameters=0.5)
    seen = change(seen, "offers", parameters=0.5)
    noisy = change(seen, "slots", contribution=noise)
    noisy = change(noisy, "offers", promise=noise)
    before, after = compute_features(seen, SPEC), compute_features(noisy, SPEC)
    for table in TABLES:
        assert_close(getattr(after, table), getattr(before, table), rtol=0, atol=0)


def test_what_is_not_known_reads_zero_and_has_a_flag():
    seen = change(quiet(), "slots", contribution=-0.1)
    seen = change(seen, "offers", promise=0.1)
    seen.slots.contribution_measured[:, 1] = True
    seen.offers.promise_known[0, 1, 2] = True
    features = compute_features(seen, SPEC)
    slots, offers = features.slots[0], features.offers[0]
    contribution, _, flag = slots[:, -3:].unbind(1)
    assert (contribution.tolist(), flag.tolist()) == ([0.0, -0.5], [0.0, 1.0])
    there = torch.zeros(2, 3)
    there[1, 2] = 1.0
    assert_close(offers[..., -3], 0.5 * there)
    assert_close(offers[..., -1], there)


def test_worlds_that_measure_nothing_show_no_columns_of_it():
    plain = replace(SPEC, measured=False)
    few, many = compute_features(quiet(), plain), compute_features(quiet(), SPEC)
    for table in TABLES:
        own = getattr(few, table)
        assert own.shape[-1] == plain.observation[table].shape[-1]
        assert_close(own, getattr(many, table)[..., : own.shape[-1]], rtol=0, atol=0)
    assert many.slots.shape[-1] - few.slots.shape[-1] == 5
    assert many.offers.shape[-1] - few.offers.shape[-1] == 3


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ("host", "score"),
        ("host", "rent"),
        ("slots", "alpha"),
        ("slots", "parameters"),
        ("offers", "macs"),
    ],
)
def test_nan_in_what_counts_stays_visible(table, field):
    features = compute_features(change(quiet(), table, **{field: nan}), SPEC)
    assert column(features, table, field).isnan().all()


@settings(max_examples=20)
@given(st.data())
def test_a_batch_is_its_environments_bit_for_bit(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    batch = compute_features(observation, spec)
    for env in range(len(observation.episode_start)):
        single = compute_features(
            mapped(observation, lambda x, env=env: x[[env]]), spec
        )
        for table in TABLES:
            expected = getattr(batch, table)[env : env + 1]
            assert_close(getattr(single, table), expected, rtol=0, atol=0)


def test_features_are_fresh_and_contiguous_and_leave_the_observation_alone():
    seen = change(quiet(), "slots", contribution=3.0, parameters=2.0)
    first = compute_features(seen, SPEC)
    kept = replace(first, **{n: getattr(first, n).clone() for n in first.__slots__})
    assert (seen.slots.contribution == 3.0).all()
    assert (seen.slots.parameters == 2.0).all()
    compute_features(change(seen, "host", rent=9.0), SPEC).offers.fill_(nan)
    for table in TABLES:
        assert getattr(first, table).is_contiguous()
        assert_close(getattr(first, table), getattr(kept, table), rtol=0, atol=0)


def test_features_can_be_computed_on_a_device_that_holds_no_values():
    features = compute_features(mapped(quiet(), lambda x: x.to("meta")), SPEC)
    for name, shape in (
        ("host", (2, 13)),
        ("slots", (2, 2, 20)),
        ("offers", (2, 2, 3, 10)),
    ):
        assert getattr(features, name).shape == shape
        assert getattr(features, name).device.type == "meta"


def test_features_first_asked_for_in_inference_serve_training_too():
    seen = quiet(envs=7)
    with torch.inference_mode():
        compute_features(seen, SPEC)
    features = compute_features(seen, SPEC)
    weight = torch.ones((), requires_grad=True)
    (weight * features.host.sum()).backward()
    assert not features.host.is_inference()


def test_features_make_no_device_wait():
    seen = quiet()
    assert count_device_reads(lambda: compute_features(seen, SPEC)) == 0


def test_a_blueprint_is_described_by_form_size_and_whether_it_merges():
    spec = ActionSpec(
        blueprints=(
            Blueprint("one", Form.CONV, 1, merges=False),
            Blueprint("eight", Form.WIDEN, 8, merges=True),
        )
    )
    names = [column.name for column in BLUEPRINT_COLUMNS]
    rows = [
        dict(zip(names, row, strict=True)) for row in blueprint_table(spec).tolist()
    ]
    for row, form, size, merges in zip(
        rows, ("form_conv", "form_widen"), (0.0, 0.5), (0.0, 1.0), strict=True
    ):
        assert row.pop("log2_size") == size
        assert row.pop("merges") == merges
        assert {name for name, value in row.items() if value == 1.0} == {form}
        assert sum(row.values()) == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ActionSpec(), r"SlotStates.stage must be .* \(2, 3\) .* got .* \(2, 2\)"),
        (
            ActionSpec(SlotConfig(2), BLUEPRINTS[:5]),
            r"fits must be .* \(2, 2, 5\)",
        ),
    ],
)
def test_an_observation_of_another_action_space_is_refused(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        compute_features(quiet(), spec)


@pytest.mark.parametrize(
    ("record", "field", "message"),
    [
        ("host", "rent", r"HostStates.rent must be .* got .* \(1,\)"),
        ("host", "loss", r"HostStates.loss must be .* got .* \(1,\)"),
        ("slots", "depth", r"SlotStates.depth must be .* got .* \(1, 2\)"),
        ("offers", "macs", r"BlueprintOffers.macs must be .* \(2, 2, 3\) on cpu, got"),
    ],
)
def test_a_field_unlike_its_neighbours_is_named(record, field, message):
    seen = quiet()
    short = getattr(getattr(seen, record), field)[:1]
    object.__setattr__(getattr(seen, record), field, short)
    with pytest.raises(InvalidInputError, match=message):
        compute_features(seen, SPEC)
