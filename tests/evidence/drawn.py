"""Campaigns whose truth is known: every arm removes a stated share of errors."""

import sqlite3

import numpy as np

from evidence.ledger import LEDGER, TABLES
from evidence.protocol import sha

TASKS = ("letter", "satimage", "text")
SETTINGS = {
    "rent-low": (0.001, 4.0),
    "rent-mid": (0.005, 4.0),
    "rent-high": (0.025, 4.0),
    "budget-1": (0.001, 1.0),
    "budget-2": (0.001, 2.0),
}
RENTS = ("rent-low", "rent-mid", "rent-high")
PROTOCOL = """
tasks = ["letter", "satimage", "text"]
rents = ["rent-low", "rent-mid", "rent-high"]
resamples = 500
[settings]
rent-low = [0.001, 4.0]
rent-mid = [0.005, 4.0]
rent-high = [0.025, 4.0]
budget-1 = [0.001, 1.0]
budget-2 = [0.001, 2.0]
"""
SHARES = {
    "tamiyo": 0.30,
    "never": 0.0,
    "random": 0.05,
    "plateau": 0.10,
    "early": 0.18,
    "periodic": 0.15,
    "promise": 0.16,
    "searched": 0.20,
    "replay": 0.20,
    "static": 0.34,
    "static-macs": 0.28,
    "without-memory": 0.15,
}
"""Of never's errors that each arm removes, net of rent."""
MEMBERS = {"tamiyo": range(3), "replay": range(3), "without-memory": range(2)}


def rows(shares=SHARES, *, tasks=TASKS, seeds=8, noise=0.01, settings=SETTINGS):
    """Rows of results; `noise` is that of a network, as a share of errors."""
    generator = np.random.default_rng(0)
    found = []
    for place, task in enumerate(tasks):
        base = 0.6 + 0.05 * place
        plain = base + generator.uniform(-0.05, 0.05, seeds)
        errors = 1.0 - plain.mean()
        for arm, share in shares.items():
            for member in MEMBERS.get(arm, [-1]):
                luck = noise * generator.normal(size=seeds)
                luck *= arm != "never"
                for setting, (rent, budget) in settings.items():
                    added = 0.0 if arm == "never" else min(budget, 2.0)
                    tests = plain + errors * (share + luck) + rent * added
                    for seed in range(seeds):
                        found.append(
                            {
                                "stage": "counted",
                                "arm": arm,
                                "member": member,
                                "task": task,
                                "setting": setting,
                                "rate": 1.0,
                                "seed": seed,
                                "score": tests[seed],
                                "test": tests[seed],
                                "added": added,
                                "macs": 1.0 + added,
                                "training_macs": 1e9 * (1.0 + added),
                                "area": 0.5,
                                "seconds": 6.0 if arm == "tamiyo" else 2.0,
                                "panicked": 0,
                                "planted": 2,
                            }
                        )
    return found


def write_ledger(folder, results, *, jobs=(), trainings=()):
    """A ledger as a campaign would have left it."""
    folder.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(folder / LEDGER)
    db.executescript(TABLES)
    toml = PROTOCOL.encode()
    facts = (sha(toml), PROTOCOL, "2030-01-02T03:04:05+00:00", '{"torch": "2.0"}')
    db.execute("INSERT INTO protocol VALUES (?, ?, ?, ?)", facts)
    for table, lines in (
        ("results", results),
        ("jobs", jobs),
        ("trainings", trainings),
    ):
        for line in lines:
            holes = ", ".join(f":{name}" for name in line)
            names = ", ".join(line)
            db.execute(f"INSERT INTO {table} ({names}) VALUES ({holes})", line)
    db.commit()
    db.close()
    return folder


def training(name, *, arm="tamiyo", member=0, seconds=7_200.0):
    """A row of trainings."""
    return {
        "name": name,
        "arm": arm,
        "member": member,
        "env_steps": 50_000,
        "seconds": seconds,
        "run": "",
        "facts": "{}",
    }


def job(name, state, note=""):
    """A row of jobs."""
    return {
        "id": name,
        "priority": 0,
        "kind": "counted",
        "state": state,
        "seconds": 1.0,
        "ended": "2030-01-02",
        "note": note,
    }
