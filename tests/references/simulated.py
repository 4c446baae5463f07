"""One simulated host in plain Python: objects, dictionaries and branches.

Written from the rules in words, without the world's tables. Slow and obvious; also
the naive twin of the benchmark.
"""

from copy import copy
from itertools import product

HORIZON = 12
TEMPOS = {1: 1, 2: 2}
TARGETS = {0: 0.5, 2: 1.0}
SPEEDS = {0: 1, 1: 2}
CURVES = (0, 2)
LEARNT = {0: 0.0, 1: 0.375, 2: 0.75, 3: 1.0}
WAIT, GERMINATE, ADVANCE, SET_ALPHA, PRUNE, FOSSILIZE = range(6)
DORMANT, TRAINING, BLENDING, HOLDING, FOSSILIZED, COOLING = range(6)


class PlainSlot:
    """One slot: its traits, what it offers, and the seed in it."""

    def __init__(self, traits, gains, fits, sizes, seed=None):
        self.traits = traits  # depth, capacity, liveness, gradient_share
        self.gains, self.fits, self.sizes = gains, fits, sizes
        self.clear()
        if seed is not None:
            self.__dict__.update(seed)

    def clear(self):
        self.stage, self.age, self.blueprint, self.style = DORMANT, 0, -1, 0
        self.alpha, self.target, self.path = 0.0, 0.0, []
        self.tempo, self.maturity, self.cools = 0, 0.0, 0

    def copy(self):
        other = copy(self)
        other.path = [*self.path]
        return other

    def parameters(self):
        return 0.0 if self.stage == DORMANT else self.sizes[self.blueprint]

    def settled(self):
        return not self.path

    def worth(self):
        """What the seed adds to phi, without its rent."""
        if self.stage == DORMANT:
            return 0.0
        if self.stage == TRAINING:
            return 0.25 * LEARNT[min(self.age, 3)] * self.gains[self.blueprint]
        effect = self.alpha
        if self.traits["gradient_share"] < 0.5:
            effect = {0.0: 0.0, 0.25: 0.5, 0.5: 1.0, 0.75: 0.75, 1.0: 0.5}[self.alpha]
        if self.stage in (BLENDING, HOLDING):
            effect = 0.25 + 0.5 * effect
        return self.maturity * effect * self.gains[self.blueprint]

    def may(self, op):
        aged = self.age >= 1 and self.settled()
        if op == GERMINATE:
            return self.stage == DORMANT
        if op == ADVANCE:
            return self.stage in (TRAINING, BLENDING) and aged
        if op == SET_ALPHA:
            return self.stage in (BLENDING, HOLDING) and self.settled()
        if op == PRUNE:
            return self.stage in (TRAINING, BLENDING, HOLDING) and aged
        return op == FOSSILIZE and self.stage == HOLDING and self.settled()

    def live(self):
        """One step of time."""
        self.age += 1
        if self.path:
            self.alpha = self.path.pop(0)
        if self.stage == COOLING:
            self.cools -= 1
            if self.cools == 0:
                self.clear()

    def obey(self, op, blueprint, style, tempo, target, speed):
        """One op, in place of one step of time."""
        if op == GERMINATE:
            self.clear()
            self.stage, self.blueprint, self.style = TRAINING, blueprint, style
            self.tempo, self.target = TEMPOS[tempo], TARGETS[target]
        elif op == ADVANCE and self.stage == TRAINING:
            self.maturity = LEARNT[min(self.age, 3)]
            self.stage, self.age = BLENDING, 0
            self.path = [self.target * k / self.tempo for k in range(1, self.tempo + 1)]
        elif op == ADVANCE:
            self.stage, self.age = HOLDING, 0
        elif op == SET_ALPHA:
            self.style, self.target = style, TARGETS[target]
            way, steps = self.target - self.alpha, SPEEDS[speed]
            if way != 0.0:
                self.path = [self.alpha + way * k / steps for k in range(1, steps + 1)]
            self.live()
        elif op == PRUNE:
            self.stage, self.cools = COOLING, SPEEDS[speed]
            self.alpha, self.target, self.path = 0.0, 0.0, []
        elif op == FOSSILIZE:
            self.stage, self.age = FOSSILIZED, 0

    def damage(self, op, style, tempo, speed, curve):
        total = 0.0
        if op in (GERMINATE, SET_ALPHA) and style != (self.traits["depth"] > 0.5):
            total += 1 / 32
        if op in (SET_ALPHA, PRUNE):
            total += (curve != (0 if self.traits["liveness"] > 0.5 else 2)) / 32
        hasty = TEMPOS[tempo] if op == GERMINATE else SPEEDS.get(speed)
        if op in (GERMINATE, SET_ALPHA, PRUNE) and self.traits["capacity"] < 0.5:
            total += (hasty == 1) * 3 / 64
        return total

    def seen(self):
        """What an observation shows of the slot."""
        age = {TRAINING: min(self.age, 3), COOLING: 4 - self.cools, FOSSILIZED: 0}
        shown = self.alpha > 0.0 and self.stage != FOSSILIZED
        return {
            "stage": self.stage,
            "age": 0
            if self.stage == DORMANT
            else age.get(self.stage, min(self.age, 1)),
            "alpha": self.alpha,
            "alpha_target": self.target,
            "alpha_settled": self.settled(),
            "blueprint": self.blueprint,
            "style": self.style,
            "parameters": self.parameters(),
            "contribution": self.worth() if shown else 0.0,
            "contribution_measured": shown,
            **self.traits,
        }


