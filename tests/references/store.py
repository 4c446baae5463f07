"""A store as it is often written first: one transaction for each row."""

import sqlite3
from pathlib import Path


class RowByRow:
    """Commits every step of every environment by itself."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(
            "CREATE TABLE steps (attempt, round, step, env, task, episode, reward, "
            "score, loss, added, budget_left)"
        )

    def add_steps(self, round, step, task, episode, **figures) -> None:
        for env in range(len(episode)):
            values = [figures[name][env].item() for name in FIGURES]
            self._db.execute(
                "INSERT INTO steps VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (round, step, env, task, episode[env].item(), *values),
            )
            self._db.commit()

    def close(self) -> None:
        self._db.close()


FIGURES = ("reward", "score", "loss", "added", "budget_left")
