"""Imports between folders go in one direction, and the core imports only torch."""

import ast
from pathlib import Path

import pytest

import lowmem

PACKAGE = Path(lowmem.__file__).parent

# Each top-level folder or file may import from those above it. Files in a folder may import one another.
ORDER = ["errors", "files", "tiles", "kernels", "rules", "placements", "options", "step", "optimizer"]
ORDER += ["layers", "hf", "trainer", "run", "cli", "__main__"]
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)
MODULES += sorted(path.relative_to(PACKAGE) for path in PACKAGE.glob("*.py") if path.name != "__init__.py")

NAMES = {".".join(("lowmem", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in MODULES}


def members(node):
    return [f"{node.module}.{alias.name}" for alias in node.names]


def room(path):
    return path.parts[0].removesuffix(".py")


def imports(path):
    """Returns the names of this package's modules that a file imports anywhere."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [name if name in NAMES else node.module for name in members(node)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "lowmem")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_come_from_above(path):
    allowed = ORDER[: ORDER.index(room(path)) + (len(path.parts) > 1)]
    imported = {name.split(".")[1] for name in imports(path) if "." in name} & set(ORDER)
    assert imported <= set(allowed)


def test_no_import_cycles_inside_a_folder():
    waiting = {name: {other for other in imports(path) if other in NAMES} - {name} for name, path in NAMES.items()}
    while waiting:
        ready = [name for name, needed in waiting.items() if not needed & waiting.keys()]
        assert ready, f"circle among {sorted(waiting)}"
        for name in ready:
            del waiting[name]


def test_at_most_eight_files_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= 8
