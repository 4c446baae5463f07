"""Features one environment, one slot, one blueprint and one number at a time.

Plain Python floats and branches. `features_of` is the reference that the arrays are
tested against; the benchmark measures them against `naive_features`, which makes a
small tensor of every row, and `listed_features`, which keeps to lists until the end.
"""

from dataclasses import fields
from math import inf
from types import SimpleNamespace as Report

import torch

from esper.contracts.world import Observation

HUGE = 1e8
STAGES = ("DORMANT", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "COOLING")


def reports_of(observation: Observation) -> list[Report]:
    """The observation as one record per environment, as a per-env simulator has it."""
    host, slots, offers = (
        {field.name: getattr(record, field.name).tolist() for field in fields(record)}
        for record in (observation.host, observation.slots, observation.offers)
    )
    envs, places, blueprints = observation.offers.fits.shape

    def record(values, *at, **more):
        for index in at:
            values = {name: column[index] for name, column in values.items()}
        return Report(**values, **more)

    return [
        record(
            host,
            env,
            slots=[
                record(
                    slots,
                    env,
                    slot,
                    offers=[record(offers, env, slot, b) for b in range(blueprints)],
                )
                for slot in range(places)
            ],
        )
        for env in range(envs)
    ]


def size(value: float, half: float) -> float:
    """A value without bounds, squashed."""
    return value / (half + abs(value))


def share(value: float) -> float:
    """A share, cut where it leaves what a share can be."""
    return min(max(value, -1.0), 1.0)


def host_features(host: Report) -> list[float]:
    """One host."""
    return [
        share(host.progress),
        float(host.end_known),
        size(host.compute, 8.0),
        1.0 if host.budget_left > HUGE else size(host.budget_left, 0.5),
        1.0 if host.budget_left == inf else 0.0,
        size(host.rent, 0.1),
        size(host.rent, 0.01),
        size(host.added, 0.5),
        share(host.score),
        size(host.score_slope, 0.01),
        size(host.loss, 0.5),
        size(host.loss_slope, 0.05),
        share(host.plateau),
    ]


def slot_features(host: Report, slot: Report) -> list[float]:
    """One slot."""
    row = [0.0] * len(STAGES)
    row[slot.stage] = 1.0
    contribution = net = 0.0
    if slot.contribution_measured:
        rent = min(max(host.rent, -HUGE), HUGE)
        contribution = size(slot.contribution, 0.1)
        net = size(slot.contribution - rent * slot.parameters, 0.4)
    return [
        *row,
        size(slot.age, 4.0),
        share(slot.alpha),
        share(slot.alpha_target),
        1.0 if slot.alpha_settled else 0.0,
        1.0 if slot.style == 1 else 0.0,
        size(slot.parameters, 0.1),
        share(slot.depth),
        share(slot.capacity),
        size(slot.units, 16.0),
        share(slot.liveness),
        share(slot.gradient_share),
        contribution,
        net,
        1.0 if slot.contribution_measured else 0.0,
    ]


def offer_features(
    host: Report, slot: Report, index: int, offer: Report
) -> list[float]:
    """One blueprint at one slot."""
    rent = min(max(host.rent, -HUGE), HUGE) * offer.parameters
    promise = net = 0.0
    if offer.promise_known:
        promise = size(offer.promise, 0.1)
        net = size(offer.promise - rent, 0.4)
    return [
        1.0 if offer.fits else 0.0,
        1.0 if offer.parameters <= host.budget_left else 0.0,
        1.0 if slot.blueprint == index else 0.0,
        size(offer.parameters, 0.1),
        size(offer.macs, 0.1),
        size(rent, 0.1),
        size(rent, 0.01),
        promise,
        net,
        1.0 if offer.promise_known else 0.0,
    ]


def features_of(
    host: Report,
) -> tuple[list[float], list[list[float]], list[list[list[float]]]]:
    """One environment: host, slots and offers as nested lists."""
    slot_rows, offer_rows = [], []
    for slot in host.slots:
        slot_rows.append(slot_features(host, slot))
        rows = []
        for index, offer in enumerate(slot.offers):
            rows.append(offer_features(host, slot, index, offer))
        offer_rows.append(rows)
    return host_features(host), slot_rows, offer_rows


def naive_features(hosts: list[Report]) -> dict[str, torch.Tensor]:
    """Environment by environment: a small tensor per row, stacked level by level."""
    parts = []
    for host in hosts:
        host_row, slot_rows, offer_rows = features_of(host)
        parts.append(
            {
                "host": torch.tensor(host_row),
                "slots": torch.stack([torch.tensor(row) for row in slot_rows]),
                "offers": torch.stack(
                    [
                        torch.stack([torch.tensor(row) for row in rows])
                        for rows in offer_rows
                    ]
                ),
            }
        )
    return {key: torch.stack([part[key] for part in parts]) for key in parts[0]}


def listed_features(hosts: list[Report]) -> dict[str, torch.Tensor]:
    """The same loop without small tensors: lists of numbers, converted once."""
    host, slots, offers = zip(*map(features_of, hosts), strict=True)
    return {
        "host": torch.tensor(host),
        "slots": torch.tensor(slots),
        "offers": torch.tensor(offers),
    }
