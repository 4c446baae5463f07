"""Old names and unclear phrases that are still in the code, with file and line.

python scripts/names.py [ROOT]

`NAMES` are wrong everywhere, `MODULES` as names of modules. Ordinary words are wrong
only as members of certain classes (`MEMBERS`). `PHRASES` are searched in the text of
src. The exit code is 1 if anything is found.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "benchmarks", "research", "examples", "scripts", "tests")


def pairs(text: str) -> dict[str, str]:
    """Old to new names of a list `old:new old:new`."""
    return dict(pair.split(":") for pair in text.split())


NAMES = pairs("""
    Live:RolloutState Standing:RolloutState Played:ShardRollout Finished:EpisodeStats
    Judged:EvalResult Judging:EvalConfig Keeping:CheckpointConfig judged:evaluated
    judging:evaluation watched:validation train_on:recovery Grown:SeedModules
    Follower:TopologyListener Ranks:DistributedContext uproot:remove_seed
    Middle:Interlayer Survey:HostAnalysis Lost:JobFailed RunTaken:RunLockedError
    BadInput:InvalidInputError CallOrder:InvalidStateError final_share:end_factor
    value_fading:value_norm_decay charge_looks:charge_eval _ask:query_masks
    _judge:verify _begin:reset_envs checked_name:validate_name
""")
TROUBLE = re.compile(r"\w*Trouble")
MODULES = pairs("""
    attempts:recovery judging:evaluation merging:folding merge_rules:folding
    middle:interlayer
    rebuilding:serialization suggestions:slots
""")
SETTINGS = pairs("""
    clip:clip_range entropy:entropy_coef value:value_coef kind:vectorization
    envs:num_envs steps:rollout_steps relevant:head_relevance
""")
STEP = pairs("rows:masks first:episode_start")
METHODS = pairs("scores:evaluate_actions cut:finish together:concat")
SEEDS = pairs("put:apply_states wait:count_batch")

MEMBERS = (
    (r"PPOConfig|PPOSettings|PPORunConfig|TrainConfig|PPO", SETTINGS),
    (r"Decision|SequenceBatch|Observation|\w*RolloutBuffer", STEP),
    (r"\w*(Policy|Buffer)|SequenceBatch|EpisodeStats", METHODS),
    (r"SeedModules", SEEDS),
    (r"DistributedContext", pairs("alone:no_sync")),
    (r"Splits", pairs("decisions:val")),
    (r"\w*Host(Spec|Shape|Config)?", pairs("classes:num_outputs")),
    (r"\w*(Workers|Processes|Pool)", pairs("doing:active_jobs")),
)
"""Patterns of class names, with the names that their members must not have."""

RECEIVERS = (
    (r"(\w*_)?(policy|buffer)", METHODS),
    (r"esper_seeds|seed_modules", SEEDS),
    (r"distributed|context", pairs("alone:no_sync")),
    (r"splits?", pairs("decisions:val")),
)
"""The same for attributes, by the name of the variable before the dot."""

PHRASES = r"\b((equal|same) luck|anew|is told|(watched|judged) hosts|nobody knows"
PHRASES += r"|uproot|what remembers)\b"
PHRASE = re.compile(PHRASES.replace(" ", r"[\s#\"']+"), re.IGNORECASE)

ACCEPTED = {("tests/campaign.py", "watched"): "looks at a process, not at hosts"}
"""File and name, with the reason why it may stay."""

Tables = tuple[tuple[str, dict[str, str]], ...]
IMPORTS = (ast.ImportFrom, ast.alias)


def table_of(owner: str, tables: Tables) -> dict[str, str]:
    """Old to new names of the members of an owner."""
    found = [table for pattern, table in tables if re.fullmatch(pattern, owner)]
    return {old: new for table in found for old, new in table.items()}


def names_of(node: ast.AST) -> list[str]:
    """Identifiers that stand in a node itself, with the parts of imported modules."""
    fields = ("id", "attr", "arg", "name", "asname", "module")
    found = [getattr(node, field, None) for field in fields]
    return [part for name in found if isinstance(name, str) for part in name.split(".")]


def members(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Fields and methods of a class, parameters of its constructor and of `add`."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from ((part.lineno, x.id) for x in targets if isinstance(x, ast.Name))
        elif isinstance(part, ast.FunctionDef):
            yield part.lineno, part.name
            if part.name in ("__init__", "add"):
                for x in part.args.args + part.args.kwonlyargs:
                    yield x.lineno, x.arg


def found_in(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, old name and new name of everything in a syntax tree."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        old = {**NAMES, **MODULES} if isinstance(node, IMPORTS) else NAMES
        for name in names_of(node):
            if name in old:
                yield line, name, old[name]
            elif TROUBLE.fullmatch(name):
                yield line, name, name.replace("Trouble", "Error")
        places: list[tuple[int, str]] = []
        table: dict[str, str] = {}
        if isinstance(node, ast.ClassDef):
            places, table = list(members(node)), table_of(node.name, MEMBERS)
        elif isinstance(node, ast.Call):
            owner = (names_of(node.func) or [""])[-1]
            places = [(line, key.arg) for key in node.keywords if key.arg]
            table = table_of(owner, MEMBERS) | (STEP if owner == "add" else {})
        elif isinstance(node, ast.Attribute):
            places = [(line, node.attr)]
            table = table_of((names_of(node.value) or [""])[-1], RECEIVERS)
        yield from ((at, name, table[name]) for at, name in places if name in table)


def main(root: Path) -> int:
    """Print every find; how many there are."""
    count = 0
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        where, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
        found = list(found_in(ast.parse(text)))
        if path.stem in MODULES:
            found.append((1, path.name, f"{MODULES[path.stem]}.py"))
        if where.startswith("src/"):
            for match in PHRASE.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append((line, " ".join(match[0].split()), "plain English"))
        for line, name, new in sorted(set(found)):
            if (where, name) not in ACCEPTED:
                print(f"{where}:{line}: {name} -> {new}")
                count += 1
    return count


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    sys.exit(1 if main(Path(sys.argv[1]) if sys.argv[1:] else here) else 0)
