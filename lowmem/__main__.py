"""Entry point of `python -m lowmem`, also for `torchrun -m` and the DeepSpeed launcher."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from lowmem.errors import MissingPackageError


def main() -> NoReturn:
    """Runs the command line, or reports the packages that it needs."""
    try:
        import lowmem.run  # noqa: F401, first, because it says which packages are not installed
        from lowmem import cli
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # a console may not support all characters
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    cli.main()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise
        # DeepSpeed 0.19 keeps process groups until exit. If one of their gloo threads frees a tensor while the
        # interpreter shuts down, the process aborts ("terminate called without an active exception", torch 2.13). So a
        # rank exits like a multiprocessing process: it only runs registered exit functions.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
