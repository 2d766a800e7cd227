"""docs/internals/private_uses.csv lists every private name of other packages that lowmem uses. All of them exist."""

import ast
import csv
import functools
import importlib.util
import re
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from lowmem import hf

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(hf.TESTED)
# Modules whose names are documented
PUBLIC = {
    "accelerate.utils", "datasets.fingerprint", "transformers.image_utils", "transformers.integrations.deepspeed",
    "transformers.trainer_utils", "transformers.utils",
}  # fmt: skip
# Operators that torch lists in https://docs.pytorch.org/docs/stable/torch.compiler_ir.html
CORE_ATEN = {"_local_scalar_dense", "_to_copy"}

# Names that some supported versions lack. Code checks whether they exist before it uses them.
OPTIONAL = {
    "_fsdp_orig_uid", "_init_training_state", "revert_weight_conversion", "_weight_conversions", "was_used",
    "num_experts", "_materialize_copy",
}  # fmt: skip


def table():
    """Yields the package, the file in the package, the names in it, and the files of lowmem that use them."""
    lines = (ROOT / "docs" / "internals" / "private_uses.csv").read_text().splitlines()
    for row in csv.DictReader(lines):
        yield row["package"], row["file"], row["names"].split(), row["used in"].split()


@functools.cache
def identifiers(path):
    """Returns all identifiers and strings in a Python file. Some attributes are read by getattr."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
            case ast.alias(asname=str(name)) | ast.alias(name=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return names


def is_newest(package):
    """Returns whether the installed version should have every name in the table."""
    return minor(metadata.version(package)) >= minor(hf.TESTED[package][1])


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row[0]}-{Path(row[1]).stem}")
def test_every_listed_name_exists(row):
    package, file, names, places = row
    path = Path(importlib.util.find_spec(package).origin).parent / file
    if OPTIONAL.isdisjoint(names) or path.exists():
        needed = {*names} if path.exists() and is_newest(package) else {*names} - OPTIONAL
        assert needed <= identifiers(path), f"{path} does not have {needed - identifiers(path)}"
    for name in names:
        assert any(name in identifiers(ROOT / place) for place in places), f"none of {places} uses {name}"
    for place in places:
        assert not set(names).isdisjoint(identifiers(ROOT / place)), f"{place} uses none of {names}"


def private_names():
    """Yields (file of lowmem, name) for names imported from undocumented modules of these packages, and for attributes
    with a leading underscore that lowmem does not define."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "lowmem").rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {"_getframe", "_replace", "_asdict", "_actions", "_get_values", "_option_string_actions"}  # Python's
    ours |= {"_exit", "_run_exitfuncs", "_shutdown"}  # used by multiprocessing, too, to end a process
    ours |= CORE_ATEN
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
    listed = {(place, name) for _, file, names, places in table() for place in places for name in names}
    listed |= {(place, part) for _, file, _, places in table() for place in places for part in Path(file).parts}
    listed |= {(place, Path(file).stem) for _, file, _, places in table() for place in places}
    assert sorted(set(private_names()) - listed) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_oldest_tested_version_is_the_oldest_that_is_required(package):
    oldest, newest = hf.TESTED[package]
    assert f'"{package}>={oldest},<{minor(newest)[0] + 1}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.24.0", "trl>=1.0"), ("1.17.0", "trl==1.16.*"), ("1.0.0", ""), ("1.16.3.dev0+local", ""), ("1.16rc1", "")],
)
def test_untested_versions_warn_once(version, line, monkeypatch):
    """Patch releases of tested versions count as tested."""
    monkeypatch.setattr(metadata, "version", lambda _: version)
    hf.check_version.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            hf.check_version("trl")
    hf.check_version.cache_clear()
    assert len(warned) == bool(line)
    for warning in warned:
        assert f"tested with trl 1.0 to 1.16, and {version} is installed" in str(warning.message)
        assert f"'{line}'" in str(warning.message)
