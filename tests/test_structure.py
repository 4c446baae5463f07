"""One name for one class; modules that import no more than they need."""

import pytest

from scripts.size import duplicate_classes, imports, trees

MODULES = trees()


def test_no_class_name_occurs_twice():
    assert duplicate_classes(MODULES) == []


@pytest.mark.parametrize(
    "package", ["simic", "tamiyo", "growth", "environment", "report"]
)
def test_a_module_imports_at_most_a_third_of_the_package(package):
    limit = len(MODULES) / 3
    for name, others in imports(MODULES).items():
        if name.startswith(f"esper.{package}"):
            assert len(others) <= limit, name