class PlainHost:
    """One host with its slots, from one row of the instances."""

    def __init__(self, instance):
        self.clock, self.rent = instance["clock"], instance["rent"]
        self.budget = instance["budget"]
        self.slots = [PlainSlot(**slot) for slot in instance["slots"]]
        self.damages = 0.0

    def copy(self):
        other = copy(self)
        other.slots = [slot.copy() for slot in self.slots]
        return other

    def added(self):
        return sum(slot.parameters() for slot in self.slots)

    def phi(self):
        return sum(slot.worth() for slot in self.slots) - self.rent * self.added()

    def is_legal(self, action):
        op, where, blueprint = action[:3]
        slot = self.slots[where]
        if op == GERMINATE and not (
            slot.fits[blueprint] and slot.sizes[blueprint] <= self.budget - self.added()
        ):
            return False
        return op == WAIT or slot.may(op)

    def legal_actions(self):
        return [action for action in EVERY_ACTION if self.is_legal(action)]

    def step(self, action):
        """The reward of one step."""
        op, where, blueprint, style, tempo, target, speed, curve = action
        before, damage = self.phi(), 0.0
        for index, slot in enumerate(self.slots):
            if op == WAIT or index != where:
                slot.live()
            else:
                damage = slot.damage(op, style, tempo, speed, curve)
                slot.obey(op, blueprint, style, tempo, target, speed)
        self.clock += 1
        self.damages += damage
        return self.phi() - before - damage

    def seen(self):
        """What an observation shows of the host."""
        return {
            "progress": self.clock / HORIZON,
            "budget_left": self.budget - self.added(),
            "added": self.added(),
            "rent": self.rent,
        }


def sentences():
    """Every action, with 0 where the op does not use the head."""
    slots, blueprints, styles = range(2), range(3), range(2)
    yield (WAIT, 0, 0, 0, 0, 0, 0, 0)
    for slot in slots:
        for blueprint, style, tempo, target in product(
            blueprints, styles, TEMPOS, TARGETS
        ):
            yield (GERMINATE, slot, blueprint, style, tempo, target, 0, 0)
        yield (ADVANCE, slot, 0, 0, 0, 0, 0, 0)
        for style, target, speed, curve in product(styles, TARGETS, SPEEDS, CURVES):
            yield (SET_ALPHA, slot, 0, style, 0, target, speed, curve)
        for speed, curve in product(SPEEDS, CURVES):
            yield (PRUNE, slot, 0, 0, 0, 0, speed, curve)
        yield (FOSSILIZE, slot, 0, 0, 0, 0, 0, 0)


EVERY_ACTION = tuple(sentences())


def plain_instances(instances, lives):
    """Each row of the world's instances as plain data; `lives` names its lives."""
    rows = []
    for env in range(len(instances)):
        slots = []
        for slot in range(instances.depth.shape[1]):
            traits = {
                name: float(getattr(instances, name)[env, slot])
                for name in ("depth", "capacity", "liveness", "gradient_share")
            }
            slots.append(
                {
                    "traits": traits,
                    "gains": instances.gain[env, slot].tolist(),
                    "fits": instances.fits[env, slot].tolist(),
                    "sizes": instances.parameters[env, slot].tolist(),
                    "seed": plain_seed(instances, lives, env, slot),
                }
            )
        rows.append(
            {
                "clock": int(instances.clock[env]),
                "rent": float(instances.rent[env]),
                "budget": float(instances.budget[env]),
                "slots": slots,
            }
        )
    return rows


def plain_seed(instances, lives, env, slot):
    """The seed that a slot starts with; None if it is empty."""
    life = lives[int(instances.life[env, slot])]
    if life.stage == DORMANT:
        return None
    rises = [
        life.alpha + (life.target - life.alpha) * k / life.steps
        for k in range(1, life.steps + 1)
    ]
    fades = [max(0.0, (k - 2) / 4) for k in range(life.steps - 1, 1, -1)]
    path = {BLENDING: rises, HOLDING: rises, COOLING: fades}
    return {
        "stage": int(life.stage),
        "age": life.age,
        "alpha": life.alpha,
        "target": life.target,
        "path": path.get(int(life.stage), []),
        "tempo": life.steps if life.stage == TRAINING else 0,
        "cools": life.steps if life.stage == COOLING else 0,
        "maturity": life.maturity,
        "blueprint": int(instances.blueprint[env, slot]),
        "style": int(instances.style[env, slot]),
    }


def legal_in(world, actions):
    """Whether each action is legal in a simulated world now."""
    return world._act(world._current(), actions)[2]
