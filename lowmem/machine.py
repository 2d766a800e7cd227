"""What a measurement was made on: the processor's name, versions of packages."""

import platform
import re
from importlib import metadata
from pathlib import Path


def cpu() -> str:
    """The processor, as it calls itself."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Of a package as pip names it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
