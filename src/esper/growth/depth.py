"""Growth in depth: add copies of blocks to a list of equal residual blocks.

    deepen_copy    copies of blocks; the output changes, and the receipt says how much
    deepen_zero    copies whose last projections are zero: the identity, bit for bit

A place is an `nn.ModuleList` or `nn.Sequential` whose blocks are called one after the
other, such as "transformer.h" of GPT-2; "h" names it too if no other list ends so. If
the first block has other sizes, as in a stage of a ResNet, the others are copied. As
many blocks as there are: the whole stack again, after its end. Fewer: copies of evenly
spread blocks, each after its original. The model's config and the numbers that blocks
have for their caches follow.
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map

from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.messages import described
from esper.growth.actions import DepthBlueprint
from esper.growth.analysis.config_fields import POSITION, follow_depth
from esper.growth.analysis.slots import ARROW, Site, check_host, check_not_shared
from esper.growth.analysis.tracing import Example, call, isolated, tensors_of
from esper.growth.hooks import Change
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import (
    SeedModules,
    all_or_nothing,
    host_parameters,
    uninterrupted,
)

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

REBUILT: Final = (
    *("lists", "seeds", "fields", "tied", "decided", "spec", "slots", "base"),
    *("why_branches", "depths", "_prices", "_parts", "_parts_at"),
)
"""Attributes of a growing model that change with the depth of its host."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """New blocks in a list, each a copy of another block."""

    name: str
    order: Sequence[int]
    """The former position of each block or of its original."""

    @property
    def new(self) -> list[str]:
        """Names of the new blocks."""
        order = self.order
        return [f"{self.name}.{p}" for p, n in enumerate(order) if order.index(n) != p]

    def names(self, *ends: str) -> list[tuple[str, ...]]:
        """New names of modules or tensors; those in one block have copies, too."""
        parts = [re.fullmatch(rf"{re.escape(self.name)}\.(\d+)(.*)", e) for e in ends]
        blocks = {None if part is None else int(part[1]) for part in parts}
        same = [p for p, n in enumerate(self.order) if blocks == {n}]
        return [
            tuple(
                f"{self.name}.{self.order.index(int(m[1])) if p < 0 else p}{m[2]}"
                if m
                else end
                for end, m in zip(ends, parts, strict=True)
            )
            for p in same or [-1]
        ]

    def refusal(self, why: str, kind: str = "more") -> InvalidInputError:
        """An error."""
        hint = " Use how='copy'." if kind == "zero" else ""
        return InvalidInputError(
            f"{self.name!r} cannot get {kind} blocks: {why}.{hint}"
        )


def find_blocks(
    host: nn.Module, name: str, by: int, sizes: Mapping[str, Sequence[int]] | None = {}
) -> Insertion:
    """How a list gets more blocks, by its name or the end of it; refuses others.

    `sizes` are the first shapes of tensors that have grown; None for any shapes.
    """
    if not isinstance(name, str):
        raise InvalidInputError(
            f"expected the name of a list of blocks, got {type(name).__name__}."
        )
    lists = _lists(host)
    found = [n for n in lists if n == name] or [n for n in lists if _ends(n, name)]
    if not found:
        raise unknown("the host has no list of blocks", name, lists)
    if len(found) > 1:
        raise InvalidInputError(
            f"{name!r} may be {', '.join(found)}. Write one of these names."
        )
    (name,) = found
    held = lists[name]._modules  # `children` names a shared block once
    blocks = [block for block in held.values() if block is not None]
    kinds = {type(block).__name__: 0 for block in blocks}
    facts = [_facts(block, f"{name}.{n}.", sizes) for n, block in enumerate(blocks)]
    first = facts.index(facts[-1]) if facts else 0
    for wrong, why in (
        (not blocks, "it is empty"),
        (len(kinds) > 1, f"its blocks are of different classes, {', '.join(kinds)}"),
        (first > 1 or len({*facts[first:]}) > 1, "its blocks have different sizes"),
        (not any(True for b in blocks for _ in b.parameters()), "it has no weights"),
        (
            [*held] != [str(n) for n in range(len(blocks))],
            "its blocks have names instead of numbers",
        ),
    ):
        if wrong:
            raise Insertion(name, ()).refusal(why)
    for position in range(first, len(blocks)):
        check_not_shared(host, f"{name}.{position}", blocks[position])
    count = len(blocks) - first
    stacks, rest = divmod(by, count)
    twice = [int((n + 0.5) * count / rest) for n in range(rest)]
    order = [*sorted([*range(count), *twice]), *[*range(count)] * stacks]
    return Insertion(name, (*range(first), *(first + n for n in order)))


def find_stacks(host: nn.Module) -> list[str]:
    """Lists of at least two blocks of a host, outer ones before those inside them."""
    found: list[str] = []
    for name, modules in _lists(host).items():
        blocks = [*modules.children()]
        if len(blocks) > 1 and any(True for _ in blocks[-1].children()):
            with suppress(InvalidInputError):
                found.append(find_blocks(host, name, 0).name)
    return found


def split_slots(
    host: nn.Module, slots: Sequence[str] | str
) -> tuple[Sequence[str] | str, list[str]]:
    """Slots for seeds, and the lists of blocks among the names."""
    listed = isinstance(slots, Sequence) and not isinstance(slots, str)
    if not listed or not isinstance(host, nn.Module):
        return slots, []
    lists, modules = _lists(host), dict(host.named_modules())
    stacks = find_stacks(host)

    def is_list(slot: object) -> bool:
        if not isinstance(slot, str) or not slot or slot in modules:
            return slot in stacks or isinstance(lists.get(str(slot)), nn.ModuleList)
        return any(_ends(name, slot) for name in lists)

    named = [find_blocks(host, slot, 0, None).name for slot in slots if is_list(slot)]
    return [slot for slot in slots if not is_list(slot)], named


def _lists(host: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in host.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        if name and not name.startswith(f"{NAME}.")
    }


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _facts(
    block: nn.Module, prefix: str, sizes: Mapping[str, Sequence[int]] | None
) -> object:
    """What equal blocks have in common, before they have grown."""
    tensors = dict((*block.named_parameters(), *block.named_buffers()))
    shapes = {} if sizes is None else {n: t.shape for n, t in tensors.items()}
    first = {n: tuple((sizes or {}).get(f"{prefix}{n}", shapes[n])) for n in shapes}
    return (
        tuple((name, type(module)) for name, module in block.named_modules()),
        tuple((n, first.get(n), t.dtype, t.requires_grad) for n, t in tensors.items()),
    )


# Adding blocks to a host.


def add_blocks(
    host: nn.Module,
    example: Example,
    insertion: Insertion,
    how: DepthBlueprint,
    undo: list[Change],
) -> list[str]:
    """Add copies of blocks to a host; extends `undo`.

    Returns the names of the parameters of a block that are zero at first.
    """
    if how not in ("copy", "zero"):
        raise InvalidInputError(f"how must be 'copy' or 'zero', got {how!r}.")
    before = _Calls(host, example, insertion)
    for name in before.names:
        if (count := before.called.count(name)) != 1:
            raise insertion.refusal(f"{name!r} is called {count} times in one forward")
    read, returned = ([*t[name].shape] for t in (before.given, before.returned))
    if read != returned:
        why = f"{name!r} is not residual, it reads {read} and returns {returned}"
        raise insertion.refusal(why)
    if len({*map(id, before.inputs)}) < len(before.inputs):
        raise insertion.refusal("its blocks read the same tensor")
    insert(host, insertion, undo)
    try:
        after = _Calls(host, example, insertion)
    except Exception as error:
        raise insertion.refusal(f"the host then fails, {described(error)}") from error
    if after.called != after.names:
        missed = [n for n in after.names if n not in after.called] or after.names
        why = f"the host reads the list by position and does not call {missed[0]!r}"
        raise insertion.refusal(why)
    if not insertion.new:
        return []
    if not _is_residual(host, example, insertion):
        raise insertion.refusal(f"{before.names[-1]!r} is not residual")
    return _zero(host, example, insertion, before.answers) if how == "zero" else []


def _is_residual(host: nn.Module, example: Example, insertion: Insertion) -> bool:
    """Whether the host reads what comes before a new block also without the block.

    With matrices of zero, a block that is not residual returns a constant.
    """
    block = host.get_submodule(insertion.new[0])
    path, _, number = insertion.new[0].rpartition(".")
    earlier = host.get_submodule(f"{path}.{int(number) - 1}")

    def noisy(leaf: Any) -> Any:  # noqa: ANN401
        adds = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf + torch.randn_like(leaf) if adds else leaf

    def reads_earlier() -> bool:
        expected = answers(host, example)
        handle = earlier.register_forward_hook(lambda m, _, out: tree_map(noisy, out))
        with ExitStack() as stack:
            stack.callback(handle.remove)
            return not all(map(torch.equal, expected, answers(host, example)))

    if not reads_earlier():  # as with a head of zeros
        return True
    held = deepcopy(block.state_dict())
    set_zero([block], [name for name, p in block.named_parameters() if p.dim() > 1])
    found = reads_earlier()
    block.load_state_dict(held)
    return found


def insert(host: nn.Module, insertion: Insertion, undo: list[Change]) -> None:
    """Add copies of blocks, number all blocks again and let the config follow."""
    modules, order = host.get_submodule(insertion.name), insertion.order
    before, old = modules._modules, [*modules.children()]
    undo.append(lambda: vars(modules).update(_modules=before))
    new = [
        old[n] if order.index(n) == at else _copied(host, old[n], insertion)
        for at, n in enumerate(order)
    ]
    modules._modules = {str(position): block for position, block in enumerate(new)}
    known, now = ([*map(_numbers, blocks)] for blocks in (old, new))
    for key in known[-1]:
        starts = {one[key] - at for at, one in enumerate(known) if key in one}
        for at, block in enumerate(new) if len(starts) == 1 else ():
            if key in now[at]:
                held = vars(block.get_submodule(key[0]))
                undo.append(partial(held.update, {key[1]: now[at][key]}))
                held[key[1]] = min(starts) + at
    path = insertion.name.split(".")
    for depth in range(len(path)):  # parts may have a config of their own
        owner, name = (".".join(ends) for ends in (path[:depth], path[depth:]))
        part = host.get_submodule(owner)
        undo.append(follow_depth(part, name, order, host_parameters(part)))


def _copied(host: nn.Module, block: nn.Module, insertion: Insertion) -> nn.Module:
    """A copy of a block that shares with the host what the block shares with it."""

    def held(module: nn.Module) -> list[Any]:
        homes = (vars(module), module._modules, module._buffers)
        return [value for home in homes for value in home.values()]

    own, named = {*block.modules()}, dict(block.named_parameters())
    outside = {id(v) for m in host.modules() if m not in own for v in held(m)}
    for name, p in named.items():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise insertion.refusal(f"{name!r} of one has a hook on its gradient")
    try:
        made = deepcopy(
            block, {id(v): v for m in own for v in held(m) if id(v) in outside}
        )
    except Exception as error:
        raise insertion.refusal(f"copying one fails, {described(error)}") from error
    for name, parameter in made.named_parameters():  # a mark of the user's own
        vars(parameter).update(vars(named[name]))
    return made


def _numbers(block: nn.Module) -> dict[tuple[str, str], int]:
    """Attributes that may hold the position of a block, by submodule and name."""
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and POSITION.fullmatch(name)
    }


class _Calls:
    """One call of a host on an example: what its blocks read and returned."""

    def __init__(self, host: nn.Module, example: Example, insertion: Insertion) -> None:
        blocks = host.get_submodule(insertion.name).children()
        names = {block: f"{insertion.name}.{n}" for n, block in enumerate(blocks)}
        self.names = [*names.values()]
        self.called: list[str] = []
        self.inputs: list[Any] = []
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}
        self.order: list[nn.Module] = []
        """All modules in the order of their calls."""

        def enter(module: nn.Module, *given: Any) -> None:  # noqa: ANN401
            self.called.append(names[module])
            self.inputs.append(_first(given))
            self.given[names[module]] = _first(given).clone()  # may change in place

        def leave(module: nn.Module, args: Any, answer: Any) -> None:  # noqa: ANN401
            self.returned[names[module]] = _first(answer).clone()

        with ExitStack() as stack:
            handle = register_module_forward_pre_hook(lambda m, _: self.order.append(m))
            stack.callback(handle.remove)
            for block in names:
                handle = block.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(block.register_forward_hook(leave).remove)
            self.answers = answers(host, example)


def answers(host: nn.Module, example: Example) -> list[Tensor]:
    """The tensors of an output that do not depend on the number of blocks.

    Caches and hidden states of all blocks are tuples in the output.
    """
    with isolated(host, training=False), torch.no_grad():
        return [tensor.clone() for tensor in _direct(call(host, example))]


def _direct(output: Any) -> list[Tensor]:  # noqa: ANN401
    values = [*output.values()] if isinstance(output, Mapping) else output
    listed = values if isinstance(values, list | tuple) else [values]
    direct = [t for t in listed if isinstance(t, Tensor) and t.is_floating_point()]
    return direct or tensors_of(output)[:1]


def _first(values: Any) -> Tensor:  # noqa: ANN401
    """The first floating-point tensor; an empty one if there is none."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    found = (leaf for leaf in leaves if leaf.is_floating_point())
    return next(found, torch.empty(0))


