"""Integrates lowmem with Hugging Face libraries, and checks that their versions are tested."""

import functools
import warnings
from importlib import metadata

from lowmem.errors import require_packages

# The oldest and the newest tested minor version (docs/reference/limits.md). docs/reference/tested.md lists failures.
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.6", "5.24"),
    "trl": ("1.0", "1.16"),
    "accelerate": ("1.8", "1.15"),
    "datasets": ("4.7", "5.2"),
    "deepspeed": ("0.16", "0.19"),
}


def version(package: str) -> str | None:
    """Returns the installed version of a package, or None. package: its name in pip."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def check_version(package: str) -> None:
    """Warns once if the installed version of a package is older or newer than the tested versions."""
    installed, (oldest, newest) = version(package), TESTED[package]
    if installed is None:
        return
    from packaging.version import Version  # transformers requires it

    minor, first, last = (Version(number).release[:2] for number in (installed, oldest, newest))
    if not first <= minor <= last:
        known = f">={oldest}" if minor < first else f"=={newest}.*"
        warnings.warn(
            f"lowmem is tested with {package} {oldest} to {newest}, and {installed} is installed. If something fails, "
            f"run: pip install '{package}{known}'",
            stacklevel=3,
        )


require_packages("lowmem.trainer", "transformers", "accelerate", "datasets")
for _package in ("torch", "transformers", "trl", "accelerate", "datasets"):
    check_version(_package)
