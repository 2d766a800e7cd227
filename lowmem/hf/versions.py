"""The versions of other packages with which the tests pass, and a check of those that are installed."""

import functools
import warnings
from importlib import metadata

# The oldest and the newest minor version. docs/internals/private_uses.md lists what is used of them that is private.
TESTED = {
    "torch": ("2.13", "2.15"),
    "transformers": ("5.22", "5.23"),
    "trl": ("1.15", "1.16"),
    "accelerate": ("1.14", "1.15"),
    "deepspeed": ("0.18", "0.19"),
}


@functools.cache
def check_version(package: str) -> None:
    """Warns once if the version that is installed is none of those that are tested. What has moved raises when used."""
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:  # which importing it will say
        return
    oldest, newest = TESTED[package]
    if not _minor(oldest) <= _minor(installed) <= _minor(newest):
        warnings.warn(
            f"lowmem is tested with {package} {oldest} to {newest}, and {installed} is installed. Parts of {package} "
            f"that are private may have moved: if something fails, run: pip install '{package}=={newest}.*'",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])
