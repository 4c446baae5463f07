"""Rows of a rollout for the store, with the events of all seeds.

Worlds report states, not changes: `events_between` compares two of them. A seed may
pass several stages within one decision. After the end of an episode the observation is
of the next one, so the effect of the last decision is computed from its action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, Op
from esper.contracts.devices import map_tensors
from esper.contracts.slots import SlotStates
from esper.contracts.stages import NEXT_STAGE, STAGE_EVENTS, Stage
from esper.contracts.world import LayeredWorld, Observation, VectorWorld
from esper.growth.actions import action_text
from esper.runs.decisions import features_json, heads_json
from esper.simic.rollout import Transition

Record = TypeVar("Record", Observation, SlotStates)
RECORDED_HOSTS: Final = 2
"""Hosts of a run whose decisions are recorded: they take most of the store's bytes."""
REPORT_COLUMNS: Final = ("score", "test", "added", "macs", "panicked")
"""Fields of `EpisodeReport` that the store has."""
EVENTS: Final = (
    *("planted", "blending", "holding", "kept", "pruned", "cleared", "aimed", "jumped"),
)
"""Kinds of events; `aimed`: another alpha target; `jumped`: any other change."""

EVENT_OF: Final = torch.tensor(
    [
        [EVENTS.index(STAGE_EVENTS.get((before, after), "jumped")) for after in Stage]
        for before in Stage
    ]
)
"""Event of a change of stage, int64 [stage, stage]."""
ALPHA_TARGETS: Final = torch.tensor([*HEADS[HEAD["alpha_target"]].choices.values()])


def rows_of(
    steps: Sequence[Transition], episode: Int64[Tensor, "time env"], world: VectorWorld
) -> dict[str, dict[str, Any]]:
    """Rows for the store by table; `episode` counts from 1."""

    def flat(values: Sequence[Tensor]) -> Tensor:
        """The values of all steps, `[time * env, ...]`."""
        return torch.stack([*values]).flatten(0, 1)

    def where(cells: Tensor) -> dict[str, Tensor]:
        """Columns with the step and the episode of each row."""
        return {
            "index": cells // world.num_envs,
            "env": cells % world.num_envs,
            "episode": episode.flatten()[cells],
        }

    results = [step.result for step in steps]
    host = [step.observation.host for step in steps]
    returns = flat([step.returns for step in steps])
    ended = flat([result.terminated | result.truncated for result in results])
    rows: dict[str, dict[str, Any]] = {
        "steps": {
            **where(torch.arange(len(returns))),
            "reward": flat([result.reward for result in results]),
            "score": flat([each.score for each in host]),
            "loss": flat([each.loss for each in host]),
            "added": flat([each.added for each in host]),
            "budget_left": flat([each.budget_left for each in host]),
        }
    }
    before = _concat([step.observation.slots for step in steps])
    after = _concat([result.observation.slots for result in results])
    none = torch.zeros_like(results[0].terminated)
    refused = [none if each.illegal is None else each.illegal for each in results]
    actions = flat([step.actions for step in steps])
    changes = events_between(before, after, ended, actions, flat(refused))
    if changes["env"]:
        names = [*(each.name for each in world.spec.blueprints), None]
        changes["blueprint"] = [names[kind] for kind in changes["blueprint"]]
        rows["events"] = {**changes, **where(torch.tensor(changes["env"]))}
    if bool(ended.any()):
        cells = ended.nonzero().flatten()
        rows["episodes"] = {**where(cells), "return": returns[cells]}
        reports = [result.report for result in results if result.report is not None]
        if reports:  # one entry per ended episode, in the same order
            rows["episodes"] |= {
                name: torch.cat([getattr(each, name) for each in reports])
                for name in REPORT_COLUMNS
            }
    return rows


