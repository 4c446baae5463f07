"""One name for one class; modules that import no more than they need."""

import ast
import re
from pathlib import Path

from scripts.size import duplicate_classes, imports, trees

MODULES = trees()


def test_no_class_name_occurs_twice():
    # Every framework has a callback that grows, in a module of its own.
    assert duplicate_classes(MODULES) == ["GrowCallback"]


def test_a_module_imports_at_most_a_third_of_the_package():
    # A run of each kind is put together in one module: there settings become worlds,
    # policies, callbacks and arms.
    together = {"esper.experiment.train", "esper.rl.training"}
    limit = len(MODULES) / 3
    over = {name for name, others in imports(MODULES).items() if len(others) > limit}
    assert {name for name in over if not name.startswith("esper.cli")} == together


def test_the_run_of_the_guide_is_not_begun_by_worker_processes_that_import_it():
    text = Path(__file__).parents[1].joinpath("docs/running.md").read_text("utf-8")
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "begin_run(" in code
    )
    *before, last = ast.parse(example).body
    assert all(isinstance(line, ast.Import | ast.ImportFrom) for line in before)
    assert ast.unparse(last).startswith("if __name__ == '__main__':")
