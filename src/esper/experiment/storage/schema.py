"""The tables and views of a run's event store, in SQL and in one place.

Every row but those of `attempts` has (attempt, seq): seq counts the rows of an attempt
over all tables, from 1 and without holes. `round` is the round that a row belongs to.
A run that resumes after round r begins another attempt; what earlier attempts wrote of
rounds beyond r stays, but no longer counts: `live_NAME` shows what counts of NAME.

SQLite has no NaN: it stores NULL. So NULL means missing, unless `nans`, the names of
columns parted by spaces, has the column's name: then the number was NaN.
"""

from typing import Final

VERSION: Final = 1
"""Of the schema; kept in `PRAGMA user_version`."""
APPLICATION: Final = 0x45535052
"""Tells a store from other databases; kept in `PRAGMA application_id`."""

ATTEMPTS: Final = """
CREATE TABLE attempts (
  attempt INTEGER PRIMARY KEY,   -- from 1
  started TEXT NOT NULL,         -- UTC
  resumed_after INTEGER,         -- the round it goes on from; NULL: from the start
  last_round INTEGER,            -- the last round of it that counts; NULL: all do
  rows INTEGER NOT NULL,         -- rows written, which is the highest seq
  versions TEXT NOT NULL         -- what it ran on, as JSON
) STRICT
"""

COLUMNS: Final = {
    "rounds": """
  env_steps INTEGER NOT NULL,    -- decisions since the start, over all environments
  seconds REAL,                  -- since the start
  mean_return REAL,              -- of the episodes that ended in this round
  mean_score REAL,               -- of the episodes that ended in this round
  added REAL,                    -- parameters added, as a multiple of the host's, mean
  learning_rate REAL,
  policy_loss REAL, value_loss REAL, clip_fraction REAL, clamped REAL, grad_norm REAL,
  kl REAL, last_kl REAL, explained_variance REAL,
  steps_planned INTEGER, steps_taken INTEGER, stopped_at INTEGER, refused INTEGER""",
    "heads": """
  head TEXT NOT NULL,            -- one row for each head in each round
  kl REAL, entropy REAL, openness REAL, grad_norm REAL""",
    "steps": """
  step INTEGER NOT NULL,         -- decision of the environment since the run's start
  env INTEGER NOT NULL,          -- among the environments of its task
  task TEXT NOT NULL,
  episode INTEGER NOT NULL,      -- of the environment, from 1
  reward REAL,                   -- for this decision
  score REAL, loss REAL, added REAL, budget_left REAL -- seen before this decision""",
    "events": """
  step INTEGER NOT NULL, env INTEGER NOT NULL, task TEXT NOT NULL,
  episode INTEGER NOT NULL,
  slot INTEGER NOT NULL,
  what TEXT NOT NULL,            -- planted, blending, holding, kept, pruned, cleared,
                                 -- aimed (another alpha to go to), jumped (all else)
  stage_from TEXT NOT NULL, stage_to TEXT NOT NULL,
  blueprint TEXT,
  alpha REAL                     -- how much the host felt of the seed afterwards""",
    "episodes": """
  step INTEGER NOT NULL,         -- the decision that ended it
  env INTEGER NOT NULL, task TEXT NOT NULL, episode INTEGER NOT NULL,
  "return" REAL,                 -- sum of its rewards
  score REAL, test REAL, added REAL, macs REAL, -- of the network at the end
  panicked INTEGER               -- 1: its numbers were no longer finite""",
    "evaluations": """
  stage TEXT NOT NULL,           -- watched: while the policy trained, on fixed hosts;
                                 -- judged: at the end, on hosts that decided nothing
  controller TEXT NOT NULL, task TEXT NOT NULL,
  host INTEGER NOT NULL,         -- the same number is the same host for everybody
  "return" REAL,
  score REAL,                    -- on decision rows, at the end
  test REAL,                     -- on test rows, at the end
  area REAL,                     -- mean score on decision rows, over the decisions
  added REAL, macs REAL,         -- of the network at the end, relative to the host
  training_macs REAL,            -- multiply-adds that its training took
  seconds REAL,                  -- of its training, hosts side by side
  panicked INTEGER""",
    "notes": """
  kind TEXT NOT NULL,            -- one word, such as dropped or gap
  text TEXT NOT NULL""",
}
"""What the rows of each table have of their own."""

