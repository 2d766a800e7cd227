"""Imports go one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lowmem

PACKAGE = Path(lowmem.__file__).parent

# Each may import only from those above it (and, in a folder, from its own files).
LAYERS = [
    "errors",
    "files",
    "machine",
    "tensor_files",
    "rounding",
    "layout",
    "tile",
    "sweep",
    "dense",
    "rules",
    "slots",
    "placements",
    "scaling",
    "cycle",
    "clipping",
    "updates",
    "store",
    "replay",
    "choice",
    "policies",
    "readback",
    "last_step",
    "outcome",
    "saving",
    "compiling",
    "optimizer",
    "settings",
    "weights",
    "checkpoint",
    "memory",
    "sharding",
    "head",
    "trainer",
    "tokenizers",
    "records",
    "data",
    "config",
    "build",
    "planning",
    "pictures",
    "report",
    "bench",
    "cli",
    "__main__",
]
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
MODULES += sorted(path.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py"))


def layer(path):
    return path.parts[0].removesuffix(".py")


def imported_layers(path):
    """Layers that a file imports from, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("lowmem.")}
    return found & set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_come_from_above(path):
    own = layer(path)
    assert own in LAYERS, f"{path} has no place in the order of the layers"
    allowed = set(LAYERS[: LAYERS.index(own)])
    if len(path.parts) > 1:
        allowed.add(own)
    assert imported_layers(path) <= allowed


def test_the_core_needs_torch_alone():
    """`import lowmem` stays clear of what only trainers and the command line use."""
    heavy = ["transformers", "deepspeed", "trl", "datasets", "accelerate", "matplotlib"]
    code = f"import sys, lowmem; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
