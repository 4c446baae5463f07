"""Random instances of the simulated world: what is drawn, and what it means.

*Visible*: gains are shown as promises. A quarter of the hosts punish all growth, and
a slot may inherit a seed: good or harmful, at the right or the wrong alpha.

*Hidden*: no promise is shown. One slot is fossilised; in the other a seed of the first
large blueprint fades away, and while its alpha is not 0 its contribution shows whether
that one is good here and the second bad, or the reverse. Nothing that can be done
meanwhile, and nothing that is seen later, carries this over: only memory does. The
small blueprint is safe and poor.

Everything that adds up is drawn on a grid of powers of two, so sums are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.stages import Stage
from esper.environment.slot_life import EMPTY, LIFE, SPEC, cooling, mature

HORIZON: Final = 12
"""Steps of every episode."""
BARREN_SHARE: Final = 0.25
"""Share of visible instances in which no gain is positive."""
INHERITED_SHARE: Final = 0.4
"""Share of visible slots that start with a seed."""
SIZES: Final = ((6, 10), (12, 20), (24, 40))
"""Parameters of each blueprint, in 64ths of the host's: least and most."""
SAFE, GOOD, BAD = 0.125, 0.5625, -0.25
"""Gains in hidden instances: of the small blueprint, and of the two large ones."""
WRONG_ALPHA_SHARE: Final = 0.75
"""Share of inherited seeds whose alpha does not suit their slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """What decides an episode, for many environments."""

    hidden: Bool[Tensor, " env"]
    """Whether gains are shown only by a contribution."""
    gain: Float[Tensor, "env slot blueprint"]
    """Score that a mature, fossilised seed at the best alpha adds."""
    fits: Bool[Tensor, "env slot blueprint"]
    parameters: Float[Tensor, "env slot blueprint"]
    """Parameters as a multiple of the host's."""
    budget: Float[Tensor, " env"]
    """Parameters that all seeds together may have."""
    rent: Float[Tensor, " env"]
    """Score charged per parameter."""
    depth: Float[Tensor, "env slot"]
    """Above one half, SCALE suits; below, ADD."""
    capacity: Float[Tensor, "env slot"]
    """Below one half, a one-step blend or fade does damage."""
    liveness: Float[Tensor, "env slot"]
    """Above one half, LINEAR suits; below, SIGMOID."""
    gradient_share: Float[Tensor, "env slot"]
    """Above one half, full alpha is best; below, half."""
    life: Int64[Tensor, "env slot"]
    """Life of each slot at the start."""
    blueprint: Int64[Tensor, "env slot"]
    """Blueprint of each slot at the start; -1 when empty."""
    style: Int64[Tensor, "env slot"]
    """Style of each slot at the start."""
    clock: Int64[Tensor, " env"]
    """Steps of the horizon that have passed at the start; 0 in every drawn instance."""

    def __len__(self) -> int:
        """How many instances there are."""
        return self.hidden.shape[0]

    @property
    def promise_known(self) -> Bool[Tensor, "env slot blueprint"]:
        """Whether gains are shown."""
        return ~self.hidden.view(-1, 1, 1).expand_as(self.gain)

    @property
    def promise(self) -> Float[Tensor, "env slot blueprint"]:
        """Gains as far as they are shown; 0 elsewhere."""
        return torch.where(self.promise_known, self.gain, 0.0)

    @property
    def nature(self) -> Int64[Tensor, "env slot"]:
        """Index into `NATURES`."""
        deep, fragile = self.depth > 0.5, self.capacity < 0.5
        return 4 * deep + 2 * fragile + 1 * (self.liveness > 0.5)

    @property
    def wants_half(self) -> Int64[Tensor, "env slot"]:
        """1 where alpha is best at one half."""
        return (self.gradient_share < 0.5).to(torch.int64)

    def select(self, index: Tensor) -> "Instances":
        """The instances at an index or where a mask is set."""
        return self._each(lambda _, mine: mine[index])

    def to(self, device: str) -> "Instances":
        """The same instances on another device."""
        return self._each(lambda _, mine: mine.to(device))

    def replaced(self, where: Bool[Tensor, " env"], others: "Instances") -> "Instances":
        """These instances, or the others where the mask is set."""

        def pick(name: str, mine: Tensor) -> Tensor:
            mask = where.view(-1, *[1] * (mine.dim() - 1))
            return torch.where(mask, getattr(others, name), mine)

        return self._each(pick)

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> "Instances":
        names = [field.name for field in fields(self)]
        return Instances(**{name: change(name, getattr(self, name)) for name in names})


