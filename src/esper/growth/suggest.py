"""Where a host could grow: places found by watching it answer one example.

Pairs of layers with only channel-wise work between them come first, for new hidden
units are what pays most; a host without such pairs is offered the places beside its
layers. Places are listed from input to output.
"""

from typing import Final

import torch
from torch import nn

from esper.contracts.errors import BadInput
from esper.growth.calls import Example, shielded
from esper.growth.places import is_layer, survey, watch_once
from esper.growth.sites import Site, find_sites

REACH: Final = 3
"""How many layers further on the partner of a layer is looked for."""


def suggest_slots(model: nn.Module, example: Example) -> tuple[str, ...]:
    """Names of slots that can be grown, for `Grower(slots=...)`.

    Args:
        model: The host.
        example: What it is called with: a tensor, a tuple or a dictionary.
    """
    layers = [name for name, module in model.named_modules() if is_layer(module)]
    layers = [name for name in layers if name and _sound(model, name)]
    if not layers:
        raise BadInput(
            "the host has no linear or convolution layer that seeds could join; name "
            "slots by hand."
        )
    with shielded(model, training=False), torch.no_grad():
        order = watch_once(model, [Site(n, n, residual=False) for n in layers], example)
    called = sorted((n for n in layers if order[n] > 0), key=order.__getitem__)
    spans = [
        Site(first, second, residual=False)
        for index, first in enumerate(called)
        for second in called[index + 1 : index + 1 + REACH]
    ]
    found = [site.name for site in spans if _grows(model, site, example, span=True)]
    if found:
        return tuple(found)
    beside = [Site(name, name, residual=False) for name in called]
    found = [site.name for site in beside if _grows(model, site, example, span=False)]
    if not found:
        raise BadInput("no place of the host can be grown; name slots by hand.")
    return tuple(found)


def _sound(model: nn.Module, name: str) -> bool:
    try:
        find_sites(model, [name])
    except BadInput:
        return False
    return True


def _grows(model: nn.Module, site: Site, example: Example, *, span: bool) -> bool:
    try:
        place = survey(model, [site], example).places[0]
    except BadInput:
        return False
    return place.geometry.spans if span else place.geometry.beside
