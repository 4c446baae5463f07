"""PPO on any Gymnasium environment, with memory, masks and several heads.

    agent = PPO("CartPole-v1", memory="mingru", num_envs=64, seed=0)
    agent.learn(300_000, progress=True)
    action, state = agent.predict(observation, state, episode_start=first)
    agent.save("agent.safetensors")
    agent = PPO.load("agent.safetensors", env="CartPole-v1")

Terminated, truncated and unfinished are three things: an episode that terminated has no
future, a truncated one has the value of its true final observation, and one that the
rollout left unfinished has the value of the observation that comes next.
"""

import json
import math
import secrets
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, Unpack

import gymnasium
import numpy as np
import torch
from gymnasium import Env
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Generator, Tensor

from esper.contracts.devices import to_device, usable_device
from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    InvalidStateError,
    NotFiniteError,
    NumericsError,
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
from esper.rl.curve import LearningCurve
from esper.rl.encoders import Encoder
from esper.rl.nested import batch_of_one, first_of
from esper.rl.observations import ObservationReader
from esper.rl.policy import SpacePolicy
from esper.rl.settings import (
    LOST,
    SCHEDULES,
    SETTINGS_BEFORE,
    Changes,
    PPOSettings,
    Schedule,
    changed,
    names_checked,
    numbers,
    plain,
)
from esper.rl.spaces import SpaceSpec, flags, parts_of
from esper.rl.vector import MaskSource, Source, Vector, Vectorization, View
from esper.runs.progress import Progress
from esper.runs.records import RoundRecord
from esper.runs.settings import as_flat, known_settings
from esper.runs.sinks import Loggers
from esper.runs.streams import stream, stream_seed
from esper.simic.agent.losses import ClipMode
from esper.simic.agent.memory import MemoryName
from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rollout import RolloutState, collect, play, start
from esper.training.loop import (
    BROKEN,
    EVALUATION,
    WINDOW,
    Callback,
    Callbacks,
    TrainingLoop,
    WorldRollout,
    callbacks_of,
)
from esper.workers.deadline import TIMEOUT
from esper.workers.jobs import machine_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[Any]


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


