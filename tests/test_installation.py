"""What pyproject.toml says to setuptools and ruff, where folders have the names of modules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(folder, *arguments):
    process = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()


def test_an_editable_install_is_imported_next_to_its_clone(tmp_path):
    """There the folder `lowmem` is the clone, which without `__init__.py` would be an empty namespace package."""
    pytest.importorskip("setuptools", "77")
    package = tmp_path / "lowmem" / "lowmem"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "lowmem")
    python(tmp_path / "lowmem", "-c", "from setuptools.build_meta import build_editable; build_editable('..')")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site-packages")
    load = "import site; site.addsitedir('site-packages'); import lowmem; print(lowmem.__file__)"
    assert python(tmp_path, "-ES", "-c", load) == str(package / "__init__.py")


def test_imports_are_sorted_alike_whatever_folders_there_are(tmp_path):
    """The quickstart creates `data` and `runs`, and `tests/runs.py` is imported by its name."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    helpers = list((ROOT / "tests").glob("*.py"))
    for path in helpers:
        shutil.copy(path, tmp_path / "tests")
    for name in ("lowmem", "benchmarks", "scripts", *(path.stem for path in helpers)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    python(tmp_path, "-m", "ruff", "check", "--no-cache", "--select", "I", ".")
