"""One slot's lifecycle in plain Python: if and else, one batch at a time."""

from dataclasses import dataclass
from math import cos, exp, pi

TEMPO = [0, 1, 2, 4]
TARGET = [0.5, 0.7, 1.0]
SPEED = [1, 2, 4]


@dataclass
class Slot:
    """A slot and the seed in it, if there is one."""

    stage: str = "DORMANT"
    age: int = 0
    blueprint: int = -1
    style: int = 0
    tempo: int = 0
    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    moved: int = 0
    length: int = 0
    curve: int = 0
    tick: int = 1

    def act(
        self, op: str, choices: dict[str, int], min_age: int, tick: int = 1
    ) -> bool:
        """Carry out an action if it is possible; whether it was."""
        if op == "WAIT":
            return True
        old = self.age >= min_age
        rests = self.moved >= self.length or self.stage == "TRAINING"
        self.tick = tick
        if op == "GERMINATE" and self.stage == "DORMANT":
            self._enter("TRAINING")
            self.blueprint, self.style = choices["blueprint"], choices["style"]
            self.tempo = TEMPO[choices["tempo"]]
            self.target = TARGET[choices["alpha_target"]]
            self.moved, self.length, self.curve = 0, self.tempo * tick, 0
            return True
        if op == "ADVANCE" and self.stage == "TRAINING" and old:
            self._enter("BLENDING")
            self._move(self.target, self.tempo * tick, 0)
            return True
        if op == "SET_ALPHA" and self.stage in ("BLENDING", "HOLDING") and rests:
            self.style = choices["style"]
            self._fade(TARGET[choices["alpha_target"]], choices)
            return True
        living = self.stage in ("TRAINING", "BLENDING", "HOLDING")
        if op == "PRUNE" and living and old and rests:
            self._enter("COOLING")
            self._fade(0.0, choices)
            return True
        if op == "FOSSILIZE" and self.stage == "HOLDING" and rests:
            self._enter("FOSSILIZED")
            return True
        return False

    def after(self, batches: int, decision: bool) -> None:
        """Let batches pass, one by one, and a decision if there is one."""
        self._settle()
        for _ in range(batches):
            if self.moved < self.length:
                self.moved += 1
                share = self.moved / self.length
                way = [share, (1 - cos(pi * share)) / 2, _sigmoid(share)][self.curve]
                if self.stage != "TRAINING":
                    self.alpha = self.start + (self.target - self.start) * way
            self._settle()
        if decision and self.stage != "DORMANT":
            self.age += 1

    def _settle(self) -> None:
        """Move on what has arrived."""
        if self.stage == "TRAINING" and self.moved >= self.length:
            self._enter("BLENDING")
            self.start, self.moved = 0.0, 0
        if self.stage != "TRAINING" and self.moved >= self.length:
            self.alpha = self.target
            if self.stage == "BLENDING":
                self._enter("HOLDING")
            if self.stage == "COOLING":
                self.__init__()

    def _enter(self, stage: str) -> None:
        self.stage, self.age = stage, 0

    def _fade(self, target: float, choices: dict[str, int]) -> None:
        """Nothing to fade takes no time."""
        there = abs(self.alpha - target) < 1e-9
        length = 0 if there else SPEED[choices["alpha_speed"]] * self.tick
        self._move(target, length, choices["alpha_curve"])

    def _move(self, target: float, length: int, curve: int) -> None:
        self.start, self.target, self.curve = self.alpha, target, curve
        self.moved, self.length = 0, length


def _sigmoid(share: float) -> float:
    def plain(x: float) -> float:
        return 1 / (1 + exp(-x))

    low, high = plain(-6.0), plain(6.0)
    return (plain(6.0 * (2 * share - 1)) - low) / (high - low)
