"""Esper: a controller that grows a neural network while it trains.

Public names are imported on first use, which keeps `import esper` fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from esper import datasets as datasets
    from esper.contracts.actions import ActionSpec as ActionSpec
    from esper.contracts.errors import EsperError as EsperError
    from esper.contracts.slots import SlotConfig as SlotConfig
    from esper.contracts.world import Controller as Controller
    from esper.contracts.world import VectorWorld as VectorWorld
    from esper.fitting import fit as fit
    from esper.grower import Grower as Grower
    from esper.growth.analysis.slots import suggest_slots as suggest_slots
    from esper.growth.blueprints.checks import check_blueprint as check_blueprint
    from esper.growth.blueprints.geometry import Geometry as Geometry
    from esper.growth.blueprints.registry import blueprint as blueprint
    from esper.growth.enlarge import enlarge as enlarge
    from esper.growth.model import GrowingModel as GrowingModel
    from esper.growth.saving.serialization import load as load
    from esper.growth.saving.serialization import rebuild as rebuild
    from esper.growth.saving.serialization import save as save
    from esper.rl.ppo import PPO as PPO
    from esper.runs.controllers import load_controller as load_controller
    from esper.simic.agent.losses import PPOConfig as PPOConfig
    from esper.simic.agent.ppo import PPOAgent as PPOAgent
    from esper.simic.agent.rollout_buffer import (
        TamiyoRolloutBuffer as TamiyoRolloutBuffer,
    )
    from esper.simic.rollout import collect as collect
    from esper.simic.rollout import start as start
    from esper.tamiyo.policy.network import TamiyoPolicy as TamiyoPolicy
    from esper.tamiyo.rollout import play as play
    from esper.testing.simulated import SimulatedWorld as SimulatedWorld

__version__ = "0.2.0"

_HOMES: Final = {
    "ActionSpec": "esper.contracts.actions",
    "Controller": "esper.contracts.world",
    "EsperError": "esper.contracts.errors",
    "Geometry": "esper.growth.blueprints.geometry",
    "Grower": "esper.grower",
    "GrowingModel": "esper.growth.model",
    "PPO": "esper.rl.ppo",
    "PPOAgent": "esper.simic.agent.ppo",
    "PPOConfig": "esper.simic.agent.losses",
    "SimulatedWorld": "esper.testing.simulated",
    "SlotConfig": "esper.contracts.slots",
    "TamiyoPolicy": "esper.tamiyo.policy.network",
    "TamiyoRolloutBuffer": "esper.simic.agent.rollout_buffer",
    "VectorWorld": "esper.contracts.world",
    "blueprint": "esper.growth.blueprints.registry",
    "check_blueprint": "esper.growth.blueprints.checks",
    "collect": "esper.simic.rollout",
    "datasets": "esper.datasets",
    "enlarge": "esper.growth.enlarge",
    "fit": "esper.fitting",
    "load": "esper.growth.saving.serialization",
    "load_controller": "esper.runs.controllers",
    "play": "esper.tamiyo.rollout",
    "rebuild": "esper.growth.saving.serialization",
    "save": "esper.growth.saving.serialization",
    "start": "esper.simic.rollout",
    "suggest_slots": "esper.growth.analysis.slots",
}

if not TYPE_CHECKING:  # type checkers read the imports above
    __all__ = [*_HOMES, "__version__"]

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name in _HOMES:
            module = import_module(_HOMES[name])
            return (
                module if module.__name__ == f"esper.{name}" else getattr(module, name)
            )
        raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names for interactive completion."""
    return sorted([*_HOMES, "__version__"])
