"""PPO on any Gymnasium environment, with memory, masks and several heads.

    agent = PPO("CartPole-v1", memory="mingru", num_envs=64, seed=0)
    agent.learn(300_000, progress=True)
    action, state = agent.predict(observation, state, episode_start=first)
    agent.save("agent.safetensors")
    agent = PPO.load("agent.safetensors", env="CartPole-v1")

Terminated, truncated and cut are three things: an episode that terminated has no
future, a truncated one has the value of its true final observation, and a rollout that
is merely over has the value of the observation that comes next.
"""

import csv
import json
import math
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    InvalidStateError,
    NotFiniteError,
    unknown,
)
from esper.contracts.messages import one_line, quoted
from esper.contracts.state import Stateful, Tensors, check_fit, leaves, load, save
from esper.files import (
    Disk,
    Manifest,
    manifest_of,
    pack,
    publish,
    read_safetensors,
    require_explained,
    storage,
)
from esper.rl.moments import ObservationMoments
from esper.rl.nested import batch_of_one, first_of
from esper.rl.policy import SpacePolicy, SpacePolicyConfig
from esper.rl.spaces import SpaceSpec, flags, parts_of
from esper.rl.vector import MaskSource, Source, Vector, Vectorization, View
from esper.runs.progress import Progress
from esper.runs.streams import stream, stream_seed
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.workers.deadline import TIMEOUT
from esper.workers.jobs import machine_memory

