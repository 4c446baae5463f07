r"""The real world: many hosts train on a task while controllers grow them.

    phi    = score - rent * added parameters / host parameters
    reward = phi' - phi

A step is one decision: the sentence is carried out, every host trains `decision_every`
minibatches, and the score is taken on the decision rows. The return is what the network
is worth at the end, less what it was worth at the start, and nothing can be farmed. The
horizon terminates. A host or seed whose numbers are no longer finite panics: phi
becomes -1, or stays where it was if that was less, and the episode ends. A sentence
that is not possible is a WAIT, flagged and charged `penalty`. Test rows are read when
an episode ends, for the report.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, RELEVANT, ActionSpec, Op
from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import CallOrder
from esper.contracts.observation import Observation
from esper.contracts.slots import SlotConfig, SlotStates
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.contracts.step import StepResult
from esper.environment.cohort import Cohort, Plan, Trained
from esper.environment.episodes import Episodes
from esper.environment.looking import contributions, see_places
from esper.environment.offers import find_blueprints, offers_of, span, spread
from esper.environment.terms import (
    Ended,
    Terms,
    check_actions,
    check_choices,
    check_count,
)
from esper.growth import lifecycle
from esper.growth.blueprints.forms import FORMS as FORM_SPECS
from esper.growth.lifecycle import Lives, select
from esper.growth.observe import Track, host_states
from esper.tasks.task import Task

OFFERED: Final = {
    "mlp": ("low_rank_4", "widen_8", "widen_16", "widen_32", "residual_mlp"),
    "cnn": ("widen_8", "widen_16"),
}
"""Blueprints of the world unless others are named, by kind of host."""
JUDGED: Final = 512
"""Decision rows that a score is taken on, at most."""
TRIED: Final = 256
"""Decision rows that a contribution is taken on, at most."""
PerEnv = Float[Tensor, " env"]


class GrowingWorld(Stateful):
    """Hosts of one task that train and grow together; a `VectorWorld`.

    Args:
        task: What the hosts learn.
        num_envs: How many hosts.
        rng_seed: Decides data, hosts, batches and terms, with environment and episode.
        blueprints: What may be planted, two-matrix forms only; if None, those that are
            offered to hosts of this kind.
        seeds_per_slot: Seeds that each place can hold.
        terms: Ranges of what may differ from environment to environment.
        measure_every: Decisions between two looks at contributions and promises.
        penalty: Reward taken for a sentence that is not possible.
        twins: How many environments in a row have the same data, host, batches and
            terms.
        device: Where everything lives.
        engine: What trains the hosts, see `Cohort`.
    """

    STATE = (
        "cohort",
        "illegal",
        "_episodes",
        "_lives",
        "_track",
        "_phi",
        "_offers",
        "_contribution",
        "_measured",
        "_flow",
        "_lively",
        "_started",
    )
    DERIVED = ("_plan", "ended", "lived")

    _track: Track
    _phi: PerEnv

    def __init__(
        self,
        task: Task,
        num_envs: int,
        rng_seed: int = 0,
        *,
        blueprints: tuple[str, ...] | None = None,
        seeds_per_slot: int = 2,
        terms: Terms | None = None,
        measure_every: int = 4,
        penalty: float = 0.01,
        twins: int = 1,
        device: str = "cpu",
        engine: str = "auto",
    ) -> None:
        check_choices(num_envs, rng_seed, measure_every, penalty, device, blueprints)
        check_count("seeds_per_slot", seeds_per_slot, 1)
        check_count("twins", twins, 1)
        self.group_size = twins
        self.task, self.host = task, task.host
        self._envs, self._penalty = num_envs, penalty
        self._measure_every, self._device = measure_every, torch.device(device)
        terms = terms or Terms()
        self._episodes = Episodes(
            task, num_envs, rng_seed, terms, self._device, twins=twins
        )
        chosen = find_blueprints(blueprints or OFFERED[self.host.kind])
        self.cohort = Cohort(
            num_envs,
            self.host,
            chosen,
            seeds_per_slot=seeds_per_slot,
            batch=task.batch,
            decay=task.weight_decay,
            device=device,
            engine=engine,
        )
        slots = self.cohort.places * seeds_per_slot
        self._spec = ActionSpec(
            SlotConfig(max_slots=slots, min_age=1), chosen, {"style": ("ADD",)}
        )
        self._geometry = [span(*pair) for pair in pairwise(self.cohort.chart.maps)]
        offers = offers_of(self.host, self._geometry, chosen, seeds_per_slot)
        self._offers = spread(offers, num_envs, device)
        self._started = False
        self.ended: Ended | None = None
        """What became of the episodes that ended in the last step."""
        self.lived: Lives | None = None
        """Seeds as they were in the last training, also where an episode ended."""
        self.illegal = torch.zeros(num_envs, dtype=torch.bool, device=device)
        """Where the last sentence was not possible."""
        self._allocate()

    @property
    def spec(self) -> ActionSpec:
        """What can be said in this world."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        return self._envs

    @torch.inference_mode(False)
    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        self._started = True
        self._begin(range(self._envs))
        return self._observe()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act, train until the next decision, look; ended episodes start anew."""
        if not self._started:
            raise CallOrder("step() before reset(); call reset() first.")
        check_actions(actions, self._envs)
        self._act(actions.clone().to(self._device))
        due = self._track.decisions % self._measure_every == 0
        lives_on = self._track.decisions < self.task.horizon
        trained = self._train(keep=bool((due & lives_on).any()))
        losses, score = trained.losses, self._score()
        # One sum tells whether any weight is broken, of the host or of a seed.
        sums = (losses, trained.beside, self.cohort.values.sum(dim=1))
        finite = torch.stack(sums).isfinite().all(dim=0)
        worth = score - self._episodes.rent * self._added()
        phi = torch.where(finite, worth, self._phi.clamp(max=-1.0))
        reward = phi - self._phi - self._penalty * self.illegal
        self._phi = phi
        self._track = self._track.after(torch.where(finite, score, 0.0), losses)
        over = ~finite | (self._track.decisions > self.task.horizon)
        self.ended = None
        if bool(over.any()):
            self.ended = self._report(over, score, ~finite)
            self._begin(torch.nonzero(over).flatten().tolist())
        self._look(trained, ~over & due.to(over.device))
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=over,
            truncated=torch.zeros_like(over),
        )

    # An episode begins.

    def loaded(self) -> None:
        """What the hosts feel follows from their seeds' lives."""
        self._plan, self.ended, self.lived = Plan.of(self._lives), None, None

    def _allocate(self) -> None:
        """Make room for what every episode has of its own."""
        envs, device = self._envs, self._device
        self._lives = Lives.empty(envs, self._spec.slots.max_slots, device)
        self._track = Track.fresh(envs, device)
        self._phi = torch.zeros(envs, device=device)
        shape = tuple(self._lives.stage.shape)
        self._contribution = torch.zeros(shape, device=device)
        self._measured = torch.zeros(shape, dtype=torch.bool, device=device)
        self._flow = torch.ones(envs, self.cohort.places, device=device)
        self._lively = torch.ones(envs, self.cohort.places, device=device)

    def _begin(self, envs: Iterable[int]) -> None:
        """Start new episodes: data, host, order of batches and terms are drawn anew."""
        fresh = torch.zeros(self._envs, dtype=torch.bool, device=self._device)
        for env in envs:
            fresh[env] = True
            self._episodes.begin(env)
            network = self.host.build(self._episodes.streams[env])
            self.cohort.plant_host(env, network)
        whole = fresh.unsqueeze(1).expand(self._lives.stage.shape)
        slots = self._spec.slots.max_slots
        nobody = Lives.empty(self._envs, slots, self._device)
        self._lives = select(whole, nobody, self._lives)
        self._plan = Plan.of(self._lives)
        self._track = self._track.replaced(fresh, Track.fresh(self._envs, self._device))
        self._measured = self._measured & ~whole
        self._flow = torch.where(fresh[:, None], 1.0, self._flow)
        self._lively = torch.where(fresh[:, None], 1.0, self._lively)
        self._offers = replace(
            self._offers,
            promise_known=self._offers.promise_known & ~fresh[:, None, None],
        )
        score = self._score(fresh)
        self._phi = torch.where(fresh, score, self._phi)
        start = self._track.after(score, torch.full_like(score, torch.nan))
        self._track = self._track.replaced(fresh, start)

    # A decision.

    def _act(self, actions: Int64[Tensor, "env head"]) -> None:
        """Carry out what is possible; the rest is a WAIT and is flagged."""
        sizes = torch.tensor(self._spec.sizes, device=self._device)
        known = (actions >= 0) & (actions < sizes)
        actions = torch.where(known, actions, 0)
        op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
        heads = torch.arange(len(sizes), device=self._device)
        offered = known & self._spec.allowed.to(self._device)[heads, actions]
        unused = ~RELEVANT.to(self._device)[op]
        offered = (offered | unused).all(dim=1) & known[:, HEAD["op"]]
        kind = actions[:, HEAD["blueprint"]]
        everyone = torch.arange(self._envs, device=self._device)
        cost = self._offers.parameters[everyone, slot, kind]
        affordable = cost <= self._episodes.budget - self._added()
        plants = op == Op.GERMINATE
        wrong = plants & ~(affordable & self._offers.fits[everyone, slot, kind])
        wrong |= ~offered
        spoken = torch.where(wrong.unsqueeze(1), 0, actions)
        before = self._lives
        acted, done = lifecycle.act(before, spoken, self._spec.slots.min_age)
        self.illegal = wrong | ~done
        for env in torch.nonzero(plants & done & ~wrong).flatten().tolist():
            self._plant(env, int(slot[env]), self._spec.blueprints[int(kind[env])])
        self._lives = self.lived = lifecycle.tick(acted)
        gone = (before.stage != Stage.DORMANT) & (self._lives.stage == Stage.DORMANT)
        for env, index in torch.nonzero(gone).tolist():
            self.cohort.uproot(env, index)
        self._measured = self._measured & (self._lives.stage == before.stage)
        self._plan = Plan.of(self._lives)

    def _plant(self, env: int, slot: int, blueprint: Blueprint) -> None:
        """New units as large as the host's own, saying nothing yet."""
        place = slot % self.cohort.places
        spec = FORM_SPECS[blueprint.form]
        made = spec.init(
            self._geometry[place], blueprint.size, self._episodes.streams[env]
        )
        if blueprint.form is Form.WIDEN:
            own, first = self.cohort.first_layer(env, place).cpu(), made["first"]
            made["first"] = first * (own.std(correction=0) / first.std(correction=0))
        self.cohort.plant(env, slot, blueprint, made)

    def _train(self, *, keep: bool) -> Trained:
        """All minibatches until the next decision."""
        rows = self._episodes.rows
        picked, rates = self._episodes.minibatches(self._track.decisions - 1)
        return self.cohort.train(
            rows.features[0], rows.labels[0], picked, self._plan, rates, keep=keep
        )

    # Looking.

    def _score(self, asked: Bool[Tensor, " env"] | None = None) -> PerEnv:
        """Share of decision rows that each host guesses right."""
        x, y = self._episodes.rows.decisions(JUDGED)
        return self.cohort.count(x, y, self._plan.felt, asked) / y.shape[1]

    def _look(self, trained: Trained, due: Bool[Tensor, " env"]) -> None:
        """Measure what seeds contribute and what places promise, where it is due."""
        if trained.places is None:
            return
        seen = see_places(trained.places, trained.losses, self._spec.blueprints)
        there, per = due[:, None], self.cohort.seeds_per_slot
        promise = seen.promise.repeat(1, per, 1)
        known = torch.isfinite(promise) & there[..., None] & self._offers.fits
        self._offers = replace(
            self._offers,
            promise=torch.where(known, promise, self._offers.promise),
            promise_known=self._offers.promise_known | known,
        )
        sound = there & torch.isfinite(seen.flow)
        self._flow = torch.where(sound, seen.flow, self._flow)
        self._lively = torch.where(there, seen.lively, self._lively)
        x, y = self._episodes.rows.decisions(TRIED)
        gain, measured = contributions(self.cohort, self._lives, due, x, y)
        self._contribution = torch.where(measured, gain, self._contribution)
        self._measured = self._measured | measured

    def _added(self) -> Float[Tensor, " env"]:
        """Parameters of all seeds, as a multiple of the host's."""
        return self._sizes(self._offers.parameters).sum(dim=1)

    def _sizes(self, table: Float[Tensor, "env slot blueprint"]) -> Tensor:
        kind = self._lives.blueprint.clamp(min=0).unsqueeze(2)
        sizes = table.gather(2, kind).squeeze(2)
        return torch.where(self._lives.blueprint >= 0, sizes, 0.0)

    def _report(
        self,
        over: Bool[Tensor, " env"],
        score: Float[Tensor, " env"],
        panicked: Bool[Tensor, " env"],
    ) -> Ended:
        x, y = self._episodes.rows.tests()
        test = self.cohort.count(x, y, self._plan.felt, over) / y.shape[1]
        macs = 1 + self._sizes(self._offers.macs).sum(dim=1)
        return Ended(
            env=torch.nonzero(over).flatten(),
            score=score[over],
            test=test[over],
            added=self._added()[over],
            macs=macs[over],
            panicked=panicked[over],
        )

    def _observe(self) -> Observation:
        lives, per = self._lives, self.cohort.seeds_per_slot
        depth = torch.arange(1, self.cohort.places + 1) / self.cohort.places
        widths = torch.tensor([own.outputs for own in self.cohort.chart.maps[1:]])
        widths = widths.float()
        shape = lives.stage.shape

        def fixed(values: Tensor) -> Tensor:
            return values.to(self._device).repeat(per).expand(shape)

        return Observation(
            first=self._track.decisions <= 1,
            host=host_states(
                self._track,
                horizon=self.task.horizon,
                budget_left=self._episodes.budget - self._added(),
                rent=self._episodes.rent.clone(),  # rewritten when an episode begins
                added=self._added(),
            ),
            slots=SlotStates(
                stage=lives.stage,
                age=lives.age,
                alpha=lives.alpha,
                alpha_target=lives.alpha_target,
                alpha_settled=lives.settled,
                blueprint=lives.blueprint,
                style=lives.style,
                parameters=self._sizes(self._offers.parameters),
                depth=fixed(depth),
                capacity=fixed(widths / widths.max()),
                liveness=self._lively.repeat(1, per),
                gradient_share=self._flow.repeat(1, per),
                contribution=torch.where(self._measured, self._contribution, 0.0),
                contribution_measured=self._measured,
            ),
            offers=self._offers,
        )
