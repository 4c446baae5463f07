"""Naming places in a host.

    "fc1->fc2"   reads what goes into fc1, adds to what comes out of fc2
    "fc2->fc2"   beside one layer: reads its input, adds to its output
    "block"      residual: reads and adds to the output of block

Names are the host's own module names. A name that is no module's, a module under two
names or with tied weights, a wrapped or compiled host: each is refused in one line.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from esper.contracts.errors import BadInput

ARROW: Final = "->"


@dataclass(frozen=True, slots=True)
class Site:
    """Where seeds of one place read and write, by module name."""

    inlet: str
    outlet: str
    residual: bool

    @property
    def name(self) -> str:
        """The name as a user writes it."""
        return self.outlet if self.residual else f"{self.inlet}{ARROW}{self.outlet}"


def parse(slot: str) -> Site:
    """Read one name."""
    ends = [end.strip() for end in slot.split(ARROW)]
    if len(ends) > 2 or not all(ends):
        raise BadInput(
            f"slot {slot!r} must be a module name, or two joined by '->' as in "
            "'fc1->fc2'."
        )
    return Site(ends[0], ends[-1], residual=len(ends) == 1)


def find_sites(host: nn.Module, slots: Iterable[str]) -> tuple[Site, ...]:
    """The sites of a host; refuses what cannot be grown."""
    if isinstance(slots, str):
        raise BadInput(f"slots must be a list of names, got the string {slots!r}.")
    _refuse_wrapped(host)
    sites = tuple(parse(slot) for slot in slots)
    if not sites:
        raise BadInput(
            "slots is empty; name a place, or let esper.suggest_slots(model, example) "
            "find some."
        )
    doubled = [site for site, count in Counter(sites).items() if count > 1]
    if doubled:
        raise BadInput(
            f"slot {doubled[0].name!r} is named twice; a place holds several seeds "
            "by itself (seeds_per_slot)."
        )
    names = {name: module for name, module in host.named_modules() if name}
    for site in sites:
        for end in (site.inlet, site.outlet):
            if end not in names:
                near = get_close_matches(end, names, n=1, cutoff=0.0)
                hint = f"did you mean {near[0]!r}?" if near else "it has no modules."
                raise BadInput(f"the host has no module {end!r}; {hint}")
            _refuse_shared(host, end, names[end])
    return sites


def _refuse_wrapped(host: nn.Module) -> None:
    if not isinstance(host, nn.Module):
        raise BadInput(f"the host must be an nn.Module, got {type(host).__name__}.")
    if isinstance(host, DataParallel | DistributedDataParallel):
        raise BadInput(
            f"the host is wrapped in {type(host).__name__}; pass model.module."
        )
    if hasattr(host, "_orig_mod"):
        raise BadInput(
            "the host is compiled, and a compiled graph does not grow; pass the "
            "module before torch.compile and compile export()'s result."
        )
    if type(host).__module__.startswith("torch.jit"):
        raise BadInput("the host is a TorchScript module; pass the nn.Module itself.")
    parameters = [*host.parameters()]
    if not parameters:
        raise BadInput("the host has no parameters; there is nothing to grow.")
    if any(is_lazy(parameter) for parameter in parameters):
        raise BadInput(
            "the host has lazy parameters; run it once on an example before growing."
        )
    kinds = {(p.device, p.dtype) for p in parameters if p.is_floating_point()}
    if len({device for device, _ in kinds}) > 1:
        devices = ", ".join(sorted({str(device) for device, _ in kinds}))
        raise BadInput(f"the host lies on several devices ({devices}); use one.")


def _refuse_shared(host: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a module that the host holds under two names, or whose weights it ties."""
    aliases = [
        other
        for other, found in host.named_modules(remove_duplicate=False)
        if found is module
    ]
    if len(aliases) > 1:
        raise BadInput(
            f"module {name!r} is shared with {aliases[aliases[0] == name]!r}; a slot "
            "needs a module of its own."
        )
    mine = {id(parameter): key for key, parameter in module.named_parameters()}
    for other, parameter in host.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and not f"{other}.".startswith(f"{name}."):
            raise BadInput(
                f"{name}.{mine[id(parameter)]} is tied to {other}; a slot needs "
                "weights of its own."
            )
