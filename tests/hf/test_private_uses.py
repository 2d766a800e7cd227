"""docs/private_uses.md lists every private part of another package that lowmem uses, and every one still exists."""

import ast
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed")
# Modules whose names are documented.
PUBLIC = {
    "accelerate.utils", "transformers.integrations.deepspeed", "transformers.trainer_utils", "transformers.utils",
}  # fmt: skip


def table():
    """Package, version, file of the package, names in it, our files."""
    rows = []
    for line in (ROOT / "docs" / "private_uses.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "package" and not cells[0].startswith("-"):
            package, version, file, names, places, _ = cells
            rows.append((package, version, file.strip("`"), code(names), code(places)))
    return rows


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def identifiers(path):
    """Every identifier in a Python file, and every string, since some attributes are read by getattr."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                names.add(name)
    return names


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row[0]}-{Path(row[2]).stem}")
def test_every_listed_name_exists(row):
    package, version, file, names, places = row
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert importlib.metadata.version(package).startswith(version + ".")
    path = Path(importlib.util.find_spec(package).origin).parent / file
    assert set(names) <= identifiers(path), f"{path} no longer has {set(names) - identifiers(path)}"
    for name in names:
        assert any(name in identifiers(ROOT / place) for place in places), f"none of {places} uses {name}"
    for place in places:
        assert not set(names).isdisjoint(identifiers(ROOT / place)), f"{place} uses none of {names}"


def private_names():
    """Our file, and a name in it: what is imported from a module of these packages below their documented ones, and
    attributes with an underscore that nothing of ours defines."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "lowmem").rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {"_getframe", "_replace"}  # of Python
    for _, node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                ours.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                ours.add(name)
    for path, node in nodes:
        match node:
            case ast.Attribute(attr=name) if re.match(r"_[^_]", name) and name not in ours:
                yield path, name
            case ast.ImportFrom(module=str(module), names=names):
                package = module.split(".")[0]
                private = package in PACKAGES and module != package and module not in PUBLIC
                if "._" in module if package == "torch" else private:
                    yield from ((path, alias.name) for alias in names)


def test_every_private_name_is_listed_with_the_file_that_uses_it():
    listed = {(place, name) for _, _, file, names, places in table() for place in places for name in names}
    listed |= {(place, part) for _, _, file, _, places in table() for place in places for part in Path(file).parts}
    listed |= {(place, Path(file).stem) for _, _, file, _, places in table() for place in places}
    assert sorted(set(private_names()) - listed) == []


def test_packages_with_private_parts_have_upper_bounds():
    text = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES:
        assert re.search(rf'"{package}>=[\d.]+,<[\d.]+"', text), package


def test_deepspeed_is_imported_only_by_functions_of_zero3():
    """It is an optional dependency: everything else works without it."""
    importing = set()
    for path in (ROOT / "lowmem").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            if any(module and module.split(".")[0] == "deepspeed" for module in modules):
                assert node not in tree.body, path
                importing.add(path.name)
    assert importing == {"engine.py", "sharding.py", "zero3.py"}  # engine.py checks its configuration
