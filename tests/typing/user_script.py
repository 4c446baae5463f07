"""A user's program with every public name: `make check` checks types, a test runs it.

A `type: ignore` here is a check as well: mypy reports one that is not needed.
"""

import sys
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Generator, Tensor, nn

import esper
from esper import (
    PPO,
    ActionSpec,
    Controller,
    EsperError,
    Geometry,
    Grower,
    GrowingModel,
    PPOAgent,
    PPOConfig,
    SimulatedWorld,
    SlotConfig,
    TamiyoPolicy,
    TamiyoRolloutBuffer,
    VectorWorld,
    blueprint,
    check_blueprint,
    collect,
    datasets,
    enlarge,
    fit,
    load,
    load_controller,
    play,
    rebuild,
    save,
    start,
    suggest_slots,
)
from esper.contracts.actions import NUM_HEADS, ActionMasks
from esper.contracts.world import ControllerState, Observation

assert_type(esper.__version__, str)


def reinforcement_learning(folder: Path) -> None:
    """An agent in a Gymnasium environment."""
    agent = PPO(
        "CartPole-v1",
        memory="mingru",
        num_envs=2,
        vectorization="sync",
        masks=None,
        rollout_steps=8,
        epochs=1,
        learning_rate=1e-3,
        head_entropy={"action": 0.02},
    )
    assert_type(agent, PPO)
    assert_type(agent.learn(16, callback=lambda record: record.env_steps < 16), PPO)
    action, state = agent.predict([0.0] * 4)
    action, state = agent.predict([0.0] * 4, state, episode_start=False)
    assert int(action) in (0, 1)
    assert state is not None
    assert_type(agent.evaluate(episodes=2, seed=1).mean, float)
    agent.save(folder / "agent.safetensors")
    agent.close()
    again = PPO.load(
        folder / "agent.safetensors",
        env="CartPole-v1",
        vectorization="sync",
        num_envs=1,
        learning_rate=1e-4,
        schedule=lambda progress: 1.0 - progress,
    )
    assert_type(again, PPO)
    again.close()


def learner_of_ones_own() -> None:
    """A policy and its learner, without Gymnasium."""
    world = SimulatedWorld(4)
    assert_type(world.spec, ActionSpec)
    policy = TamiyoPolicy(world.spec)
    buffer = TamiyoRolloutBuffer(4, 8, world.spec, state_shape=policy.state_shape)
    agent = PPOAgent(policy, buffer, PPOConfig(epochs=1), rng_seed=0)
    generator = Generator().manual_seed(0)
    live = start(world, policy)
    live, stats = collect(
        policy, world, live, buffer, generator, policy_version=agent.version
    )
    assert_type(stats.mean_return(), float)
    assert_type(agent.update().kl, float)
    spec = ActionSpec(slots=SlotConfig(max_slots=2), narrowed={"style": ("ADD",)})
    assert_type(spec.sizes, tuple[int, ...])


class Waits:
    """A controller of one's own."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Tensor, ControllerState]:
        """WAIT everywhere."""
        return torch.zeros(len(masks.op), NUM_HEADS, dtype=torch.int64), None


def controller_of_ones_own() -> None:
    """It plays in any world."""
    world: VectorWorld = SimulatedWorld(4)
    controller: Controller = Waits()
    assert_type(play(world, controller, Generator()), Tensor)


def network() -> nn.Sequential:
    """A small host."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@blueprint("users_linear", fits=lambda place: "" if place.keeps_shape else "no")
def users_linear(place: Geometry) -> nn.Module:
    """A blueprint of one's own."""
    return nn.Linear(place.inlet_width, place.outlet_width)


def growing(folder: Path) -> None:
    """A network that grows in a loop of one's own."""
    train, _, _ = datasets.load("vowel", rng_seed=1)
    assert_type(train, datasets.Data)
    x, y = train.features[:16, :4], train.labels[:16] % 2
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slots = suggest_slots(model, x)
    grower = Grower(
        model,
        optimizer,
        slots,
        example=x,
        controller="early",
        decisions=2,
        stop="end",
        mode="max",
    )
    for _ in range(2):
        loss = grower.loss(lambda: nn.functional.cross_entropy(model(x), y))
        assert_type(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decision = grower.step(metric=lambda: 0.5)
        assert_type(decision.parameters, int)
        assert_type(decision.why_not, str)
    assert_type(grower.summary(), str)
    assert_type(grower.export(merge=True), nn.Module)
    assert_type(grower.state_dict(), dict[str, Any])
    save(model, folder / "grown.safetensors")
    assert_type(load(folder / "grown.safetensors", network()), nn.Module)
    assert_type(rebuild(network(), model.state_dict()), nn.Module)
    grower.detach()
    by_hand = GrowingModel(network(), ["0->2"], x)
    by_hand.plant(by_hand.slots[0], "widen_8", tempo="FAST")
    assert_type(enlarge(network(), width=2.0, example=x), nn.Sequential)
    check_blueprint("users_linear", nn.Sequential(nn.Linear(4, 4)), ["0->0"], x[:4])


def one_call() -> None:
    """Training and growing in one call."""
    batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
    fitted = fit(
        network(),
        batches,
        batches,
        loss=nn.functional.cross_entropy,
        epochs=1,
        controller="never",
        progress=False,
    )
    assert_type(fitted.model, nn.Module)
    assert_type(fitted.summary, str)


def controller_of_a_run(run: Path, model: nn.Module, x: Tensor) -> Grower:
    """What `esper train` has learned, in a Grower."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = load_controller(run)
    return Grower(model, optimizer, "auto", example=x, controller=controller)


def main(folder: Path) -> None:
    """Use them all."""
    torch.manual_seed(0)
    reinforcement_learning(folder)
    learner_of_ones_own()
    controller_of_ones_own()
    growing(folder)
    one_call()
    try:
        controller_of_a_run(folder, network(), torch.randn(4, 4))
    except EsperError as error:
        assert_type(error, EsperError)


def refused_by_type_checkers() -> None:
    """Names and values that Esper does not have."""
    esper.Tamyio  # type: ignore[attr-defined]  # noqa: B018
    PPO("CartPole-v1", memory="mingur")  # type: ignore[arg-type]
    PPO("CartPole-v1", vectorization="asink")  # type: ignore[arg-type]
    PPO("CartPole-v1", clip_mode="both")  # type: ignore[arg-type]
    PPO("CartPole-v1", schedule="linaer")  # type: ignore[arg-type]
    PPO.load("agent", width=8)  # type: ignore[call-arg]
    PPO("CartPole-v1", learning_rate="1e-3")  # type: ignore[arg-type]
    PPO("CartPole-v1", masks="inof")  # type: ignore[arg-type]
    PPOConfig(clip_mode="both")  # type: ignore[arg-type]
    model, x = network(), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Grower(model, optimizer, "auto", example=x, stop="ned")  # type: ignore[arg-type]
    Grower(model, optimizer, "auto", example=x, mode="mni")  # type: ignore[arg-type]
    Grower(model, optimizer, "auto", example=x, controller=3)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