class PPO(Stateful):
    """An agent and the environments that it learns in.

    Args:
        env: The id of an environment, a function that makes one, an Env or a VectorEnv.
        memory: Memory type: "conv-mingru", "mingru", "attention", "gru", "lstm" or
            "none".
        num_envs: How many environments to make. None: those that `env` has, else 32
            without memory and 16 with memory.
        vectorization: Where environments run. "sync": in this process; "async": in
            other processes; "native": the vector environment that the id registers.
        num_workers: Processes of "async"; None: one per core. At most `num_envs`.
        seed: Seed of weights, actions, minibatches and environments. None draws one,
            which `settings.seed` keeps.
        rollout_steps: Steps of each environment between two updates. None: 2048 in all
            environments together.
        gamma: Discount per step.
        gae_lambda: Trace decay of the advantages.
        learning_rate: Adam learning rate.
        epochs: Passes over each rollout.
        minibatches: Minibatches per pass. Each has steps drawn from the whole rollout;
            with memory, whole sequences of some environments, so at most `num_envs`.
            None: 8 without memory, 4 with memory.
        clip_range: Clip range of the probability ratio.
        clip_mode: Ratio to clip: "joint" (of all heads), "per_head", or "mixed" (mean
            of both losses).
        target_kl: Stop an update when KL(old || new) exceeds this; inf: never.
        entropy_coef: Entropy coefficient. Entropies of choices are divided by their
            maximum, those of numbers are in bits. None: 0.01 for choices, 0 for
            numbers.
        head_entropy: Entropy coefficients of single heads, instead of `entropy_coef`.
        exploration_coef: Coefficient of -KL(uniform || policy) of choices, which keeps
            all legal choices possible. It falls with the square of `schedule`. None: 0
            without memory, 0.006 with memory.
        value_coef: Value loss coefficient.
        value_clip: Clip range of the value, in standard deviations of returns.
        value_norm_decay: Decay per update of mean and variance of returns.
        max_grad_norm: Maximum norm of the gradient.
        schedule: How learning rate and bonuses move during `learn`:
            "linear", "cosine" or "constant", or a function that returns their factor
            at a progress from 0 to 1.
        clip_schedule: The same for the clip range.
        end_factor: Fraction to which linear and cosine schedules fall.
        width: Hidden layer width.
        layers: Number of memory layers.
        separate_value: Give the value function its own encoder and memory.
        encoder: A module, or a function of a space that makes one, from one observation
            to a vector; see docs/ppo.md. None: layers that fit the observation space.
        autoregressive: Draw each head given the choices of all heads before it.
        normalize: Normalise observations by running statistics. Images are divided by
            their largest bound, or by the largest number seen if that is below a
            quarter of it; without `normalize`, always by the bound.
        head_relevance: Whether a choice of the first head uses each head,
            bool [op, head].
        masks: Source of action masks: "observation", "info", "method", or None for no
            masks; "auto" detects it.
        env_timeout: Maximum seconds of one call of the environments.
        device: Device of the policy, the rollouts and the update. Environments run on
            the CPU.
    """

    STATE = ("agent", "observations", "generator", "env_steps", "rounds", "curve")
    DERIVED = ("_rollout", "_recent", "_ended")
    relative = False

    @names_checked
    def __init__(
        self,
        env: Source,
        *,
        memory: MemoryName = "none",
        num_envs: int | None = None,
        vectorization: Vectorization = "sync",
        num_workers: int | None = None,
        seed: int | None = 0,
        rollout_steps: int | None = None,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        learning_rate: float = 5e-3,
        epochs: int = 4,
        minibatches: int | None = None,
        clip_range: float = 0.2,
        clip_mode: ClipMode = "joint",
        target_kl: float = 0.03,
        entropy_coef: float | None = None,
        head_entropy: Mapping[str, float] = MappingProxyType({}),
        exploration_coef: float | None = None,
        value_coef: float = 0.5,
        value_clip: float | None = None,
        value_norm_decay: float = 0.95,
        max_grad_norm: float = 0.5,
        schedule: Schedule = "linear",
        clip_schedule: Schedule = "constant",
        end_factor: float = 0.1,
        width: int = 64,
        layers: int = 1,
        separate_value: bool = False,
        encoder: Encoder | None = None,
        autoregressive: bool = False,
        normalize: bool = True,
        head_relevance: Any = None,
        masks: MaskSource | None = "auto",
        env_timeout: float = TIMEOUT,
        device: torch.device | str = "cpu",
    ) -> None:
        given = locals()
        values = {name: given[name] for name in PPOSettings.__dataclass_fields__}
        if seed is None:
            values["seed"] = secrets.randbelow(2**32)
        if num_envs is None:
            values["num_envs"] = _envs_of(env)
        for name, setting in known_settings(PPOSettings).items():
            if setting.is_derived and values[name] is None:
                del values[name]
        settings = PPOSettings(**plain(numbers(values)))
        settings.require_schedules()
        where = usable_device(device)
        self._source: Source | None = env
        self._masks = masks
        vector = self._vector(env, settings, _table(head_relevance), num_envs)
        try:
            settings = replace(settings, num_envs=vector.num_envs)
            self._build(vector.spec, settings, vector, where, encoder)
        except BaseException:
            vector.release()
            raise

    def _vector(
        self,
        source: Source,
        settings: PPOSettings,
        head_relevance: tuple[tuple[bool, ...], ...] | None,
        num_envs: int | None = None,
    ) -> Vector:
        """The environments of a source; `num_envs` is what the caller asked for."""
        there = _envs_of(source)
        if there is not None and num_envs not in (None, there):
            raise InvalidInputError(
                f"num_envs must be {there}, the number of environments in env, got "
                f"{num_envs}. For more, pass an id or a function."
            )
        return Vector(
            source,
            settings.num_envs,
            settings.vectorization,
            head_relevance,
            self._masks,
            settings.env_timeout,
            settings.num_workers,
        )

    def _build(
        self,
        spec: SpaceSpec,
        settings: PPOSettings,
        vector: Vector | None,
        device: torch.device,
        encoder: Encoder | None,
    ) -> None:
        """Make what is learnt and what learns."""
        if vector is not None:
            _require_memory(spec, settings)
            if vector.resets_later and settings.rollout_steps == 1:
                raise InvalidInputError(
                    "rollout_steps must be at least 2: these environments spend a step "
                    "on each reset."
                )
            for name in vector.spec.dropped:
                what = one_line(f"{name!r} of the observation is text and is left out")
                advice = "Turn it into numbers in a wrapper if the agent needs it"
                warnings.warn(f"{what}. {advice}.", EsperWarning, stacklevel=4)
        self.spec, self.settings, self.device = spec, settings, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(settings.seed, "weights"))
            self.policy = SpacePolicy(spec, settings, encoder).to(device)
        # Without environments nothing is collected.
        envs, steps = (settings.num_envs, settings.rollout_steps) if vector else (1, 1)
        buffer = TamiyoRolloutBuffer(
            envs,
            steps,
            spec,
            state_shape=self.policy.state_shape,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            device=device,
        )
        order = stream_seed(settings.seed, "order")
        single_steps = settings.memory == "none"
        rows = envs * steps if single_steps else envs
        config = replace(settings, minibatches=min(settings.minibatches, rows))
        self.agent = PPOAgent(
            self.policy, buffer, config, rng_seed=order, single_steps=single_steps
        )
        self.observations = ObservationReader(spec, normalize=settings.normalize)
        self.world = vector
        if vector is not None:
            vector.reader, vector.learns = self.observations, True
        self.generator = stream(settings.seed, "choices")
        self.rollout_steps = settings.rollout_steps
        self.env_steps = 0
        """Steps of all environments so far."""
        self.rounds = 0
        """Updates so far."""
        self.masked = False
        """Whether its environments have masks: then no action is chosen without."""
        self.progress = 0.0
        """Progress of the schedules in the last round, from 0 to 1."""
        self.curve = LearningCurve(spec.head_names)
        """Return and update health so far."""
        self._ended = torch.zeros(0)
        """Returns of the episodes that ended in the last rollout."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._rollout: RolloutState | None = None

    def __reduce__(self) -> NoReturn:
        raise InvalidStateError(
            "an agent cannot be pickled or copied. Use save and PPO.load."
        )

    def __repr__(self) -> str:
        where = "no environment"
        if self.world is not None:
            where = f"{self.world.name} x {self.settings.num_envs}"
        leaves = self.spec.observation.items()
        seen = ", ".join(f"{name} {[*leaf.shape]}" for name, leaf in leaves)
        heads = one_line(", ".join(self.spec.head_names), 80)
        memory, width = self.settings.memory, self.settings.width
        rest = f"{memory=}, {width=}, env_steps={self.env_steps}"
        return f"{type(self).__name__}({where}, {seen} -> {heads}, {rest})"

    @names_checked
    def learn(
        self,
        total_steps: float,
        *,
        reset_num_timesteps: bool = False,
        progress: bool = False,
        callback: Callbacks = None,
        logger: Loggers = None,
    ) -> Self:
        """Learn for some more steps, counted over all environments.

        Schedules move from progress 0 in the first update to 1 in the last. A further
        call goes on from the progress that the last one reached; after a complete call
        it stays at 1.

        Args:
            total_steps: Number of steps; rounded up to whole rollouts.
            reset_num_timesteps: Start learning rate, bonuses, `env_steps` and the
                curve of `plot` again as in a new agent. Weights and statistics are
                kept.
            progress: Show a progress bar.
            callback: A function of the record of every update, which ends learning by
                returning False; a `Callback` as in `esper.rl.callbacks`; or a list.
            logger: Where metrics go: the folder of a run, which also gets the agent; a
                name such as "tensorboard" or "csv:FOLDER"; an object with
                `log(values, step)`; or a list of them.
        """
        from esper.rl.training import log_callbacks

        if (
            not isinstance(total_steps, float | int | np.number)
            or not 1 <= total_steps < math.inf
        ):
            raise InvalidInputError(
                f"total_steps must be at least 1, got {quoted(total_steps)}."
            )
        world, settings = self._world(), self.settings
        callbacks = callbacks_of(callback)
        if progress:
            callbacks.append(ProgressBar(world.name))
        callbacks += log_callbacks(self, logger)
        if reset_num_timesteps:
            self.env_steps, self.progress = 0, 0.0
            self._recent.clear()
            self.curve.clear()
        rounds = math.ceil(total_steps / (settings.num_envs * settings.rollout_steps))
        loop = TrainingLoop(
            self,
            rounds,
            factors=settings.factors,
            callbacks=callbacks,
            recent=self._recent,
            start=self.progress,
        )
        try:
            loop.call("on_train_start", loop, resumed=False)
            try:
                loop.run()
            finally:
                self.progress = loop.last_progress
            if loop.diverged:
                raise NumericsError(
                    f"{BROKEN}: gradients are NaN or infinite. Lower learning_rate, or "
                    "look for them in the encoder and the observations."
                )
            loop.call("on_train_end", loop)
        finally:
            loop.close()
        return self

    def collect(self) -> list[WorldRollout]:
        """Fill the agent's buffer with steps."""
        world = self._world()
        if self._rollout is None:
            seed = stream_seed(self.settings.seed, f"environments {self.rounds}")
            world.seed = seed % 2**31
            self._rollout = start(world, self.policy)
            masks = self._rollout.observation.masks
            self._require_masks(masks)
            self.masked |= masks is not None
            if not self.rounds:
                self._scale_images()
        # An interrupted rollout leaves environments anywhere: then all start again.
        state, self._rollout = self._rollout, None
        self.agent.buffer.reset()
        self._rollout, stats = collect(
            self.policy,
            world,
            state,
            self.agent.buffer,
            self.generator,
            policy_version=self.agent.version,
        )
        self.observations.moments.settle()
        self.env_steps += stats.env_steps
        self._ended = stats.returns
        return [WorldRollout({}, stats)]

    def update(self) -> UpdateRecord:
        """Learn from what was collected."""
        update = self.agent.update()
        self.rounds += 1
        self.curve.add(self.env_steps, self._ended, update)
        self._scale_images()
        return update

    def memories(self) -> dict[str, Tensor]:
        """The policy's memory in running episodes, by names for errors."""
        return {} if self._rollout is None else {"memory": self._rollout.state}

    def forget_episodes(self) -> None:
        """Start new episodes everywhere with the next rollout; seeds follow from it."""
        self._rollout = None

    def change_streams(self, rollbacks: int) -> None:
        """Use other random numbers after a rollback."""
        seed, again = self.settings.seed, f"again {rollbacks}"
        self.generator.manual_seed(stream_seed(seed, f"choices, {again}"))
        self.agent.generator.manual_seed(stream_seed(seed, f"order, {again}"))

    def _scale_images(self) -> None:
        """Scale images by what was seen; after the first update, only down."""
        self.policy.scale_images(self.observations.largest, only_down=self.rounds > 1)

    @torch.inference_mode()
    def _decide(
        self, generator: Generator | None, seen: View, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Actions on the CPU, and memory after them; greedily without a generator."""
        envs = len(seen.episode_start)
        memory = self.policy.initial_state(envs) if memory is None else memory
        inputs = (seen.features, seen.masks, seen.episode_start, memory)
        features, masks, starts, memory = to_device(inputs, self.device)
        decision = self.policy.act(features, masks, starts, memory, generator)
        return decision.actions.cpu(), decision.state

    def predict(
        self,
        observation: Any,
        state: Array | None = None,
        episode_start: Any = None,
        action_masks: Any = None,
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
        features = self.observations.read(observation, np.ones(envs, bool))
        seen = View(features, rows, torch.from_numpy(first))
        generator = None if deterministic else self.generator
        actions, memory = self._decide(generator, seen, memory)
        actions = spec.to_env(actions)
        after = None
        if self.settings.memory != "none":
            after = memory.cpu().numpy()
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
                VectorEnv is reset, and learning in it starts new episodes.
            deterministic: Take the likeliest choices instead of drawing them.
            seed: Seed of the environments and of drawn choices.
            max_steps: Steps within which all episodes must end.
        """
        if not isinstance(episodes, int | np.integer) or episodes < 1:
            raise InvalidInputError(
                f"episodes must be a whole number from 1, got {quoted(episodes)}."
            )
        source = self.evaluation_source() if env is None else env
        kind = self.settings.vectorization if isinstance(source, str) else "sync"
        settings = replace(
            self.settings,
            num_envs=min(episodes, self.settings.num_envs),
            vectorization="sync" if kind == "async" else kind,
        )
        vector = self._vector(source, settings, self.spec.head_relevance)
        vector.reader, vector.seed = self.observations, seed
        envs = vector.num_envs
        quota = torch.tensor([(episodes + index) // envs for index in range(envs)])
        generator = None if deterministic else stream(seed, "evaluation")

        def decide(seen: View, memory: Tensor | None) -> tuple[Tensor, Tensor]:
            if memory is None:
                self._require_masks(seen.masks)
                if env is None:
                    self.masked |= seen.masks is not None
            return self._decide(generator, seen, memory)

        try:
            self._require_spaces(vector)
            if source is self._source and vector.is_given:
                self._rollout = None
            found = play(vector, decide, quota, max_steps=max_steps)
        finally:
            vector.release()
        return EpisodeReturns(found.returns.numpy(), found.lengths.numpy())

    def evaluation_source(self) -> Source:
        """What makes environments like those it learns in."""
        source = self._source
        if source is None:
            raise InvalidStateError("there is no environment; give evaluate(env=...).")
        if not isinstance(source, Env):
            return source
        spec = source.spec
        wrappers = () if spec is None else spec.additional_wrappers
        if spec is None or any(wrapper.kwargs is None for wrapper in wrappers):
            raise InvalidInputError(
                "the environment of the agent cannot be copied; give evaluate(env=...)."
            )
        return partial(gymnasium.make, spec)

    def plot(self) -> "Figure":
        """A matplotlib figure: return and update health over steps.

        It has at most 256 points, also after `PPO.load`.
        """
        from esper.report.figures import ppo_figure

        return ppo_figure(*self.curve.columns(), self.settings.target_kl)

    def save(self, path: str | Path) -> None:
        """Write the agent and everything that it learnt to one file."""
        settings = as_flat(self.settings)
        for name in SCHEDULES:
            if callable(given := settings[name]):
                named = getattr(given, "__qualname__", type(given).__qualname__)
                settings[name] = f"{LOST}{named}"
        if self.settings.target_kl == math.inf:  # JSON has no infinity
            settings["target_kl"] = "inf"
        facts = {"settings": settings, "masked": self.masked, "progress": self.progress}
        facts |= self.spec.describe()
        for module in self.policy.trunks[0].get_submodule("encoder").children():
            facts["encoder"] = type(module).__qualname__
        manifest = manifest_of(facts, self.env_steps)
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
        masks: MaskSource | None = "auto",
        device: torch.device | str = "cpu",
        encoder: Encoder | None = None,
        **changes: Unpack[Changes],
    ) -> Self:
        """The agent that `save` wrote; it can learn on if it gets an environment.

        Args:
            path: The file.
            env: Where to learn on and evaluate; not needed to predict.
            masks: As in `PPO`.
            device: As in `PPO`.
            encoder: As in `PPO`, for an agent that has one: a file holds no code. Its
                weights are those of the file.
            changes: Settings of `PPO` that replace those of the file. A `seed` starts
                new random numbers. Without `vectorization`, it is "sync".
        """
        fit = partial(_fit_agent, encoder=encoder)
        tensors, manifest = read_safetensors(Path(path), fit)
        spec, settings = _described(manifest)
        given: dict[str, Any] = {"vectorization": "sync", **changes}
        if "seed" in given and given["seed"] is None:
            given["seed"] = secrets.randbelow(2**32)
        settings = changed(settings, given)
        agent, where = cls.__new__(cls), usable_device(device)
        agent._source, agent._masks = env, masks
        vector = None
        if env is not None:
            settings.require_schedules()
            table, count = spec.head_relevance, given.get("num_envs")
            vector = agent._vector(env, settings, table, count)
            settings = replace(settings, num_envs=vector.num_envs)
        try:
            agent._build(spec, settings, vector, where, encoder)
            if vector is not None:
                agent._require_spaces(vector)
            load(agent, tensors)
        except BaseException:
            if vector is not None:
                vector.release()
            raise
        if "seed" in given:
            agent.generator = stream(settings.seed, "choices")
            order = stream_seed(settings.seed, "order")
            agent.agent.generator.manual_seed(order)
        agent.masked = manifest.facts.get("masked") is True
        done = manifest.facts.get("progress")
        agent.progress = done if isinstance(done, float) and 0 <= done <= 1 else 0.0
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
        if getattr(self.world.env, "closed", False):
            raise InvalidStateError("the environments are closed. Make a new agent.")
        return self.world

    def _require_masks(self, masks: Tensor | None) -> None:
        """Refuse environments without masks if the agent learnt with them."""
        if self.masked and masks is None and self._masks is not None:
            raise InvalidInputError(
                "this agent learnt with masks, and these environments have none; give "
                "them, or PPO.load(masks=None) to do without."
            )

    def _require_spaces(self, vector: Vector) -> None:
        for name in ("observation_space", "action_space"):
            mine, other = getattr(self.spec, name), getattr(vector.spec, name)
            # Spaces of other orders are equal to Gymnasium, but heads have an order.
            orders = [
                [part.path for part in parts_of(space)] for space in (mine, other)
            ]
            if mine != other or orders[0] != orders[1]:
                raise InvalidInputError(
                    f"the agent's {name} is {mine}, that of {vector.name} is {other}."
                )


class ProgressBar(Callback):
    """A bar with the recent return and the last evaluation."""

    def __init__(self, name: str) -> None:
        self._name, self._bar, self._evaluation = name, Progress(unit="update"), ""

    def on_metrics(self, loop: TrainingLoop, metrics: Mapping[str, float]) -> None:
        """Keep the evaluation."""
        if EVALUATION in metrics:
            self._evaluation = f", evaluation {metrics[EVALUATION]:.4g}"

    def on_round_end(self, loop: TrainingLoop, record: RoundRecord) -> None:
        """Move the bar."""
        text = f"return {record.recent_return:.4g}{self._evaluation}"
        self._bar.update(self._name, record.round, record.rounds, text)

    def on_close(self) -> None:
        """Leave the terminal."""
        self._bar.close()


def _envs_of(source: Source) -> int | None:
    """How many environments a source has; None if it makes as many as needed."""
    if isinstance(source, VectorEnv):
        return source.num_envs
    return 1 if isinstance(source, Env) else None


def _table(head_relevance: Any) -> tuple[tuple[bool, ...], ...] | None:
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
    # The buffer, the batch of an update and its minibatches.
    rollout = 3 * settings.num_envs * settings.rollout_steps * (seen + choices)
    columns = sum(leaf.shape[0] for leaf in leaves if len(leaf.shape) == 1)
    # Weights, gradients and two moments, in float32.
    layers = 16 * settings.width * (columns + choices)
    needed, there = rollout + layers, machine_memory()
    if needed > there:
        raise InvalidInputError(
            f"learning here needs {needed / 1e9:,.0f} GB, this machine has "
            f"{there / 1e9:,.0f}; lower num_envs or rollout_steps, or smaller spaces."
        )


def _fit_agent(tensors: Tensors, manifest: Manifest, encoder: Encoder | None) -> None:
    """Refuse a file whose tensors are not those of the policy that it describes."""
    spec, settings = _described(manifest)
    name = manifest.facts.get("encoder")
    if (name is None) != (encoder is None):
        what = "has no encoder of its own. Omit encoder"
        if name is not None:
            what = f"has an encoder, {quoted(name)}, and a file holds no code. Give it "
            what += "again: PPO.load(encoder=...)"
        raise InvalidInputError(f"this agent {what}.")
    columns = spec.observation["vector"].shape[0] if "vector" in spec.observation else 0
    sizes = {"width": settings.width, "the observation": columns}
    require_explained({**sizes, "the action": len(spec.sizes)}, tensors.values())
    _ = spec.allowed  # holds numbers, so it must not be made without memory
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        policy = SpacePolicy(spec, settings, encoder)
    start = "agent/policy"
    own = {name: part for name, part in tensors.items() if name.startswith(start)}
    check_fit(leaves(policy, start), own)


def _described(manifest: Manifest) -> tuple[SpaceSpec, PPOSettings]:
    """Spaces and settings of a saved agent; refuses what `PPO.save` did not write."""
    try:
        data = {**SETTINGS_BEFORE, **manifest.facts["settings"]}
        if data["target_kl"] == "inf":
            data["target_kl"] = math.inf
        text = json.dumps(data)
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