Array = NDArray[Any]
Callback = Callable[["LearnRecord"], object]
DEFAULTS: Final = PPOConfig(
    learning_rate=2e-3,
    epochs=4,
    minibatches=8,
    entropy_coef=0.01,
    target_kl=0.03,
)
"""One set for all tasks."""
WINDOW: Final = 100
"""Episodes whose mean return a record has."""
SCALARS: Final = ("kl", "policy_loss", "value_loss", "explained_variance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOSettings:
    """Everything that was chosen about an agent, apart from its spaces."""

    num_envs: int = 16
    """Environments that are stepped together."""
    rollout_steps: int = 128
    """Steps of each environment between two updates."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Trace decay of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    end_factor: float = 0.1
    """Share of learning rate and entropy weight that is left at the end of learn()."""
    normalize: bool = True
    """Whether numbers of observations are normalised by running statistics."""
    seed: int = 0
    """Of weights, choices, minibatches and environments."""
    policy: SpacePolicyConfig = field(default_factory=SpacePolicyConfig)
    ppo: PPOConfig = DEFAULTS

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("num_envs", "rollout_steps"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name} must be at least 1, got {getattr(self, name)}."
                )
        for name in ("gamma", "gae_lambda", "end_factor"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidInputError(
                    f"{name} must lie in [0, 1], got {getattr(self, name)}."
                )
        if not 0 <= self.seed < 2**32:
            raise InvalidInputError(
                f"seed must lie in 0..{2**32 - 1}, got {self.seed}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnRecord:
    """One rollout and its update."""

    steps: int
    """Steps of all environments since the agent was made."""
    episodes: int
    """Episodes that ended in this rollout."""
    mean_return: float
    """Mean return of the last 100 episodes; NaN before the first one ends."""
    mean_length: float
    """Mean length in steps of the same episodes."""
    seconds: float
    """Time since learn() began."""
    update: UpdateRecord
    """What the update did."""


@dataclass(frozen=True, slots=True)
class EpisodeReturns:
    """Some whole episodes of an agent."""

    returns: Array
    lengths: Array

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std())


class Episode(NamedTuple):
    """An episode that ended in a rollout."""

    env: int
    step: int
    """Of the rollout, from 0."""
    total: float
    """Sum of its rewards."""
    length: int


@dataclass(slots=True)
class Standing:
    """Where all environments stand between two rollouts."""

    view: View
    state: Tensor
    returns: Array
    lengths: Array


class PPO(Stateful):
    """An agent and the environments that it learns in.

    Args:
        env: The id of an environment, a function that makes one, or a VectorEnv.
        memory: Memory type: "mingru", "gru", "lstm" or "none".
        num_envs: How many environments to make.
        vectorization: Where environments run. "sync": in this process; "async": each in
            its own process; "native": the vector environment that the id registers.
        seed: Seed of weights, choices, minibatches and environments. None draws one,
            which `settings.seed` keeps.
        rollout_steps: Steps of each environment between two updates.
        gamma: Discount per step.
        gae_lambda: Trace decay of the advantages.
        end_factor: Share of learning rate and entropy left at the end of `learn`; 1
            keeps them constant, for many short calls.
        width: Hidden layer width.
        layers: Number of memory layers.
        separate_value: Give the value function its own encoder and memory.
        autoregressive: Draw each head given the choices of all heads before it.
        normalize: Normalise observations by running statistics. Images are divided by
            their largest bound, or by the largest number seen if that is below a
            quarter of it; without `normalize`, always by the bound.
        head_relevance: Whether a choice of the first head uses each head,
            bool [op, head].
        masks: Source of action masks: "observation", "info", "method", or None for no
            masks; "auto" detects it.
        ppo: Settings of the update; a mapping changes some of the defaults.
        env_timeout: Maximum seconds of one call of the environments.
    """

    _env_timeout = TIMEOUT
    STATE = ("agent", "observations", "generator", "steps_done", "rounds")
    DERIVED = ("_standing", "_largest", "_recent", "share")

    def __init__(
        self,
        env: Source,
        *,
        memory: MemoryName = "none",
        num_envs: int = 16,
        vectorization: Vectorization = "sync",
        seed: int | None = 0,
        rollout_steps: int = 128,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        end_factor: float = 0.1,
        width: int = 64,
        layers: int = 1,
        separate_value: bool = False,
        autoregressive: bool = False,
        normalize: bool = True,
        head_relevance: Any = None,  # noqa: ANN401
        masks: MaskSource | None = "auto",
        ppo: PPOConfig | Mapping[str, Any] = DEFAULTS,
        env_timeout: float = TIMEOUT,
    ) -> None:
        policy = {
            "width": width,
            "memory": memory,
            "layers": layers,
            "separate_value": separate_value,
            "autoregressive": autoregressive,
        }
        settings = _settings(
            {
                "num_envs": num_envs,
                "rollout_steps": rollout_steps,
                "gamma": gamma,
                "gae_lambda": gae_lambda,
                "end_factor": end_factor,
                "normalize": normalize,
                "seed": secrets.randbelow(2**32) if seed is None else seed,
                "policy": policy,
                "ppo": asdict(ppo) if isinstance(ppo, PPOConfig) else _full(ppo),
            }
        )
        envs = settings.num_envs
        world = Vector(
            env, envs, vectorization, _table(head_relevance), masks, env_timeout
        )
        self._env_timeout = env_timeout
        self._source: Source | None = env
        self._vectorization, self._masks = vectorization, masks
        try:
            self._build(world.spec, replace(settings, num_envs=world.num_envs), world)
        except BaseException:
            if not isinstance(env, VectorEnv):
                world.close()
            raise

    def _build(
        self, spec: SpaceSpec, settings: PPOSettings, world: Vector | None
    ) -> None:
        """Make what is learnt and what learns."""
        if world is not None:
            _require_memory(spec, settings)
            for name in world.spec.dropped:
                what = one_line(f"{name!r} of the observation is text and is left out")
                advice = "Turn it into numbers in a wrapper if the agent needs it"
                warnings.warn(f"{what}. {advice}.", EsperWarning, stacklevel=4)
        self.spec, self.settings, self.world = spec, settings, world
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(settings.seed, "weights"))
            self.policy = SpacePolicy(spec, settings.policy)
        # Without environments nothing is collected.
        envs, steps = (settings.num_envs, settings.rollout_steps) if world else (1, 1)
        buffer = TamiyoRolloutBuffer(
            envs,
            steps,
            spec,
            state_shape=self.policy.state_shape,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )
        order = stream_seed(settings.seed, "order")
        parts = min(settings.ppo.minibatches, envs)
        config = replace(settings.ppo, minibatches=parts)
        self.agent = PPOAgent(self.policy, buffer, config, rng_seed=order)
        self.observations = ObservationMoments(spec)
        self.generator = stream(settings.seed, "choices")
        self.steps_done = 0
        """Steps of all environments so far."""
        self.rounds = 0
        """Updates so far."""
        self.masked = False
        """Whether its environments have masks: no action is meant without one then."""
        self.share = 1.0
        """Share of learning rate and entropy weight that was used last."""
        self._recent: deque[Episode] = deque(maxlen=WINDOW)
        self._standing: Standing | None = None
        self._largest = np.zeros(len(spec.image_bounds))
        """The largest number seen in each image; the policy keeps what follows."""

    def learn(
        self,
        total_steps: float,
        *,
        reset_num_timesteps: bool = False,
        progress: bool = False,
        callback: Callback | None = None,
        log: str | Path | None = None,
    ) -> Self:
        """Learn for some more steps, counted over all environments.

        Learning rate and entropy weight fall linearly to `end_factor` of their
        settings. A further call starts from the share that the last one reached, so
        that they never rise; after a complete call they stay at `end_factor`.

        Args:
            total_steps: Number of steps; rounded up to whole rollouts.
            reset_num_timesteps: Start learning rate, entropy weight and `steps_done`
                again as in a new agent. Weights and statistics are kept.
            progress: Show a progress bar.
            callback: Called after every update; learning ends when it returns False.
            log: A folder for `progress.csv`, one row per update, and for the agent
                itself at the end.
        """
        if (
            not isinstance(total_steps, float | int | np.number)
            or not 1 <= total_steps < math.inf
        ):
            raise InvalidInputError(
                f"total_steps must be at least 1, got {quoted(total_steps)}."
            )
        world, settings, began = self._world(), self.settings, monotonic()
        each = settings.num_envs * settings.rollout_steps
        rounds = math.ceil(total_steps / each)
        if reset_num_timesteps:
            self.steps_done, self.share = 0, 1.0
            self._recent.clear()
        start, end = self.share, settings.end_factor
        rows = None if log is None else LogFile(Path(log))
        bar = Progress(unit="update") if progress else None
        try:
            for index in range(rounds):
                self.anneal(start + (end - start) * index / max(rounds - 1, 1))
                ended, update = self.play_round()
                self._recent.extend(ended)
                record = LearnRecord(
                    steps=self.steps_done,
                    episodes=len(ended),
                    mean_return=_mean([each.total for each in self._recent]),
                    mean_length=_mean([each.length for each in self._recent]),
                    seconds=monotonic() - began,
                    update=update,
                )
                if rows is not None:
                    rows.add(record)
                if bar is not None:
                    text = f"return {record.mean_return:.4g}"
                    bar.update(world.name, index + 1, rounds, text)
                goes_on = None if callback is None else callback(record)
                if isinstance(goes_on, bool | np.bool_) and not goes_on:
                    break
        finally:
            if bar is not None:
                bar.close()
        if log is not None:
            self.save(Path(log) / "agent.safetensors")
        return self

    def anneal(self, share: float) -> None:
        """Use this share of the learning rate and the entropy weights."""
        self.agent.anneal(share)
        self.share = share

    def play_round(self) -> tuple[list[Episode], UpdateRecord]:
        """Collect a rollout and learn from it."""
        ended = self._collect(self._world())
        update = self.agent.update()
        self._scale_images()
        self.rounds += 1
        return ended, update

    def forget_episodes(self) -> None:
        """Begin new episodes everywhere with the next rollout; seeds follow from it."""
        self._standing = None

    @torch.inference_mode()
    def _collect(self, world: Vector) -> list[Episode]:
        """Fill the buffer; returns every episode that ended."""
        policy, buffer, at = self.policy, self.agent.buffer, self._stand(world)
        view, state = at.view, at.state
        self.masked |= view.masks is not None
        ended: list[Episode] = []
        # An interrupted rollout leaves environments anywhere: then all begin anew.
        self._standing = None
        buffer.reset()
        buffer.begin(state, self.agent.version)
        if not self.rounds:
            self._measure(self.spec.images(view.observation, world.num_envs))
            self._scale_images()
        for time in range(buffer.max_steps):
            features = self.features(view, learn=True, check=True)
            first, acts = torch.from_numpy(view.episode_start), view.acts
            decision = policy.act(features, view.masks, first, state, self.generator)
            step = world.step(self.spec.to_env(decision.actions))
            final_values = None
            if (step.truncated & ~step.terminated & acts).any():
                final = self.features(replace(view, observation=step.final))
                going_on = torch.zeros_like(first)
                final_values = policy.value(final, going_on, decision.state)
            buffer.add(
                features=features,
                episode_start=first,
                masks=decision.masks,
                actions=decision.actions,
                log_probs=decision.log_probs,
                distribution=decision.distribution,
                values=decision.values,
                rewards=torch.from_numpy(step.rewards),
                terminated=torch.from_numpy(step.terminated),
                truncated=torch.from_numpy(step.truncated),
                final_values=final_values,
                acted=None if acts.all() else torch.from_numpy(acts),
            )
            at.returns += np.where(acts, step.rewards, 0.0)
            at.lengths += acts
            over = np.flatnonzero((step.terminated | step.truncated) & acts)
            for env in over:
                figures = float(at.returns[env]), int(at.lengths[env])
                ended.append(Episode(int(env), time, *figures))
            at.returns[over], at.lengths[over] = 0.0, 0
            self.steps_done += int(acts.sum())
            view, state = step.view, decision.state
        first = torch.from_numpy(view.episode_start)
        buffer.finish(policy.value(self.features(view), first, state))
        at.view, at.state = view, state
        self._standing = at
        self.observations.settle()
        return ended

    def features(
        self, view: View, *, learn: bool = False, check: bool = False
    ) -> dict[str, Tensor]:
        """What the policy reads of all environments.

        Args:
            view: What they show.
            learn: Whether the statistics count what is shown.
            check: Whether NaN and infinity are refused.
        """
        envs, spec = len(view.episode_start), self.spec
        features = spec.images(view.observation, envs)
        for image in features.values():
            if check and image.is_floating_point():
                _require_finite(image.flatten(1).numpy(), view)
        if learn:
            self._measure(features)
        if "vector" in spec.observation:
            rows = spec.vector(view.observation, envs)
            if check:
                _require_finite(rows, view)
            if self.settings.normalize:
                if learn:
                    self.observations.add(rows if view.acts.all() else rows[view.acts])
                rows = self.observations.normalize(rows)
            features = {"vector": torch.from_numpy(rows), **features}
        return features

    def _measure(self, images: Mapping[str, Tensor]) -> None:
        """Remember the largest number of each image."""
        if self.settings.normalize:
            for index, image in enumerate(images.values()):
                size = float(np.abs(image.numpy()).max())
                self._largest[index] = max(self._largest[index], size)

    def _scale_images(self) -> None:
        """Scale images by what was seen; after the first rollout, only down."""
        self.policy.scale_images(self._largest, only_down=self.rounds > 0)

    def _stand(self, world: Vector) -> Standing:
        """Where the environments stand; new episodes everywhere if nowhere yet."""
        if self._standing is None:
            seed = stream_seed(self.settings.seed, f"environments {self.rounds}")
            view = world.reset(seed % 2**31)
            self._require_masks(view)
            envs = world.num_envs
            state = self.policy.initial_state(envs)
            return Standing(view, state, np.zeros(envs), np.zeros(envs, np.int64))
        return self._standing

    def predict(
        self,
        observation: Any,  # noqa: ANN401
        state: Array | None = None,
        episode_start: Any = None,  # noqa: ANN401
        action_masks: Any = None,  # noqa: ANN401
        deterministic: bool = True,
    ) -> tuple[Any, Array | None]:
        """Actions for one observation or a batch of them, and the memory after it.

        Args:
            observation: Of one environment, or of several as one batch.
            state: What the call before returned; None is empty memory.
            episode_start: Whether each observation is the first of an episode; None
                is True without a state and False with one.
            action_masks: What is legal; by default what a Dict observation says. An
                agent that learnt with masks needs them.
            deterministic: Take the likeliest choice instead of drawing one.
        """
        spec = self.spec
        rows_seen = spec.rows_of(observation)
        if single := rows_seen is None:
            observation = batch_of_one(spec.observation_space, observation)
            if action_masks is not None:
                action_masks = spec.mask_row(action_masks)[None]
        envs = rows_seen or 1
        if action_masks is None and spec.has_mask:
            action_masks = observation["action_mask"]
        if action_masks is None and self.masked:
            raise InvalidInputError(
                "this agent learnt with masks; give predict(action_masks=...), ones "
                "where everything is legal."
            )
        rows = None if action_masks is None else spec.head_masks(action_masks, envs)
        first = np.full(envs, state is None)
        if episode_start is not None:
            starts = np.asarray(episode_start, bool)
            if starts.size not in (1, envs):
                raise InvalidInputError(
                    f"episode_start must be one bool or {envs}, got {starts.size}."
                )
            first = np.broadcast_to(starts.reshape(-1), (envs,)).copy()
        memory = self.policy.initial_state(envs)
        if state is not None:
            memory = torch.as_tensor(np.asarray(state), dtype=torch.float32)
            if memory.shape != (envs, *self.policy.state_shape):
                raise InvalidInputError(
                    f"state must be {[envs, *self.policy.state_shape]}, got "
                    f"{[*memory.shape]}; give what the call before returned, or None."
                )
            if not memory.isfinite().all():
                raise NotFiniteError(
                    "state holds NaN or infinity; give None to start again."
                )
        view = View(observation, rows, first, np.ones(envs, bool))
        with torch.inference_mode():
            decision = self.policy.act(
                self.features(view, check=True),
                rows,
                torch.from_numpy(first),
                memory,
                None if deterministic else self.generator,
            )
        actions = spec.to_env(decision.actions)
        after = None
        if self.settings.policy.memory != "none":
            after = decision.state.numpy()
        return (first_of(spec.action_space, actions) if single else actions), after

    def evaluate(
        self,
        episodes: int = 20,
        *,
        env: Source | None = None,
        deterministic: bool = True,
        seed: int = 1,
        max_steps: int = 100_000,
    ) -> EpisodeReturns:
        """Play whole episodes without learning.

        Args:
            episodes: How many.
            env: Where; by default in new environments like those it learns in. A
                VectorEnv is reset, and learning in it begins new episodes.
            deterministic: Take likeliest choices instead of drawing them.
            seed: Of the environments and of drawn choices.
            max_steps: Steps within which all episodes must end.
        """
        if not isinstance(episodes, int | np.integer) or episodes < 1:
            raise InvalidInputError(
                f"episodes must be a whole number from 1, got {quoted(episodes)}."
            )
        source = self._source if env is None else env
        if source is None:
            raise InvalidStateError("there is no environment; give evaluate(env=...).")
        count = min(episodes, self.settings.num_envs)
        kind = "sync" if self._vectorization == "async" else self._vectorization
        seconds = self._env_timeout
        world = Vector(
            source, count, kind, self.spec.head_relevance, self._masks, seconds
        )
        try:
            return self._evaluate(world, episodes, env, deterministic, seed, max_steps)
        finally:
            if not isinstance(source, VectorEnv):
                world.close()

    def _evaluate(
        self,
        world: Vector,
        episodes: int,
        env: Source | None,
        deterministic: bool,
        seed: int,
        max_steps: int,
    ) -> EpisodeReturns:
        self._require_spaces(world)
        if world.env is self._source:
            self._standing = None
        envs = world.num_envs
        # Each environment has its share, so that short episodes are not preferred.
        quota = np.array([(episodes + env) // envs for env in range(envs)])
        generator = None if deterministic else stream(seed, "evaluation")
        view, state = world.reset(seed), self.policy.initial_state(envs)
        self._require_masks(view)
        if env is None:
            self.masked |= view.masks is not None
        returns, lengths = np.zeros(envs), np.zeros(envs, np.int64)
        found: list[tuple[float, int]] = []
        for _ in range(max_steps):
            with torch.inference_mode():
                decision = self.policy.act(
                    self.features(view, check=True),
                    view.masks,
                    torch.from_numpy(view.episode_start),
                    state,
                    generator,
                )
            step = world.step(self.spec.to_env(decision.actions))
            returns += np.where(view.acts, step.rewards, 0.0)
            lengths += view.acts
            over = np.flatnonzero((step.terminated | step.truncated) & view.acts)
            for env_index in over:
                if quota[env_index]:
                    quota[env_index] -= 1
                    found.append((float(returns[env_index]), int(lengths[env_index])))
            returns[over], lengths[over] = 0.0, 0
            if not quota.any():
                break
            view, state = step.view, decision.state
        else:
            raise InvalidInputError(
                f"some episode did not end within {max_steps} steps; set a time limit: "
                "gymnasium.make(..., max_episode_steps=1000)."
            )
        totals, counts = zip(*found, strict=True)
        return EpisodeReturns(np.array(totals), np.array(counts))

    def save(self, path: str | Path) -> None:
        """Write the agent and everything that it learnt to one file."""
        settings = asdict(self.settings)
        # JSON has no infinity, which switches target_kl off.
        settings["ppo"] = {
            name: "inf" if value == math.inf else value
            for name, value in settings["ppo"].items()
        }
        facts = {"settings": settings, "masked": self.masked, "share": self.share}
        facts |= self.spec.describe()
        manifest = manifest_of(facts, self.steps_done)
        file = Path(path)
        with storage(file, "write"):
            file.parent.mkdir(parents=True, exist_ok=True)
        publish(Disk(), file, pack(save(self), manifest))

    def export(self, path: str | Path) -> None:
        """Write one greedy step as an ONNX file, as `esper.rl.export` describes it."""
        from esper.rl.export import export_onnx

        export_onnx(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: Source | None = None,
        *,
        vectorization: Vectorization = "sync",
        masks: MaskSource | None = "auto",
    ) -> Self:
        """The agent that `save` wrote; it can learn on if it gets an environment.

        Args:
            path: The file.
            env: Where to learn on and evaluate; not needed to predict.
            vectorization: As in `PPO`.
            masks: As in `PPO`.
        """
        tensors, manifest = read_safetensors(Path(path), _fit_agent)
        assert manifest is not None  # sealed files have one
        spec, settings = _described(manifest)
        agent = cls.__new__(cls)
        agent._source, agent._vectorization, agent._masks = env, vectorization, masks
        world = None
        if env is not None:
            world = Vector(
                env, settings.num_envs, vectorization, spec.head_relevance, masks
            )
            settings = replace(settings, num_envs=world.num_envs)
        agent._build(spec, settings, world)
        if world is not None:
            agent._require_spaces(world)
        load(agent, tensors)
        # Files of older versions do not say these.
        agent.masked = manifest.facts.get("masked", False) is True
        share = manifest.facts.get("share", 1.0)
        agent.share = share if isinstance(share, float) and 0 <= share <= 1 else 1.0
        return agent

    def close(self) -> None:
        """End the environments' processes, if they have any."""
        if self.world is not None:
            self.world.close()

    def _world(self) -> Vector:
        if self.world is None:
            raise InvalidStateError(
                "there is no environment to learn in; PPO.load(env=...)."
            )
        return self.world

    def _require_masks(self, view: View) -> None:
        """Refuse environments without masks if the agent learnt with them."""
        if self.masked and view.masks is None and self._masks is not None:
            raise InvalidInputError(
                f"this agent learnt with masks, and there are none{view.where}; give "
                "them, or PPO.load(masks=None) to do without."
            )

    def _require_spaces(self, world: Vector) -> None:
        for name in ("observation_space", "action_space"):
            mine, other = getattr(self.spec, name), getattr(world.spec, name)
            # Spaces of other orders are equal to Gymnasium, but heads have an order.
            orders = [
                [part.path for part in parts_of(space)] for space in (mine, other)
            ]
            if mine != other or orders[0] != orders[1]:
                raise InvalidInputError(
                    f"the agent's {name} is {mine}, that of {world.name} is {other}."
                )


class LogFile:
    """`progress.csv`: one row per update."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.csv"
        with storage(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, record: LearnRecord) -> None:
        """Append a row."""
        plain = ("steps", "episodes", "mean_return", "mean_length", "seconds")
        row = {name: getattr(record, name) for name in plain}
        row |= {name: getattr(record.update, name) for name in SCALARS}
        for name, head in record.update.heads.items():
            row[f"entropy/{name}"] = head.entropy
        with (
            storage(self._path, "write"),
            self._path.open("a+", newline="", encoding="utf-8") as stream,
        ):
            stream.seek(0)
            there = next(csv.reader(stream), None)
            if there not in (None, [*row]):
                raise InvalidInputError(
                    f"{self._path} has the columns of another agent; give another log."
                )
            writer = csv.DictWriter(stream, [*row])
            if there is None:
                writer.writeheader()
            writer.writerow(row)


def _settings(values: Mapping[str, Any]) -> PPOSettings:
    """Settings of the types that files have; refuses others in one line."""
    try:
        return _SETTINGS.validate_python(_plain(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, InvalidInputError):
            raise own from None
        name = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Input should be ")
        more = " Schedules are not supported." if callable(first["input"]) else ""
        text = f"{name} must be {why}, got {quoted(first['input'])}.{more}"
        raise InvalidInputError(text) from None


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A value without NumPy's numbers, which files do not hold."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _full(given: Mapping[str, Any]) -> dict[str, Any]:
    """Some settings of the update, laid over the usual ones."""
    if not isinstance(given, Mapping):
        raise InvalidInputError(
            f"ppo must be a PPOConfig or a mapping, got {quoted(given)}."
        )
    usual = asdict(DEFAULTS)
    for name in given:
        if name not in usual:
            raise unknown("ppo has no setting", name, usual)
    return usual | {**given}


def _table(head_relevance: Any) -> tuple[tuple[bool, ...], ...] | None:  # noqa: ANN401
    """A table as nested tuples."""
    if head_relevance is None:
        return None
    table = flags(np.atleast_1d(head_relevance), what="head_relevance")
    if table.ndim != 2:
        raise InvalidInputError(
            f"head_relevance must be [op, head], got {list(table.shape)}."
        )
    return tuple(map(tuple, table.tolist()))


def _require_memory(spec: SpaceSpec, settings: PPOSettings) -> None:
    """Refuse a rollout or a first layer that no memory holds, before it is taken."""
    leaves = spec.observation.values()
    seen = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    choices = len(spec.sizes) * spec.width
    rollout = settings.num_envs * settings.rollout_steps * (seen + choices)
    columns = sum(leaf.shape[0] for leaf in leaves if len(leaf.shape) == 1)
    # Weights, gradients and two moments, in float32.
    layers = 16 * settings.policy.width * (columns + choices)
    needed, there = rollout + layers, machine_memory()
    if needed > there:
        raise InvalidInputError(
            f"learning here needs {needed / 1e9:,.0f} GB, this machine has "
            f"{there / 1e9:,.0f}; lower num_envs or rollout_steps, or smaller spaces."
        )


def _require_finite(rows: Array, view: View) -> None:
    broken = ~np.isfinite(rows).all(axis=1) & view.acts
    if broken.any():
        raise NotFiniteError(
            f"the observation of environment {int(broken.argmax())}{view.where} holds "
            "NaN or infinity; clip it there."
        )


def _mean(figures: Sequence[float]) -> float:
    return float(np.mean(figures)) if figures else math.nan


def _fit_agent(tensors: Tensors, manifest: Manifest | None) -> None:
    """Refuse a file whose tensors are not those of the policy that it describes."""
    assert manifest is not None
    spec, settings = _described(manifest)
    columns = spec.observation["vector"].shape[0] if "vector" in spec.observation else 0
    sizes = {"width": settings.policy.width, "the observation": columns}
    require_explained({**sizes, "the action": len(spec.sizes)}, tensors.values())
    _ = spec.allowed  # holds numbers, so it must not be made without memory
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        policy = SpacePolicy(spec, settings.policy)
    start = "agent/policy"
    own = {name: part for name, part in tensors.items() if name.startswith(start)}
    check_fit(leaves(policy, start), own)


def _described(manifest: Manifest) -> tuple[SpaceSpec, PPOSettings]:
    """Spaces and settings of a saved agent; refuses what `PPO.save` did not write."""
    try:
        data = manifest.facts["settings"]
        ppo = {
            name: math.inf if value == "inf" else value
            for name, value in data["ppo"].items()
        }
        text = json.dumps({**data, "ppo": ppo})
        settings = _SETTINGS.validate_json(text, strict=True, extra="forbid")
        with np.errstate(over="raise", invalid="raise"):  # bounds of another dtype
            return SpaceSpec.from_data(manifest.facts), settings
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except InvalidInputError as error:
        why = str(error).rstrip(".")
    # Gymnasium asserts; numbers of a thousand digits overflow.
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        why = type(e).__name__
    except AssertionError:
        why = "its spaces are none of Gymnasium's"
    raise InvalidInputError(one_line(f"this is not an agent that PPO saved: {why}."))


_SETTINGS: Final = TypeAdapter(PPOSettings)
