r"""The real world: many hosts train on a task while controllers grow them.

    phi    = score - rent * added parameters / host parameters
    reward = phi' - phi

A step is one decision: the action is carried out, every host trains `decision_every`
minibatches, and the score is taken on the decision rows. The return is the final phi
less the first, and nothing can be farmed. The horizon terminates. A host or seed whose
numbers are no longer finite panics: phi becomes -1, or stays where it was if that was
less, and the episode ends. An action that is not possible is a WAIT, flagged and
charged `penalty`. Test rows are read when an episode ends, for the report.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, RELEVANT, ActionSpec, Op
from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.devices import usable_device
from esper.contracts.errors import CallOrder
from esper.contracts.slots import SlotConfig, SlotStates
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.contracts.world import (
    BlueprintOffers,
    EpisodeReport,
    Observation,
    StepResult,
    VectorWorld,
)
from esper.environment.cohort import (
    Cohort,
    TrainingResult,
    active_alpha,
    find_blueprints,
)
from esper.environment.episode_data import EpisodeData, Rows
from esper.environment.looks import contributions, place_statistics
from esper.environment.memory_layout import place_geometries
from esper.environment.settings import (
    CONTRIBUTION_ROWS,
    OFFERED,
    SCORED_ROWS,
    WorldSettings,
    check_actions,
    check_count,
)
from esper.growth import lifecycle
from esper.growth.blueprints.forms import FORMS as FORM_SPECS
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.seed import Cost, cost, misfit
from esper.growth.lifecycle import SeedStates, select
from esper.growth.measurements import Track, host_states
from esper.tasks.hosts import Host
from esper.tasks.task import Task

PerEnv = Float[Tensor, " env"]


class GrowingWorld(Stateful, VectorWorld):
    """Hosts of one task that train and grow together.

    Args:
        task: What the hosts learn.
        num_envs: How many hosts.
        rng_seed: Decides data, hosts, batches and terms, with environment and episode.
        settings: How they grow; blueprints must be two-matrix forms.
        device: Where everything lives.
        engine: What trains the hosts, see `Cohort`.
    """

    STATE = (
        "cohort",
        "_episodes",
        "_lives",
        "_track",
        "_phi",
        "_offers",
        "_contribution",
        "_measured",
        "_gradient_share",
        "_liveness",
    )
    DERIVED = ("trained_lives",)

    _track: Track
    _phi: PerEnv

    def __init__(
        self,
        task: Task,
        num_envs: int,
        rng_seed: int = 0,
        *,
        settings: WorldSettings | None = None,
        device: str = "cpu",
        engine: str = "auto",
    ) -> None:
        check_count("num_envs", num_envs, 1)
        check_count("rng_seed", rng_seed, 0)
        self.settings = settings = settings or WorldSettings()
        self.task = task = settings.applied_to(task)
        self.host = task.host
        self.num_envs, self.group_size = num_envs, settings.group_size
        self._device = usable_device(device)
        self._episodes = EpisodeData(task, num_envs, rng_seed, settings, self._device)
        chosen = find_blueprints(settings.blueprints or OFFERED[self.host.kind])
        per_place = settings.seeds_per_place(task)
        self.cohort = Cohort(
            num_envs,
            self.host,
            chosen,
            seeds_per_slot=per_place,
            batch=task.batch,
            decay=task.weight_decay,
            device=device,
            engine=engine,
        )
        slots = SlotConfig(max_slots=self.cohort.places * per_place, min_age=1)
        self.spec = ActionSpec(slots, chosen, {"style": ("ADD",)})
        self._geometry = place_geometries(self.host)
        sizes = (num_envs, per_place, 1)
        self._offers = BlueprintOffers(
            **{
                name: offer.repeat(sizes).to(self._device)
                for name, offer in _offers(self.host, self._geometry, chosen).items()
            }
        )
        self.trained_lives: SeedStates | None = None
        """Seeds as they were in the last training, also where an episode ended."""
        self._lives = SeedStates.empty(num_envs, slots.max_slots, self._device)
        self._track = Track.fresh(num_envs, self._device)
        self._phi = torch.zeros(num_envs, device=device)
        self._contribution = torch.zeros(num_envs, slots.max_slots, device=device)
        self._measured = torch.zeros_like(self._contribution, dtype=torch.bool)
        places = (num_envs, self.cohort.places)
        self._gradient_share = torch.ones(places, device=device)
        self._liveness = torch.ones(places, device=device)

    @torch.inference_mode(False)
    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        self._begin(range(self.num_envs))
        return self._observe()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act and train until the next decision; ended episodes start anew."""
        if not self._episodes.begun.all():
            raise CallOrder("step() before reset(); call reset() first.")
        check_actions(actions, self.num_envs)
        illegal = self._act(actions.clone().to(self._device))
        due = self._track.decisions % self.settings.measure_every == 0
        goes_on = self._track.decisions < self.task.horizon
        trained = self._train(keep=bool((due & goes_on).any()))
        losses, score = trained.losses, self._score()
        # The sum is finite only if all weights of host and seeds are.
        sums = (losses, trained.shadow_losses, self.cohort.values.sum(dim=1))
        finite = torch.stack(sums).isfinite().all(dim=0)
        net = score - self._episodes.rent * self._added()
        phi = torch.where(finite, net, self._phi.clamp(max=-1.0))
        reward = phi - self._phi - self.settings.penalty * illegal
        self._phi = phi
        self._track = self._track.after(torch.where(finite, score, 0.0), losses)
        over = ~finite | (self._track.decisions > self.task.horizon)
        report = None
        if bool(over.any()):
            report = self._report(over, score, ~finite)
            self._begin(torch.nonzero(over).flatten().tolist())
        self._look(trained, ~over & due.to(over.device))
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=over,
            truncated=torch.zeros_like(over),
            illegal=illegal,
            report=report,
        )

    def loaded(self) -> None:
        """Nothing has been trained yet."""
        self.trained_lives = None

    def _begin(self, envs: Iterable[int]) -> None:
        """Start new episodes: data, host, order of batches and terms are drawn anew."""
        fresh = torch.zeros(self.num_envs, dtype=torch.bool, device=self._device)
        for env in envs:
            fresh[env] = True
            self._episodes.begin(env)
            self.cohort.set_host(env, self.host.build(self._episodes.streams[env]))
        whole = fresh.unsqueeze(1).expand(self._lives.stage.shape)
        none = SeedStates.empty(self.num_envs, self.spec.slots.max_slots, self._device)
        self._lives = select(whole, none, self._lives)
        unseen = Track.fresh(self.num_envs, self._device)
        self._track = select(fresh, unseen, self._track)
        self._measured = self._measured & ~whole
        self._gradient_share = torch.where(fresh[:, None], 1.0, self._gradient_share)
        self._liveness = torch.where(fresh[:, None], 1.0, self._liveness)
        self._offers = replace(
            self._offers,
            promise_known=self._offers.promise_known & ~fresh[:, None, None],
        )
        score = self._score(fresh)
        self._phi = torch.where(fresh, score, self._phi)
        start = self._track.after(score, torch.full_like(score, torch.nan))
        self._track = select(fresh, start, self._track)

    def _act(self, actions: Int64[Tensor, "env head"]) -> Bool[Tensor, " env"]:
        """Carry out what is possible; returns where it was not, which is a WAIT."""
        sizes = torch.tensor(self.spec.sizes, device=self._device)
        known = (actions >= 0) & (actions < sizes)
        actions = torch.where(known, actions, 0)
        op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
        heads = torch.arange(len(sizes), device=self._device)
        offered = known & self.spec.allowed.to(self._device)[heads, actions]
        unused = ~RELEVANT.to(self._device)[op]
        offered = (offered | unused).all(dim=1) & known[:, HEAD["op"]]
        kind = actions[:, HEAD["blueprint"]]
        envs = torch.arange(self.num_envs, device=self._device)
        price = self._offers.parameters[envs, slot, kind]
        affordable = price <= self._episodes.budget - self._added()
        plants = op == Op.GERMINATE
        wrong = plants & ~(affordable & self._offers.fits[envs, slot, kind])
        wrong |= ~offered
        legal = torch.where(wrong.unsqueeze(1), 0, actions)
        before = self._lives
        acted, done = lifecycle.act(before, legal, self.spec.slots.min_age)
        for env in torch.nonzero(plants & done & ~wrong).flatten().tolist():
            self._plant(env, int(slot[env]), self.spec.blueprints[int(kind[env])])
        self._lives = self.trained_lives = lifecycle.after(acted, torch.ones_like(op))
        gone = (before.stage != Stage.DORMANT) & (self._lives.stage == Stage.DORMANT)
        for env, index in torch.nonzero(gone).tolist():
            self.cohort.remove(env, index)
        self._measured = self._measured & (self._lives.stage == before.stage)
        return wrong | ~done

    def _plant(self, env: int, slot: int, blueprint: Blueprint) -> None:
        """Plant a seed that is zero out; new units are as large as the host's own."""
        place = slot % self.cohort.places
        made = FORM_SPECS[blueprint.form].init(
            self._geometry[place], blueprint.size, self._episodes.streams[env]
        )
        if blueprint.form is Form.WIDEN:
            own, first = self.cohort.inlet_weights(env, place).cpu(), made["first"]
            made["first"] = first * (own.std(correction=0) / first.std(correction=0))
        self.cohort.plant(env, slot, blueprint, made)

    def _train(self, *, keep: bool) -> TrainingResult:
        """All minibatches until the next decision."""
        picked, rates = self._episodes.minibatches(self._track.decisions - 1)
        x, y = self._episodes.rows[0]
        return self.cohort.train(x, y, picked, self._lives, rates, keep=keep)

    def _decision_rows(self, count: int) -> Rows:
        x, y = self._episodes.rows[1]
        return x[:, :count], y[:, :count]

    def _score(self, wanted: Bool[Tensor, " env"] | None = None) -> PerEnv:
        """Share of decision rows that each host classifies correctly."""
        x, y = self._decision_rows(SCORED_ROWS)
        return self.cohort.count(x, y, active_alpha(self._lives), wanted) / y.shape[1]

    def _look(self, trained: TrainingResult, due: Bool[Tensor, " env"]) -> None:
        """Measure contributions of seeds and promises of places, where it is due."""
        if trained.places is None:
            return
        seen = place_statistics(trained.places, trained.losses, self.spec.blueprints)
        there, per = due[:, None], self.cohort.seeds_per_slot
        promise = seen.promise.repeat(1, per, 1)
        known = torch.isfinite(promise) & there[..., None] & self._offers.fits
        self._offers = replace(
            self._offers,
            promise=torch.where(known, promise, self._offers.promise),
            promise_known=self._offers.promise_known | known,
        )
        sound = there & torch.isfinite(seen.gradient_share)
        self._gradient_share = torch.where(
            sound, seen.gradient_share, self._gradient_share
        )
        self._liveness = torch.where(there, seen.liveness, self._liveness)
        x, y = self._decision_rows(CONTRIBUTION_ROWS)
        gain, measured = contributions(self.cohort, self._lives, due, x, y)
        self._contribution = torch.where(measured, gain, self._contribution)
        self._measured = self._measured | measured

    def _added(self) -> PerEnv:
        """Parameters of all seeds, as a multiple of the host's."""
        return self._of_seeds(self._offers.parameters).sum(dim=1)

    def _of_seeds(self, table: Float[Tensor, "env slot blueprint"]) -> Tensor:
        """The table's entry of each slot's blueprint; 0 where there is none."""
        kind = self._lives.blueprint.clamp(min=0).unsqueeze(2)
        entries = table.gather(2, kind).squeeze(2)
        return torch.where(self._lives.blueprint >= 0, entries, 0.0)

    def _report(
        self, over: Bool[Tensor, " env"], score: PerEnv, panicked: Bool[Tensor, " env"]
    ) -> EpisodeReport:
        x, y = self._episodes.rows[2]
        test = self.cohort.count(x, y, active_alpha(self._lives), over) / y.shape[1]
        macs = 1 + self._of_seeds(self._offers.macs).sum(dim=1)
        return EpisodeReport(
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
        shapes = self.cohort.layout.shapes
        widths = torch.tensor([own.outputs for own in shapes[1:]]).float()

        def fixed(values: Tensor) -> Tensor:
            return values.to(self._device).repeat(per).expand(lives.stage.shape)

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
                parameters=self._of_seeds(self._offers.parameters),
                depth=fixed(depth),
                capacity=fixed(widths / widths.max()),
                liveness=self._liveness.repeat(1, per),
                gradient_share=self._gradient_share.repeat(1, per),
                contribution=torch.where(self._measured, self._contribution, 0.0),
                contribution_measured=self._measured,
            ),
            offers=self._offers,
        )


def _offers(
    host: Host, geometry: list[Geometry], blueprints: tuple[Blueprint, ...]
) -> dict[str, Tensor]:
    """What every place of one host could be planted with: columns of the offers."""
    fits = torch.tensor([[not misfit(b, p) for b in blueprints] for p in geometry])
    costs = [
        [Cost(0, 0) if misfit(b, p) else cost(b, p) for b in blueprints]
        for p in geometry
    ]
    parameters, macs = (
        torch.tensor([[getattr(each, what) for each in row] for row in costs]).float()
        for what in ("parameters", "macs")
    )
    return {
        "fits": fits,
        "parameters": parameters / host.parameters,
        "macs": macs / host.macs,
        "promise": torch.zeros_like(parameters),
        "promise_known": torch.zeros_like(fits),
    }