def _zero(
    host: nn.Module, example: Example, insertion: Insertion, expected: Sequence[Tensor]
) -> list[str]:
    """Set as few parameters of new blocks to zero as make these the identity.

    All are zero at first. Each gets its values back, in the order of the forward pass,
    if the blocks stay the identity without it. This leaves the last projections.
    """
    blocks = {name: host.get_submodule(name) for name in insertion.new}
    held = {name: deepcopy(block.state_dict()) for name, block in blocks.items()}

    def calls(zeros: Sequence[str]) -> _Calls | None:
        """One call with some parameters of zero; None if blocks change their input."""
        for name, block in blocks.items():
            block.load_state_dict(held[name])
        set_zero([*blocks.values()], zeros)
        made = _Calls(host, example, insertion)
        same = (torch.equal(made.given[n], made.returned[n]) for n in blocks)
        return made if all(same) else None

    one = next(iter(blocks.values()))
    zeroed = [name for name, _ in one.named_parameters()]
    made = calls(zeroed)
    if made is None:
        raise insertion.refusal("with weights of zero they change their input", "zero")
    times = {module: -n for n, module in enumerate(reversed(made.order))}
    parts = dict(one.named_modules())

    def time(name: str) -> int:
        """When the module of a parameter was called, or else the one around it."""
        owner = name.rpartition(".")[0]
        for path in (owner, owner.rpartition(".")[0] or owner):
            if parts[path] in times:
                return times[parts[path]]
        raise insertion.refusal(f"the example does not call {owner!r} of one", "zero")

    for name in sorted(zeroed, key=time):
        fewer = [other for other in zeroed if other != name]
        if calls(fewer) is not None:
            zeroed = fewer
    made = calls(zeroed)
    assert made is not None
    if not all(map(torch.equal, expected, made.answers)):
        raise insertion.refusal("the host's output depends on their number", "zero")
    learning = {
        f"{at}.{name}": parameter
        for at, block in blocks.items()
        for name in zeroed
        if (parameter := block.get_parameter(name)).requires_grad
    }
    if not learning:  # a copy of a zero block
        return zeroed
    with isolated(host, training=False), torch.enable_grad():
        sums = [(t * torch.randn_like(t)).sum() for t in _direct(call(host, example))]
        found = torch.autograd.grad(sums, [*learning.values()], allow_unused=True)
    for name, gradient in zip(learning, found, strict=True):
        if gradient is None or not bool(gradient.any()):
            raise insertion.refusal(f"no gradient reaches {name!r}", "zero")
    return zeroed


