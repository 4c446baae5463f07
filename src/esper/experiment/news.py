"""What a run has to say besides its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from esper.experiment.judging import Judged


@dataclass(frozen=True, slots=True)
class Watched:
    """The policy, judged on the same hosts as ever."""

    round: int
    tasks: Mapping[str, Judged]

    @property
    def mean_return(self) -> float:
        """Over tasks that count alike."""
        means = [float(judged.returns.mean()) for judged in self.tasks.values()]
        return sum(means) / len(means)


@dataclass(frozen=True, slots=True)
class Progressed:
    """One step of something that takes a while, before or after the rounds."""

    what: str
    done: int
    total: int
    news: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence."""

    text: str
    warning: bool = False


News = Watched | Progressed | Said
