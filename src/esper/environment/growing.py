r"""An environment in which hosts train on a task while a controller grows them.

    phi = score - rent * added size
    Phi = sum of w_j phi_j over past stops + (sum of the remaining weights) phi
    reward = Phi' - Phi

A step is one decision: act, train until the next decision, score on the validation
split. The return is the weighted mean of phi over the stops, minus the first phi. Size
and compute are in multiples of the task's initial host. If a weight or loss is not
finite, phi becomes at most -1 and the episode ends. An illegal action becomes WAIT and
costs `penalty`. The test split is used at the stops, for the report only.

Relative rewards compare with the same host without growth: its gain of Phi is
subtracted, and rewards are divided by its validation error, at least `LEAST_ERROR`.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, RELEVANT, ActionSpec, Op
from esper.contracts.blueprints import Blueprint
from esper.contracts.checks import require_int
from esper.contracts.errors import InvalidStateError
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
from esper.environment.clock import BACKWARD
from esper.environment.cohort import Cohort
from esper.environment.episode_data import BUDGET_TOLERANCE, EpisodeData
from esper.environment.settings import (
    LEAST_ERROR,
    LOOKED_ROWS,
    OFFERED,
    SCORED_ROWS,
    WorldSettings,
    check_actions,
    find_blueprints,
)
from esper.growth import lifecycle
from esper.growth.lifecycle import SeedStates, select
from esper.growth.measurements import Track, host_states
from esper.tasks.task import Task

PerEnv = Float[Tensor, " env"]


class GrowingWorld(Stateful, VectorWorld):
    """Hosts of one task that train and grow together.

    Args:
        task: Task that the hosts learn.
        num_envs: Number of hosts.
        rng_seed: Seed of data, hosts, batches, rents, budgets and rates.
        settings: Settings of growth; blueprints must be widenings.
    """

    STATE = (
        "cohort",
        "_episodes",
        "_lives",
        "_track",
        "_phi",
        "_banked",
        "_passed",
        "last_test",
        "_tested",
        "_compute",
        "unit",
        "never",
    )
    DERIVED = (
        "trained_steps",
        "trained_macs",
        "looked_rows",
        "last_phi",
        "last_compute",
        "_courses",
    )

    _track: Track
    _phi: PerEnv

    def __init__(
        self,
        task: Task,
        num_envs: int,
        rng_seed: int = 0,
        *,
        settings: WorldSettings | None = None,
    ) -> None:
        require_int("num_envs", num_envs, 1)
        require_int("rng_seed", rng_seed, 0)
        self.settings = settings = settings or WorldSettings()
        self.task = task = settings.applied_to(task)
        self.host, self.clock = task.host, settings.clock_of(task)
        self._weights = self.clock.weights().float()
        self.num_envs, self.group_size = num_envs, settings.group_size
        self._episodes = EpisodeData(task, num_envs, rng_seed, settings)
        chosen = find_blueprints(settings.blueprints or OFFERED)
        per_place = settings.seeds_per_place(task)
        most = 1 + settings.range_of("budget")[1] * (1 + BUDGET_TOLERANCE)
        self.cohort = Cohort(
            num_envs,
            self.host,
            slots_per_place=per_place,
            capacity=self.host.parameters + ceil((most - 1) * task.unit.parameters),
            batch=task.batch,
            decay=task.weight_decay,
        )
        slots = SlotConfig(max_slots=self.cohort.slots, min_age=1)
        self.spec = ActionSpec(slots, chosen, settings.narrowed())
        self.trained_steps = torch.zeros(num_envs, dtype=torch.int64)
        """Minibatches of the last training, also of episodes that ended."""
        self.trained_macs = torch.zeros(num_envs, dtype=torch.int64)
        """Multiply-adds per row of the networks in that training."""
        self.looked_rows = torch.zeros(num_envs, dtype=torch.int64)
        """Validation rows that were scored after it."""
        self._lives = SeedStates.empty(num_envs, slots.max_slots)
        self._track = Track.fresh(num_envs)
        self._phi = torch.zeros(num_envs)
        self._banked = torch.zeros(num_envs)
        """Weighted phi of past stops; `_passed` is their total weight."""
        self._passed = torch.zeros(num_envs)
        self.last_test = torch.zeros(num_envs)
        """Test score at the last stop, also of episodes that ended."""
        self._tested = torch.zeros(num_envs)
        self._compute = torch.zeros(num_envs, dtype=torch.float64)
        """Compute of the episode so far, in batches of the initial host."""
        self.last_phi = self._phi
        """phi and compute at the last decision, also of episodes that ended."""
        self.last_compute = self._compute.clone()
        self.unit = torch.ones(num_envs)
        """Divisor of relative rewards."""
        self.never = torch.zeros(num_envs, task.horizon + 1)
        """Gain of Phi up to each decision of the same hosts without growth."""
        self._courses: dict[int, tuple[Tensor, Tensor]] = {}
        """Gains `[group, decision]` and errors `[group]` without growth, by episode."""

    @property
    def slot_names(self) -> list[str]:
        """Names of all slots."""
        names = self.host.slots
        return [
            f"{names[n % len(names)]}#{n // len(names)}"
            for n in range(self.cohort.slots)
        ]

    @property
    def layer_names(self) -> list[str]:
        """Names of the hidden layers, one for each place, and of the output."""
        ends = [name.split("->") for name in self.host.slots]
        return [*(inlet for inlet, _ in ends), ends[-1][1]]

    @property
    def outputs(self) -> int:
        """Units of the output."""
        return self.host.layers[-1].outputs

    @torch.inference_mode(False)
    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        self._reset_envs(range(self.num_envs))
        return self._observe()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult[Observation]:
        """Act and train until the next decision; ended episodes restart."""
        if not self._episodes.begun.all():
            raise InvalidStateError("step() before reset(); call reset() first.")
        check_actions(actions, self.num_envs)
        illegal = self._act(actions.to("cpu", copy=True))
        losses, shadow_losses = self._train()
        score = self._score(self.looked_rows)
        # The sum is finite only if all weights are.
        sums = (losses, shadow_losses, self.cohort.values.sum(dim=1))
        finite = torch.stack(sums).isfinite().all(dim=0)
        before = self._objective()
        net = score - self._episodes.rent * self._added()
        self._phi = torch.where(finite, net, self._phi.clamp(max=-1.0))
        self.last_phi = self._phi
        over = ~finite | (self._track.decisions >= self.task.horizon)
        self._stop(over)
        gained = self._objective() - before - self._never_gained(over)
        reward = gained / self.unit.clamp(min=LEAST_ERROR)
        reward = reward - self.settings.penalty * illegal
        # An interval can be too short for a batch of a large network.
        losses = torch.where(self.trained_steps > 0, losses, torch.nan)
        self._track = self._track.after(torch.where(finite, score, 0.0), losses)
        report = None
        if bool(over.any()):
            report = self._report(over, score, ~finite)
            self._reset_envs(torch.nonzero(over).flatten().tolist())
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=over,
            truncated=torch.zeros_like(over),
            illegal=illegal,
            report=report,
        )

    def _reset_envs(self, envs: Iterable[int]) -> None:
        """Start new episodes with new data, hosts, batch order and terms."""
        fresh = torch.zeros(self.num_envs, dtype=torch.bool)
        for env in envs:
            fresh[env] = True
            self._episodes.begin(env)
            self.cohort.set_host(env, self.host.build(self._episodes.streams[env]))
            if self.settings.relative:
                own = self._never_grown(int(self._episodes.begun[env]) - 1)
                self.never[env], self.unit[env] = (
                    x[env // self.group_size] for x in own
                )
        none = SeedStates.empty(self.num_envs, self.spec.slots.max_slots)
        whole = fresh.unsqueeze(1).expand(self._lives.stage.shape)
        self._lives = select(whole, none, self._lives)
        unseen = Track.fresh(self.num_envs)
        self._track = select(fresh, unseen, self._track)
        score = self._score(fresh * self._scored_rows)
        phi = score - self._episodes.rent * self._added()
        self._phi = torch.where(fresh, phi, self._phi)
        for past in (self._banked, self._passed, self._tested, self._compute):
            past[fresh] = 0.0
        start = self._track.after(score, torch.full_like(score, torch.nan))
        self._track = select(fresh, start, self._track)

    def _never_gained(self, over: Bool[Tensor, " env"]) -> PerEnv:
        """Gain of hosts without growth at this decision, or to the end if over."""
        now = self._track.decisions
        after = torch.where(over, self.task.horizon, now)
        ends = self.never.gather(1, torch.stack((now - 1, after), dim=1))
        return ends[:, 1] - ends[:, 0]

    def _never_grown(self, episode: int) -> tuple[Tensor, Tensor]:
        """Gains and errors without growth, with common random numbers."""
        if episode not in self._courses:
            alone = replace(self.settings, relative=False, group_size=1)
            groups, seed = -(-self.num_envs // self.group_size), self._episodes.run
            task = replace(self.task, host=self.task.unit)
            world = GrowingWorld(task, groups, seed, settings=alone)
            world._episodes.begun[:] = episode
            first = world.reset().host.score
            waits = torch.zeros(groups, len(self.spec.sizes), dtype=torch.int64)
            living = torch.ones(groups, dtype=torch.bool)
            course = [torch.zeros_like(first)]
            for _ in range(self.task.horizon):
                result = world.step(waits)
                course.append(course[-1] + torch.where(living, result.reward, 0.0))
                living &= ~(result.terminated | result.truncated)
            # Rewards sum to the objective minus the first score.
            errors = (1 - first - course[-1]).clamp(min=LEAST_ERROR)
            self._courses = {episode: (torch.stack(course, dim=1), errors)}
        return self._courses[episode]

    def _act(self, actions: Int64[Tensor, "env head"]) -> Bool[Tensor, " env"]:
        """Act where legal; return where the action was illegal, which is a WAIT."""
        sizes = torch.tensor(self.spec.sizes)
        known = (actions >= 0) & (actions < sizes)
        actions = torch.where(known, actions, 0)
        op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
        heads = torch.arange(len(sizes))
        offered = known & self.spec.allowed[heads, actions]
        unused = ~RELEVANT[op]
        offered = (offered | unused).all(dim=1) & known[:, HEAD["op"]]
        kind = actions[:, HEAD["blueprint"]]
        envs = torch.arange(self.num_envs)
        offers = self._offers()
        price = offers.parameters[envs, slot, kind]
        beyond = (price > self._episodes.budget - self._added()) | ~offers.fits[
            envs, slot, kind
        ]
        plants = op == Op.GERMINATE
        wrong = ~offered | (plants & beyond)
        legal = torch.where(wrong.unsqueeze(1), 0, actions)
        before = self._lives
        acted, done = lifecycle.act(
            before, legal, self.spec.slots.min_age, self.settings.tick
        )
        for env in torch.nonzero(plants & done & ~wrong).flatten().tolist():
            self._plant(env, int(slot[env]), self.spec.blueprints[int(kind[env])])
        none = torch.zeros_like(op)
        self._lives = lifecycle.after(acted, none, decision=False)
        self._remove_gone(before)
        return wrong | ~done

    def _remove_gone(self, before: SeedStates) -> None:
        """Remove the weights of seeds that have become dormant."""
        gone = (before.stage != Stage.DORMANT) & (self._lives.stage == Stage.DORMANT)
        for env, slot in torch.nonzero(gone).tolist():
            self.cohort.remove(env, slot)

    def _plant(self, env: int, slot: int, blueprint: Blueprint) -> None:
        """Plant new units with He initialization.

        Their outgoing weights start at zero, so smaller incoming weights would make
        them learn too slowly (https://arxiv.org/abs/1502.01852, eq. 10).
        """
        place = slot % self.cohort.places
        units = blueprint.units(self.cohort.layouts[env].widths[place])
        inputs, taps = self.cohort.inputs(env, place)
        bound = (6 / (inputs * taps)) ** 0.5
        weight = torch.empty(units, inputs, taps).uniform_(
            -bound, bound, generator=self._episodes.streams[env]
        )
        self.cohort.plant(env, slot, weight, torch.zeros(units))

    def _train(self) -> tuple[PerEnv, PerEnv]:
        """Train until the next decision; return mean losses of hosts and shadows."""
        lives, decision = self._lives, self._track.decisions - 1
        compute = self.cohort.macs().to(self._compute) / self.task.unit.macs
        cost = compute if self.clock.kind == "compute" else torch.ones_like(compute)
        shadow = cost if self.clock.kind == "compute" else torch.zeros_like(cost)
        now = self._compute
        if self.clock.kind == "batches":
            now = torch.from_numpy(self._episodes.drawn).to(now)
        left = self.clock.times()[decision + 1] - now
        young = lives.stage == Stage.TRAINING
        trains = torch.where(young, lives.length - lives.moved, 0).amax(dim=1)
        # Batches with a shadow pass come first.
        doubled = _whole(left / (cost + shadow)).minimum(trains)
        steps = doubled + _whole((left - doubled * (cost + shadow)) / cost)
        most = int(steps.max())
        count = torch.arange(most)
        pass_costs = cost[:, None] + shadow[:, None] * (count < trains[:, None])
        moments = now[:, None] + pass_costs.cumsum(dim=1) - pass_costs
        rates = self._episodes.rates(self.clock.rate(moments))
        picked = self._episodes.minibatches(steps, most)
        alpha, training = lifecycle.schedule(lives, most)
        x, y = self._episodes.rows[0]
        losses = self.cohort.train(x, y, picked, alpha, training, rates, steps)
        stops = self._weights[self._track.decisions] > 0
        few = min(LOOKED_ROWS, self._scored_rows)
        self.looked_rows = torch.where(stops, self._scored_rows, few)
        # Validation is a forward pass.
        evaluated = self.looked_rows.double() / (self.task.batch * (1 + BACKWARD))
        passes = steps + trains.minimum(steps) + evaluated * self.settings.charge_eval
        self._compute = self._compute + compute * passes
        self.last_compute = self._compute.clone()
        self.trained_steps, self.trained_macs = steps, self.cohort.macs()
        self._lives = lifecycle.after(lives, steps)
        self._remove_gone(lives)
        return losses

    @property
    def _scored_rows(self) -> int:
        """Validation rows of a score at a stop."""
        return min(SCORED_ROWS, self._episodes.rows[1][1].shape[1])

    def _score(self, wanted: Int64[Tensor, " env"]) -> PerEnv:
        """Score of each host on this many validation rows."""
        return self.cohort.score(*self._episodes.rows[1], self._lives.alpha, wanted)

    def _objective(self) -> PerEnv:
        """Phi: weighted phi of past stops, and the current phi for the others."""
        return self._banked + (1 - self._passed) * self._phi

    def _stop(self, over: Bool[Tensor, " env"]) -> None:
        """Score environments at a stop; an ended episode fills all remaining stops."""
        weight = self._weights[self._track.decisions]
        weight = torch.where(over, 1 - self._passed, weight)
        self._banked = self._banked + weight * self._phi
        self._passed = self._passed + weight
        here = weight > 0
        if bool(here.any()):
            x, y = self._episodes.rows[2]
            rows = here * y.shape[1]
            test = self.cohort.score(x, y, self._lives.alpha, rows)
            self.last_test = torch.where(here, test, self.last_test)
            net = test - self._episodes.rent * self._added()
            self._tested = self._tested + torch.where(here, weight * net, 0.0)

    def _added(self) -> PerEnv:
        """Added parameters, as a multiple of the initial host's."""
        own = self.cohort.parameters()
        return (own / self.task.unit.parameters - 1).float()

    def _report(
        self, over: Bool[Tensor, " env"], score: PerEnv, panicked: Bool[Tensor, " env"]
    ) -> EpisodeReport:
        macs = self.cohort.macs() / self.task.unit.macs
        return EpisodeReport(
            env=torch.nonzero(over).flatten(),
            score=score[over],
            test=self.last_test[over],
            objective=self._tested[over],
            added=self._added()[over],
            macs=macs.float()[over],
            training_macs=self._compute[over] * self.batch_macs(),
            panicked=panicked[over],
        )

    def batch_macs(self) -> int:
        """Return the multiply-adds of one training batch of the initial host."""
        return self.task.unit.macs * self.task.batch * (1 + BACKWARD)

    def _offers(self) -> BlueprintOffers:
        """Blueprint offers at the current widths."""
        parameters, macs = self.cohort.unit_costs()
        widths = self.cohort.widths()
        units = torch.tensor(
            [
                [[b.units(width) for b in self.spec.blueprints] for width in row]
                for row in widths.tolist()
            ]
        )
        per = self.cohort.slots // self.cohort.places

        def of_slots(costs: Tensor, unit: int) -> Tensor:
            offered = (costs[..., None] * units / unit).float()
            return offered.repeat(1, per, 1)

        price = of_slots(parameters, self.task.unit.parameters)
        unmeasured = torch.zeros_like(price)
        return BlueprintOffers(
            fits=self._first_free()[:, :, None].expand_as(price),
            parameters=price,
            macs=of_slots(macs, self.task.unit.macs),
            promise=unmeasured,
            promise_known=unmeasured.bool(),
        )

    def _first_free(self) -> Bool[Tensor, "env slot"]:
        """First free slot of every place, as slots of a place are equivalent."""
        free = self._lives.stage == Stage.DORMANT
        by_place = free.unflatten(1, (-1, self.cohort.places))
        first: Tensor = by_place & (by_place.cumsum(dim=1) == 1)
        return first.flatten(1)

    def _observe(self) -> Observation:
        lives, per = self._lives, self.cohort.slots // self.cohort.places
        depth = torch.arange(1, self.cohort.places + 1) / self.cohort.places
        widths = self.cohort.widths().float()
        none = torch.zeros_like(lives.alpha)
        return Observation(
            episode_start=self._track.decisions <= 1,
            host=host_states(
                self._track,
                horizon=self.task.horizon if self.clock.stop == "end" else None,
                compute=self._compute,
                budget_left=self._episodes.budget - self._added(),
                rent=self._episodes.rent.clone(),  # changes at the next reset
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
                parameters=self.cohort.seed_parameters().to(none)
                / self.task.unit.parameters,
                depth=depth.to(none).repeat(per).expand(none.shape),
                capacity=(widths / widths.amax(dim=1, keepdim=True))
                .repeat(1, per)
                .to(none),
                units=widths.repeat(1, per).to(none),
                liveness=none + 1,
                gradient_share=none + 1,
                contribution=none,
                contribution_measured=none.bool(),
            ),
            offers=self._offers(),
        )


def _whole(batches: Float[Tensor, " env"]) -> Int64[Tensor, " env"]:
    """Number of whole batches, up to rounding."""
    return (batches + 1e-9).floor().clamp(min=0).to(torch.int64)
