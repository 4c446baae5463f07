"""Lines by package, class names that occur twice, and how much each module imports.

python scripts/size.py
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


def module_name(path: Path) -> str:
    """The dotted name of a file below src."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module of the package."""
    paths = sorted((SOURCE / "esper").rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text("utf-8")) for path in paths}


def duplicate_classes(modules: dict[str, ast.Module]) -> list[str]:
    """Names of classes that are defined in more than one module."""
    names = Counter(
        node.name
        for tree in modules.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """All modules of the package that each one imports at the top, also indirectly."""
    direct = {name: set(_direct(tree, modules)) for name, tree in modules.items()}
    found: dict[str, set[str]] = {}
    for name in modules:
        reached, todo = set[str](), [name]
        while todo:
            new = direct[todo.pop()] - reached
            reached |= new
            todo += new
        found[name] = reached - {name}
    return found


def _direct(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (part if part in known else node.module for part in parts)


def main() -> None:
    """Print it all."""
    packages = [p for p in sorted((SOURCE / "esper").iterdir()) if p.suffix != ".pyc"]
    for path in (
        *packages,
        *(ROOT / name for name in ("benchmarks", "research", "tests")),
    ):
        files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
        if files:
            lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
            print(f"{path.relative_to(ROOT)!s:32}{len(files):5} files{lines:8,} lines")
    modules = trees()
    print(
        "class names that occur twice:", ", ".join(duplicate_classes(modules)) or "none"
    )
    reached = sorted(imports(modules).items(), key=lambda pair: -len(pair[1]))
    for name, others in reached[:15]:
        print(f"{name:48}{len(others):4} of {len(modules)} modules")


if __name__ == "__main__":
    main()