def draw_instances(
    num: int, generator: Generator, hidden: Bool[Tensor, " env"]
) -> Instances:
    """Draw so many instances on the CPU, hidden where asked."""
    visible = draw_visible(num, generator)
    if not hidden.any():
        return visible
    return visible.replaced(hidden, hide(visible, generator))


def draw_visible(num: int, generator: Generator) -> Instances:
    """Instances that show everything the optimum uses."""
    slots = SPEC.slots.max_slots
    pairs = (num, slots, len(SPEC.blueprints))

    def coin(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    def grid(low: int, high: int, unit: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator) / unit

    low = 0.1 + 0.3 * torch.rand(4, num, slots, generator=generator)
    traits = low + 0.5 * coin(0.5, 4, num, slots)  # clearly on one side
    barren = coin(BARREN_SHARE, num, 1, 1)
    gain = torch.where(barren, grid(-112, 0, 256, *pairs), grid(-80, 160, 256, *pairs))
    parameters = torch.stack([grid(*s, 64, num, slots) for s in SIZES], dim=2)

    starts = torch.tensor(
        [
            [LIFE[mature(stage, alpha)] for alpha in (0.5, 1.0)]
            for stage in (Stage.BLENDING, Stage.HOLDING)
        ]
    )
    inherits = coin(INHERITED_SHARE, num, slots)
    is_full = (traits[3] > 0.5) ^ coin(WRONG_ALPHA_SHARE, num, slots)
    start = starts[coin(0.5, num, slots).long(), is_full.long()]
    planted = torch.where(coin(0.5, num, slots), gain.argmax(2), gain.argmin(2))
    style = torch.randint(2, (num, slots), generator=generator)
    added = (parameters.gather(2, planted.unsqueeze(2)).squeeze(2) * inherits).sum(1)

    return Instances(
        hidden=torch.zeros(num, dtype=torch.bool),
        gain=gain,
        fits=coin(0.75, *pairs),
        parameters=parameters,
        budget=grid(24, 80, 64, num).maximum(added),
        rent=grid(4, 20, 64, num),
        depth=traits[0],
        capacity=traits[1],
        liveness=traits[2],
        gradient_share=traits[3],
        life=torch.where(inherits, start, EMPTY),
        blueprint=torch.where(inherits, planted, -1),
        style=torch.where(inherits, style, 0),
        clock=torch.zeros(num, dtype=torch.int64),
    )


def hide(instances: Instances, generator: Generator) -> Instances:
    """Hidden instances with the traits, sizes and rents of these."""
    num = len(instances)
    draws = torch.randint(2, (num, 5), generator=generator)
    usable, one_is_good, late, style, full = draws.unbind(1)
    here = usable.unsqueeze(1) == torch.arange(SPEC.slots.max_slots)  # [env, slot]

    gain = torch.full_like(instances.gain, SAFE)
    gain[:, :, 1] = torch.where(one_is_good == 1, GOOD, BAD).unsqueeze(1)
    gain[:, :, 2] = torch.where(one_is_good == 1, BAD, GOOD).unsqueeze(1)
    gain = torch.where(here.unsqueeze(2), gain, SAFE)

    fading = torch.tensor([LIFE[cooling(4)], LIFE[cooling(3)]])[late]
    kept = torch.tensor([LIFE[mature(Stage.FOSSILIZED, alpha)] for alpha in (0.5, 1.0)])
    return replace(
        instances,
        hidden=torch.ones(num, dtype=torch.bool),
        gain=gain,
        fits=torch.ones_like(instances.fits),
        parameters=instances.parameters[:, :, [0, 1, 1]],  # neither is the cheaper bet
        budget=torch.full_like(instances.budget, 2.0),
        life=torch.where(here, fading.unsqueeze(1), kept[full].unsqueeze(1)),
        blueprint=here.long(),
        style=style.unsqueeze(1).expand(num, SPEC.slots.max_slots),
    )


def exchanged(instances: Instances) -> Instances:
    """The same hidden instances with the good and the bad blueprint exchanged."""
    swapped = instances.gain[:, :, [0, 2, 1]]
    gain = torch.where(instances.hidden.view(-1, 1, 1), swapped, instances.gain)
    return replace(instances, gain=gain)
