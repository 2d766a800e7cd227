"""Errors of collectives: not the traceback of a backend, but what has happened, and where to look for the cause."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lowmem.errors import RankError
from lowmem.placements.ranks import in_group

_GLOO = re.compile("/gloo/|caused pair closure")
_TOO_SLOW = re.compile(r"tim(?:ed|e)[ -]?out", re.IGNORECASE)


@contextmanager
def explained() -> Iterator[None]:
    """Raises `RankError` in place of an error of a collective, or of one that it has caused."""
    try:
        yield
    except Exception as error:
        collective = _of_collective(error) if in_group() and not isinstance(error, RankError) else None
        if collective is None:
            raise
        if _TOO_SLOW.search(collective):
            reason = "another rank did not answer in time (ddp_timeout of a trainer): it died, hangs, or is too slow"
        else:
            reason = (
                "another rank failed or exited. See the first error that the launcher shows. A rank without an error "
                "message was killed (out of memory?) or crashed"
            )
        raise RankError(f"{reason}. Fix the cause, and continue from the last checkpoint") from error


def _of_collective(error: BaseException | None) -> str | None:
    """The message of the first error of a collective in a chain of causes."""
    while error is not None:
        message = str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO.search(message)):
            return message
        error = error.__cause__ or error.__context__
    return None
