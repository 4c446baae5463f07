"""Break the core in many ways, one at a time, and see each break caught.

    python -m tests.mutants            all of them, two at a time
    python -m tests.mutants 3 7        some of them

Each mutant is a copy of the source with one edit; the named tests must fail on it. A
mutant that survives is a hole in the tests.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCAN, BUFFER = "tests/test_scan.py", "tests/simic/test_rollout_buffer.py"
LOSSES, PPO = "tests/simic/test_losses.py", "tests/simic/test_ppo.py"
GUARD = "tests/simic/test_guard.py"
GROWING, COHORT = (
    "tests/environment/test_growing.py",
    "tests/environment/test_cohort.py",
)
CHOICE, MASKS = "tests/simic/test_distribution.py", "tests/tamiyo/test_action_masks.py"


@dataclass(frozen=True)
class Mutant:
    """One edit and the tests that must notice."""

    what: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = (
    Mutant(
        "a terminal state bootstraps",
        "scan.py",
        "bootstrap = zero if done else following[env]",
        "bootstrap = following[env]",
        SCAN,
    ),
    Mutant(
        "the trace runs through the end of an episode",
        "scan.py",
        "carried = zero if done | truncated else carried",
        "carried = carried",
        SCAN,
    ),
    Mutant(
        "a truncation bootstraps from the next episode",
        "scan.py",
        "bootstrap = final if truncated else bootstrap",
        "bootstrap = bootstrap",
        SCAN,
    ),
    Mutant(
        "NaN passes an episode boundary",
        "scan.py",
        "y[lane] = write if fresh else carried",
        "y[lane] = carried",
        SCAN,
    ),
    Mutant(
        "both flags set counts as truncated",
        "simic/agent/rollout_buffer.py",
        "cut_short = truncated > terminated",
        "cut_short = truncated",
        BUFFER,
    ),
    Mutant(
        "padding is left as it is",
        "simic/agent/rollout_buffer.py",
        "whole.masked_fill_(beyond, 0)",
        "pass",
        PPO,
    ),
    Mutant(
        "advantages are normalised over padding too",
        "simic/agent/losses.py",
        "count = valid.sum().clamp(min=1)\n    centred",
        "count = valid.numel()\n    centred",
        "tests/simic/test_advantages.py",
    ),
    Mutant(
        "the optimistic side of the clip",
        "simic/agent/losses.py",
        "return (ratio * advantages).clamp(max=most)",
        "return (ratio * advantages).clamp(min=most)",
        LOSSES,
    ),
    Mutant(
        "the sign of the policy loss",
        "simic/agent/losses.py",
        'shared |= {"gain": -1.0',
        'shared |= {"gain": 1.0',
        LOSSES,
    ),
    Mutant(
        "the sign of the entropy bonus",
        "simic/agent/losses.py",
        "zeros_like(entropy), -entropy",
        "zeros_like(entropy), entropy",
        LOSSES,
    ),
    Mutant(
        "padded steps count in means",
        "simic/agent/losses.py",
        "torch.where(targets.counted, terms, 0.0).sum(",
        "terms.sum(",
        LOSSES,
    ),
    Mutant(
        "the learner ignores the masks",
        "simic/agent/distribution.py",
        "legal = torch.where(masks, logits.movedim(-1, 0), lowest)",
        "legal = logits.movedim(-1, 0)",
        CHOICE,
    ),
    Mutant(
        "the KL counts illegal choices",
        "simic/agent/distribution.py",
        "torch.where(masks, old.exp() * (old - new), 0.0)",
        "(old.exp() * (old - new))",
        GUARD,
    ),
    Mutant(
        "illegal choices can be drawn",
        "simic/agent/distribution.py",
        "torch.where(masks, noisy, -torch.inf).argmax(dim=-1)",
        "noisy.argmax(dim=-1)",
        CHOICE,
    ),
    Mutant(
        "the slot is drawn without regard to the op",
        "tamiyo/policy/heads.py",
        "_of_choice(masks.slot, op)",
        "masks.slot.any(dim=1)",
        "tests/tamiyo/test_heads.py",
    ),
    Mutant(
        "memory is carried into the next episode",
        "simic/agent/memory.py",
        "gated_scan(gates(inputs), episode_start, state[:, layer])",
        "gated_scan(gates(inputs), episode_start & False, state[:, layer])",
        "tests/simic/test_memory.py",
    ),
    Mutant(
        "a stopped update goes on",
        "simic/agent/ppo.py",
        "taken = finite & ~self._stopped",
        "taken = finite",
        GUARD,
    ),
    Mutant(
        "a non-finite gradient is applied",
        "simic/agent/ppo.py",
        "finite = known & others[0] & others[1]",
        "finite = torch.ones_like(self._stopped)",
        GUARD,
    ),
    Mutant(
        "statistics move without the value head",
        "simic/agent/ppo.py",
        "add_(old_mean - new_mean)",
        "add_(new_mean - old_mean)",
        "tests/simic/test_normalization.py",
    ),
    Mutant(
        "a young seed may be pruned",
        "contracts/stages.py",
        "(Op.PRUNE, Stage.HOLDING): StageTransition(Stage.COOLING, min_age=True)",
        "(Op.PRUNE, Stage.HOLDING): StageTransition(Stage.COOLING)",
        MASKS,
    ),
    Mutant(
        "an ended episode keeps its return",
        "simic/rollout.py",
        "self.returns[env], self.lengths[env] = 0.0, 0",
        "self.lengths[env] = 0",
        "tests/tamiyo/test_rollout.py",
    ),
    Mutant(
        "a seed is kept while its alpha still moves",
        "contracts/stages.py",
        "StageTransition(Stage.FOSSILIZED)",
        "StageTransition(Stage.FOSSILIZED, settled=False)",
        MASKS,
    ),
    Mutant(
        "hosts forget their weight decay",
        "environment/engine.py",
        "w[i] -= shrink * w[i] + far *",
        "w[i] -= far *",
        f"{COHORT}::test_a_cohort_is_separate_trainings",
    ),
    Mutant(
        "new units are read by others from the start",
        "environment/cohort.py",
        "self._move(env, grown)\n        own",
        "self._move(env, grown)\n"
        "        to, since = grown.blocks['out_owner'], grown.blocks['in_owner']\n"
        "        crossed = (to > 0) & (to != slot + 1) & (since == slot + 1)\n"
        "        self.values[env, grown.parameters_of(crossed)] = 0.1\n"
        "        own",
        f"{COHORT}::test_planting_changes_no_output_by_a_bit",
    ),
    Mutant(
        "gradients pass a blended seed as if it were there in full",
        "environment/engine.py",
        "_scale(s, gx, length, scale[b.out_owner])",
        "_scale(s, gx, length, scale[0])",
        f"{COHORT}::test_a_cohort_is_separate_trainings",
    ),
    Mutant(
        "a removed seed leaves its moments behind",
        "environment/cohort.py",
        "rows[env] = 0\n            rows[env, target] = held",
        "rows[env, target] = held",
        COHORT,
    ),
    Mutant(
        "the learning rate falls towards an end that nobody knows",
        "environment/clock.py",
        "return (1 + time / LEVEL) ** -FALL",
        "pass",
        f"{GROWING}::test_nothing_that_is_seen_depends_on_an_unknown_end",
    ),
    Mutant(
        "environments of a group have different data",
        "environment/episode_data.py",
        "env // self._settings.group_size, episode",
        "env, episode",
        f"{GROWING}::test_environments_of_a_group_share_random_numbers",
    ),
    Mutant(
        "a panic pays",
        "environment/growing.py",
        "self._phi.clamp(max=-1.0)",
        "torch.full_like(self._phi, -1.0)",
        f"{GROWING}::test_a_panic_never_pays",
    ),
    Mutant(
        "one absurd reward moves the statistics of returns",
        "simic/agent/ppo.py",
        "returns = self._clip_outliers(returns, valid)",
        "returns = returns + 0.0",
        "tests/simic/test_normalization.py",
    ),
    Mutant(
        "a schedule plants more often than it says",
        "tamiyo/schedule.py",
        "due &= times < count[:, None]",
        "due &= times < 9",
        "tests/tamiyo/test_schedule.py",
    ),
    Mutant(
        "moments of a folded seed keep their own bias correction",
        "growth/optimiser.py",
        "return None if value is None else value / self._correction(key, parameter)",
        "return value",
        "tests/growth/test_fold.py",
    ),
    Mutant(
        "a living neighbour forgets the units of a folded seed",
        "growth/saving/folding.py",
        'more = block if name == "first" else self._blank(own, *shape)',
        "more = self._blank(own, *shape)",
        "tests/growth/test_fold.py",
    ),
    Mutant(
        "a checkpoint may hold numbers that are not finite",
        "files.py",
        "        if not bool(values.isfinite().all()):",
        "        if False:",
        "tests/runs/test_checkpoint.py",
    ),
    Mutant(
        "p-values of several tests are not kept in order",
        "evaluation/statistics.py",
        "np.maximum.accumulate(np.minimum(steps, 1.0))",
        "np.minimum(steps, 1.0)",
        "tests/evaluation/test_statistics.py",
    ),
    Mutant(
        "names are written into the report as markup",
        "report/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/report/test_page.py",
    ),
    Mutant(
        "a broken weight stays in a grown model",
        "growth/safety.py",
        "if not self._ranks.all_agree(all_finite(tensors, OVERFLOW_LIMIT)):",
        "if not tensors:",
        "tests/test_grower_faults.py",
    ),
    Mutant(
        "alpha is forgotten when a seed is folded into its layer",
        "growth/saving/folding.py",
        "weight[:rows, :columns] += alpha * matrix",
        "weight[:rows, :columns] += matrix",
        "tests/growth/test_export.py",
    ),
    Mutant(
        "units of the place before feed those behind without their alpha",
        "growth/hooks.py",
        "given = hidden if alpha == 1.0 else alpha * hidden",
        "given = hidden",
        "tests/growth/test_cross.py",
    ),
    Mutant(
        "a younger seed's units flow into an older one's at birth",
        "growth/seed_modules.py",
        'if key.startswith("from"):',
        "if key:",
        "tests/growth/test_cross.py",
    ),
    Mutant(
        "any free slot of a place can be planted",
        "environment/growing.py",
        "first: Tensor = by_place & (by_place.cumsum(dim=1) == 1)",
        "first: Tensor = by_place",
        GROWING,
    ),
    Mutant(
        "rewards are shares of another group's errors",
        "environment/growing.py",
        "x[env // self.group_size] for x in own",
        "x[0] for x in own",
        GROWING,
    ),
    Mutant(
        "recordings are scored without rent",
        "training/recordings.py",
        "net = score - rent[:, None] * added",
        "net = score",
        "tests/training/test_recordings.py",
    ),
    Mutant(
        "all scripts of a node act, none waits",
        "tamiyo/scripts.py",
        "waiting = max(1, round(WAIT_FRACTION * len(members)))",
        "waiting = 0",
        "tests/tamiyo/test_scripts.py",
    ),
    Mutant(
        "the ladder of static networks has one size",
        "evaluation/evaluation.py",
        "times_as_wide(job.task.host, LADDER[job.arm]), *hosts",
        "job.task.host, *hosts",
        "tests/evaluation/test_static.py",
    ),
    Mutant(
        "halving keeps the sizes that do worst",
        "evaluation/sizes.py",
        "key=lambda size: -shown[size, stop, host]",
        "key=lambda size: shown[size, stop, host]",
        "tests/evaluation/test_sizes.py",
    ),
    Mutant(
        "looks at few rows are charged like those at stops",
        "environment/growing.py",
        "evaluated = self.looked_rows.double()",
        "evaluated = self._scored_rows + 0 * self.looked_rows.double()",
        "tests/environment/test_growing.py",
    ),
    Mutant(
        "p-values are adjusted each by itself",
        "evaluation/statistics.py",
        "np.maximum.accumulate(np.minimum(steps, 1.0))",
        "np.minimum(steps, 1.0)",
        "tests/evaluation/test_statistics.py",
    ),
    Mutant(
        "half of the gradient of a squared error",
        "environment/engine.py",
        "s[last.gz * rows + r] = real(2) * share * error",
        "s[last.gz * rows + r] = share * error",
        COHORT,
    ),
)


def caught(mutant: Mutant) -> bool:
    """Whether the named tests fail on a copy with this edit."""
    with tempfile.TemporaryDirectory(prefix="esper-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "research", "benchmarks"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        edited = copy / "src" / "esper" / mutant.file
        text = edited.read_text(encoding="utf-8")
        if text.count(mutant.before) != 1:
            raise SystemExit(f"mutants: {mutant.file} no longer has {mutant.before!r}.")
        edited.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", mutant.tests],
            cwd=copy,
            env=os.environ
            | {"PYTHONPATH": str(copy / "src"), "NUMBA_CACHE_DIR": str(copy / "numba")},
            capture_output=True,
            text=True,
            check=False,
        )
    # An access out of bounds may end the process: that is noticed, too.
    if done.returncode not in (0, 1, -signal.SIGSEGV, -signal.SIGBUS):
        raise SystemExit(f"mutants: the tests did not run:\n{done.stdout}")
    return done.returncode != 0


def main() -> int:
    """Try the chosen mutants; the exit code counts survivors."""
    chosen = [int(word) - 1 for word in sys.argv[1:]] or range(len(MUTANTS))
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda index: caught(MUTANTS[index]), chosen)
        for index, was_caught in zip(chosen, results, strict=True):
            verdict = "caught  " if was_caught else "SURVIVED"
            print(f"{index + 1:3d}  {verdict}  {MUTANTS[index].what}", flush=True)
            survivors += not was_caught
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
