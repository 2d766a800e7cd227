"""Tests the built and installed packages, their imports, and `lowmem --version`."""

import platform
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(folder, *arguments):
    process = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()


def test_the_packages_have_all_modules_and_their_types(tmp_path):
    """The wheel is built from the contents of the source distribution, as `python -m build` does."""
    pytest.importorskip("setuptools", "77")
    source = tmp_path / "clone"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("lowmem", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    python(source, "-c", "from setuptools.build_meta import build_sdist; build_sdist('..')")
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"CHANGELOG.md", "LICENSE"} <= {path.name for path in unpacked.iterdir()}
    assert not (unpacked / "tests").exists()
    python(unpacked, "-c", "from setuptools.build_meta import build_wheel; build_wheel('../..')")
    (wheel,) = tmp_path.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lowmem").rglob("*.py")}
    assert files == modules | {"lowmem/py.typed"}


# Of the installed packages, only torch and its requirements can be imported.
ALONE = """
import re, sys
from importlib import metadata
from importlib.machinery import PathFinder

def closure(package):
    yield package.lower().replace("_", "-")
    for requirement in metadata.requires(package) or ():
        if ";" not in requirement:
            yield from closure(re.match(r"[a-zA-Z0-9_-]+", requirement)[0])

NEEDED = {*closure("torch"), "lowmem"}
OTHERS = {module for module, packages in metadata.packages_distributions().items()
          if NEEDED.isdisjoint(package.lower().replace("_", "-") for package in packages)}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in OTHERS else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
import torch, lowmem

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).bfloat16()
for rule in (*(info.name for info in lowmem.rules.table()), torch.optim.AdamW):
    opt = lowmem.FusedOptimizer(model.named_parameters(), rule=rule, lr=1e-3, policy="deferred", clip_norm=1.0)
    for _ in range(2):
        opt.backward(model(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().mean())
        opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.load_named_state_dict(opt.named_state_dict())
    opt.remove()
lowmem.dequantize_(lowmem.quantize_(model, "int12"))
assert {"numpy", "safetensors", "transformers"} <= OTHERS
"""

# As after `pip install --no-deps lowmem` beside torch: features that need other packages name them.
DOORS = """
import runpy
from importlib import import_module

HF = "Run: pip install transformers accelerate datasets"
RUN = HF + " trl rich matplotlib"
for name, line in (("trainer", HF), ("hf.weights", HF), ("run.report", RUN)):
    try:
        import_module(f"lowmem.{name}")
    except ImportError as error:
        assert isinstance(error, lowmem.LowmemError) and str(error).endswith(line), (name, error)
    else:
        raise AssertionError(name)
sys.argv = ["lowmem", "sft"]
runpy.run_module("lowmem", run_name="__main__", alter_sys=True)
"""


def test_the_optimizer_needs_only_torch_and_other_imports_name_missing_packages(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", ALONE + DOORS]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: the command line needs packages that are not installed.")


def test_version_names_what_a_report_needs(tmp_path):
    lines = python(tmp_path, "-m", "lowmem", "--version").splitlines()
    versions = dict(line.split(" ", 1) for line in lines)
    assert list(versions)[:3] == ["lowmem", "python", "torch"] and list(versions)[-1] == "system"
    assert f'\nversion = "{versions["lowmem"]}"\n' in (ROOT / "pyproject.toml").read_text()
    assert versions["torch"] == metadata.version("torch") and versions["python"] == platform.python_version()
    assert {"transformers", "trl", "accelerate", "datasets", "deepspeed"} <= set(versions)
