"""Esper: a controller that watches a neural network train and grows it.

The public names are imported when first used, so `import esper` costs nothing.
"""

from importlib import import_module
from typing import Final

__version__ = "0.1.0"

_HOMES: Final = {
    "ActionSpec": "esper.contracts.actions",
    "EsperError": "esper.contracts.errors",
    "Geometry": "esper.growth.blueprints.geometry",
    "Grower": "esper.grower",
    "GrowingModel": "esper.growth.model",
    "PPO": "esper.rl.ppo",
    "PPOAgent": "esper.simic.agent.ppo",
    "PPOConfig": "esper.simic.agent.ppo",
    "SimulatedWorld": "esper.environment.simulated",
    "SlotConfig": "esper.contracts.slots",
    "TamiyoPolicy": "esper.tamiyo.policy.network",
    "TamiyoRolloutBuffer": "esper.simic.agent.rollout_buffer",
    "blueprint": "esper.growth.blueprints.registry",
    "check_blueprint": "esper.growth.blueprint_checks",
    "fit": "esper.experiment.fit",
    "load": "esper.growth.rebuilding",
    "load_controller": "esper.experiment.controllers",
    "rebuild": "esper.growth.rebuilding",
    "save": "esper.growth.rebuilding",
    "suggest_slots": "esper.growth.suggestions",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names for interactive completion."""
    return sorted(__all__)