TABLES: Final = tuple(COLUMNS)

LANE: Final = "PARTITION BY task, env, episode, slot ORDER BY attempt, seq"
"""The events of one slot in one episode, in order, over all attempts."""

VIEWS: Final = {
    "all_rows": "-- Every row of every table, counting or not: for audits.\n"
    + " UNION ALL ".join(
        f"SELECT attempt, seq, round, '{name}' AS kind FROM {name}" for name in TABLES
    ),
    "learning_curve": """-- One row for each round: how the training goes.
SELECT round, env_steps, seconds, mean_return, mean_score, added, learning_rate, kl,
  explained_variance, ifnull(episodes, 0) AS episodes
FROM live_rounds LEFT JOIN
  (SELECT round, count(*) AS episodes FROM live_episodes GROUP BY round) USING (round)
ORDER BY round""",
    "head_entropy": """-- How undecided each head is, and how far an update moved it.
SELECT round, head, entropy, kl, openness FROM live_heads ORDER BY round, seq""",
    "episode_ends": """-- How each episode ended.
SELECT round, step, task, env, episode, "return", score, test, added, macs,
  CASE panicked WHEN 1 THEN 'panicked' WHEN 0 THEN 'in time' END AS how
FROM live_episodes ORDER BY attempt, seq""",
    "seed_lives": f"""-- One bar of a swimlane for each stage of each seed's life,
-- from one decision to another; to_step NULL: it goes on.
WITH moves AS (
  SELECT *, lead(step) OVER lane AS next_step, sum(what = 'planted') OVER lane AS seed
  FROM live_events WHERE stage_from <> stage_to WINDOW lane AS ({LANE}))
SELECT m.task, m.env, m.episode, m.slot, m.seed, m.blueprint, m.stage_to AS stage,
  m.step AS from_step, coalesce(m.next_step, e.step) AS to_step
FROM moves AS m LEFT JOIN live_episodes AS e USING (task, env, episode)
WHERE m.stage_to <> 'DORMANT' ORDER BY m.task, m.env, m.slot, m.attempt, m.seq""",
    "choices": f"""-- What was planted where and when, and what became of it.
WITH seeds AS (
  SELECT *, sum(what = 'planted') OVER lane AS seed
  FROM live_events WINDOW lane AS ({LANE}))
SELECT min(round) AS round, min(step) AS step, task, env, episode, slot, seed,
  max(blueprint) AS blueprint, max(step) AS last_step,
  CASE WHEN sum(what = 'kept') THEN 'kept' WHEN sum(what = 'pruned') THEN 'pruned'
    ELSE 'neither' END AS became
FROM seeds WHERE seed > 0 GROUP BY task, env, episode, slot, seed
ORDER BY min(step), task, env, slot""",
}
"""What people ask, by name; each can be read like a table."""


def statements() -> list[str]:
    """All that makes an empty database a store."""
    made = [ATTEMPTS]
    for name, own in COLUMNS.items():
        made.append(
            f"CREATE TABLE {name} (\n  attempt INTEGER NOT NULL, seq INTEGER NOT NULL, "
            f"round INTEGER NOT NULL,{_before_comment(own)}\n  nans TEXT,\n"
            "  PRIMARY KEY (attempt, seq)\n) STRICT, WITHOUT ROWID"
        )
        made.append(
            f"CREATE VIEW live_{name} AS SELECT t.* FROM {name} AS t "
            "JOIN attempts AS a USING (attempt) "
            "WHERE a.last_round IS NULL OR t.round <= a.last_round"
        )
    made += [f"CREATE VIEW {name} AS\n{sql}" for name, sql in VIEWS.items()]
    made.append(f"PRAGMA application_id = {APPLICATION}")
    made.append(f"PRAGMA user_version = {VERSION}")
    return made


def _before_comment(own: str) -> str:
    """The same with a comma at the end, before the last line's comment if any."""
    head, _, last = own.rpartition("\n")
    column, dashes, comment = last.partition("--")
    return f"{head}\n{column.rstrip()}, {dashes}{comment}"