def recorded_hosts(number: int, worlds: int) -> int:
    """Number of hosts of a world whose decisions are recorded: its first ones."""
    return max(0, -(-(RECORDED_HOSTS - number) // worlds))


def decision_rows(
    steps: Sequence[Transition],
    episode: Int64[Tensor, "time env"],
    world: VectorWorld,
    columns: Mapping[str, Tensor],
    hosts: int,
) -> dict[str, dict[str, Any]]:
    """Rows of the decisions of the first hosts, and of layers whose width is new.

    Args:
        steps: All steps of a rollout.
        episode: Number of the episode, from 1.
        world: Where the steps were taken.
        columns: `TamiyoRolloutBuffer.columns` of the rollout.
        hosts: Number of hosts.
    """
    if not hosts:
        return {}
    time, spec = len(steps), world.spec
    shown = [step.observation for step in steps] + [steps[-1].result.observation]
    first = torch.arange(time + 1).unsqueeze(1) * world.num_envs + torch.arange(hosts)
    seen = map_tensors(lambda x: x[first.flatten()], _concat(shown))
    actions, legal, log_probs, values = (
        columns[name][:, :hosts].flatten(0, 1)
        for name in ("actions", "masks", "distribution", "values")
    )
    slots = range(spec.slots.max_slots)
    names: Sequence[str] = [f"slot {slot}" for slot in slots]
    rows: dict[str, dict[str, Any]] = {}
    if isinstance(world, LayeredWorld):
        names, layers = world.slot_names, world.layer_names
        units = seen.slots.units[:, : len(layers) - 1].long()
        outputs = torch.full_like(units[:, :1], world.outputs)
        widths = torch.cat((units, outputs), dim=1).unflatten(0, first.shape)
        start = seen.episode_start.view(first.shape)
        found = layer_rows(widths, start, episode[:, :hosts])
        found["name"] = [layers[n] for n in found["layer"].tolist()]
        rows["layers"] = found
    cells = torch.arange(len(actions))
    rows["decisions"] = {
        "index": cells // hosts,
        "env": cells % hosts,
        "episode": episode[:, :hosts].flatten(),
        "action": [action_text(row[None], names, spec) for row in actions],
        "value": values,
        "features": features_json(map_tensors(lambda x: x[:-hosts], seen), spec, slots),
        "heads": heads_json(actions, legal, log_probs, spec, slots),
    }
    return rows


def layer_rows(
    widths: Int64[Tensor, "steps env layer"],
    start: Bool[Tensor, "steps env"],
    episode: Int64[Tensor, "time env"],
) -> dict[str, Any]:
    """Columns of `layers`: a row where an episode starts or a width differs.

    Args:
        widths: Before each decision of a rollout, and before the next one.
        start: Where an episode starts.
        episode: Number of the episode at each decision.
    """
    new = start.unsqueeze(2).repeat(1, 1, widths.shape[2])
    new[1:] |= widths[1:] != widths[:-1]
    new[-1] &= ~start[-1].unsqueeze(1)  # the next rollout has this row
    index, env, layer = new.nonzero(as_tuple=True)
    return {
        "index": index,
        "env": env,
        "episode": torch.cat((episode, episode[-1:]))[index, env],
        "layer": layer,
        "width": widths[index, env, layer],
    }


def _concat(parts: Sequence[Record]) -> Record:
    """Records of tensors, one after the other along the first axis."""
    joined: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        is_tensor = isinstance(values[0], Tensor)
        joined[field.name] = torch.cat(values) if is_tensor else _concat(values)
    return replace(parts[0], **joined)


def events_between(
    before: SlotStates,
    after: SlotStates,
    ended: Bool[Tensor, " env"],
    actions: Int64[Tensor, "env head"],
    illegal: Bool[Tensor, " env"],
) -> dict[str, list[Any]]:
    """Events of every slot in one step, in order of environment and slot.

    Args:
        before: State before the decision.
        after: State after it.
        ended: Where `after` is of another episode.
        actions: The actions, used only where an episode ended.
        illegal: Where the action was not carried out.

    Returns:
        Columns of the store's table `events`. `blueprint` is an index, -1 for none;
        `alpha` is the value after the step, or the last one of an ended episode.
    """
    device = before.stage.device
    op, at, kind, aim = (
        actions[:, HEAD[head]].unsqueeze(1)
        for head in ("op", "slot", "blueprint", "alpha_target")
    )
    over = ended.unsqueeze(1)
    # The slot of the last action of an ended episode.
    here = torch.arange(before.stage.shape[1], device=device) == at
    here = here & over & (op != Op.WAIT) & ~illegal.unsqueeze(1)
    planted, aimed_at = here & (op == Op.GERMINATE), here & (op == Op.SET_ALPHA)
    stage, blueprint, target, alpha = (
        torch.where(over, getattr(before, name), getattr(after, name))
        for name in ("stage", "blueprint", "alpha_target", "alpha")
    )
    stage = torch.where(here, NEXT_STAGE.to(device)[op, before.stage], stage)
    blueprint = torch.where(planted, kind, blueprint)
    target = torch.where(aimed_at, ALPHA_TARGETS.to(target)[aim], target)
    moved = stage != before.stage
    swapped = ~moved & (blueprint != before.blueprint)
    aimed = ~moved & ~swapped & (target != before.alpha_target)
    word = EVENT_OF.to(stage.device)[before.stage, stage]
    word = torch.where(aimed, EVENTS.index("aimed"), word)
    env, slot = torch.nonzero(moved | swapped | aimed, as_tuple=True)
    kind = torch.where(blueprint >= 0, blueprint, before.blueprint)
    found = {
        "env": env,
        "slot": slot,
        "what": word[env, slot],
        "stage_from": before.stage[env, slot],
        "stage_to": stage[env, slot],
        "blueprint": kind[env, slot],
        "alpha": alpha[env, slot],
    }
    columns: dict[str, list[Any]] = {
        name: part.tolist() for name, part in found.items()
    }
    columns["what"] = [EVENTS[index] for index in columns["what"]]
    for name in ("stage_from", "stage_to"):
        columns[name] = [Stage(number).name for number in columns[name]]
    return columns
