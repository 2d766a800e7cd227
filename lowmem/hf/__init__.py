"""The parts of the package that work inside Hugging Face libraries, of which some versions are known to work."""

import functools
import warnings
from importlib import metadata

from lowmem.errors import LowmemError

# Minor versions, oldest first. docs/internals/private_uses.md lists the private parts of these packages that are used.
TESTED = {
    "torch": ("2.13", "2.15"),
    "transformers": ("5.22", "5.23"),
    "trl": ("1.15", "1.16"),
    "accelerate": ("1.14", "1.15"),
    "deepspeed": ("0.18", "0.19"),
}


@functools.cache
def check_version(package: str) -> None:
    """Warns once if an installed package is newer than the versions that are tested.

    Raises:
        LowmemError: it is older.
    """
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:  # which importing it will say
        return
    tested = TESTED[package]
    known = f"{package} {installed}; the versions that are tested are {', '.join(tested)}"
    if _minor(installed) < _minor(tested[0]):
        raise LowmemError(f"lowmem does not work with {known}. Run: pip install '{package}>={tested[0]}'")
    if _minor(installed) > _minor(tested[-1]):
        warnings.warn(
            f"lowmem is not tested with {known}. It uses private parts of {package}, which may have moved. If something"
            f" fails, run: pip install '{package}=={tested[-1]}.*'",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


# before anything private of them is imported
for _package in ("torch", "transformers", "trl", "accelerate"):
    check_version(_package)