def set_zero(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Set some parameters of blocks to zero."""
    with torch.no_grad():
        for block in blocks:
            for name in names:
                block.get_parameter(name).zero_()


# Adding blocks to a growing model.


def deepen(
    model: "GrowingModel", name: str, by: int, how: DepthBlueprint
) -> tuple[str, float]:
    """Add blocks to a growing model's host, its optimiser and its copies.

    Returns the name of the list and the largest change of the output on the example.
    """
    insertion = find_blocks(model.host, name, by, model.seeds.sizes)
    before = answers(model, model.example)
    with uninterrupted(), all_or_nothing(undo := list[Change]()):
        change_depth(model, insertion, how, undo)
        after = answers(model, model.example)
    pairs = zip(after, before, strict=True)
    return insertion.name, max(float((a - b).abs().max()) for a, b in pairs)


def match_depths(
    model: "GrowingModel",
    steps: Sequence[tuple[str, Sequence[int]]],
    state: Mapping[str, Any],
    undo: list[Change],
) -> None:
    """Repeat the insertions of a saved state that a model has not had yet."""
    done = len(model.depths)
    if [*steps[:done]] != model.depths:
        raise InvalidInputError(
            "the saved Grower has other blocks than this one. Load it into the host as "
            "it was before it got more blocks."
        )
    for name, order in steps[done:]:
        count = len(find_blocks(model.host, name, 0, model.seeds.sizes).order)
        held = [f"host.{name}.{n}." for n in range(len(order))]
        saved = all(any(key.startswith(one) for key in state) for one in held)
        if not saved or {*order} != {*range(count)}:
            raise InvalidInputError(f"the blocks of {name!r} as saved are damaged.")
        change_depth(model, Insertion(name, order), "copy", undo)


def change_depth(
    model: "GrowingModel", insertion: Insertion, how: DepthBlueprint, undo: list[Change]
) -> None:
    """Add blocks to everything that belongs to a growing model; extends `undo`."""
    _refuse(model, insertion)
    host, seeds, name = model.host, model.seeds, insertion.name
    own = host_parameters(host)
    sites = [*map(_modules, (place.site for place in seeds.places)), *zip(model.lists)]
    sizes = {
        other: shape
        for tensor, shape in seeds.sizes.items()
        for (other,) in insertion.names(tensor)
    }
    with _detached(seeds, undo):
        zeroed = add_blocks(host, model.example, insertion, how, undo)
    fresh = type(model)(
        host,
        [ARROW.join(one) for ends in sites for one in insertion.names(*ends)],
        model.example,
        blueprints=[blueprint.name for blueprint in model.spec.blueprints],
        seeds_per_slot=model.seeds_per_slot,
        min_age=model.spec.slots.min_age,
        tick=model.batches_per_tick,
        merge_only=model.merge_only,
        tie_widths=model.tie_widths,
        take_over=True,
    )
    undo += fresh.undo_steps
    fresh.seeds.sizes = sizes
    fresh.seeds.flow.owner_ref = ref(model)
    fresh.depths = [*model.depths, (name, [*insertion.order])]
    whys = model.why_branches.items()
    fresh.why_branches = {
        fresh.seeds.index(model.slots[slot]): why for slot, why in whys
    }
    fresh.seeds.copies = _copies(seeds, fresh.seeds, insertion, zeroed, undo)
    undo.append(partial(vars(model).update, {key: vars(model)[key] for key in REBUILT}))
    vars(model).update({key: vars(fresh)[key] for key in REBUILT})
    if model.surgery is not None:
        now = host_parameters(host)
        undo.append(model.surgery.restore_point())
        origin = {
            now[other]: own[tensor]
            for tensor in own
            for (other,) in insertion.names(tensor)[1:]
        }
        model.surgery.take_over(now, model.seed_parameters(), origin)


def _refuse(model: "GrowingModel", insertion: Insertion) -> None:
    """Raise if something that belongs to a model could not follow its depth."""
    check_host(model.host)
    if model.ranks.wrapper is not None:
        raise insertion.refusal(
            "DistributedDataParallel keeps its list of parameters; call detach(), add "
            "them to the plain host and wrap it again"
        )
    for one in model.seeds.living_seeds():
        if any(
            end.startswith(f"{insertion.name}.") for end in _modules(one.place.site)
        ):
            raise insertion.refusal(
                f"slot {one.name!r} has a seed; keep or prune the seeds in the blocks "
                "first"
            )
    own = {*model.host.parameters()} if model.surgery is not None else set()
    for scheduler in gc.get_objects() if own else ():
        # `isinstance` would ask proxies for their class, and run code of others.
        if issubclass(type(scheduler), LRScheduler):
            held = tree_leaves(
                [v for k, v in vars(scheduler).items() if k != "optimizer"]
            )
            if any(isinstance(value, Tensor) and value in own for value in held):
                raise insertion.refusal(
                    f"{type(scheduler).__name__} holds parameters of the host; let it "
                    "use the optimizer's groups"
                )


@contextmanager
def _detached(seeds: SeedModules, undo: list[Change]) -> Iterator[None]:
    """Take hooks and seeds from a host in the block, so that blocks can be copied."""
    seeds.detach()
    undo.append(seeds.attach)
    yield
    seeds.attach()
    undo.append(seeds.detach)


def _modules(site: Site) -> tuple[str, ...]:
    return (site.outlet,) if site.residual else (site.inlet, site.outlet)


def _copies(
    before: SeedModules,
    after: SeedModules,
    insertion: Insertion,
    zeroed: Sequence[str],
    undo: list[Change],
) -> list[ref[SeedModules]]:
    """Add copies of their own blocks to all averages that follow a host."""
    following = before.living_copies()
    copies = [copy for copy in before.copies if copy() not in following]
    for living in following:
        host = living.host
        with _detached(living, undo):
            insert(host, insertion, undo)
            set_zero([*map(host.get_submodule, insertion.new)], zeroed)
        undo += [living.attach, living.restore_point()]
        living.detach()
        here, there = (dict(one.named_modules()) for one in (after.host, host))
        twins = {id(here[name]): there[name] for name in here.keys() & there.keys()}
        places = deepcopy(after.places, twins)
        grown = SeedModules(host, places, after.slots, after.blueprints)
        grown.adopt(living)
        grown.copies, grown.sizes, grown.twins = [], after.sizes, dict(after.items())
        undo.append(grown.detach)
        grown.attach()
        copies.append(ref(grown))
    return copies
