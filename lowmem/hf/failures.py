"""Names the rank that ended a collective, because it failed, died or was too slow, instead of a backend's traceback."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lowmem.errors import RankError
from lowmem.placements.ranks import in_group

# Seconds in which the other ranks say that they are still there, and in which the store has to answer.
_GRACE = 3.0

# Of each rank that has failed, in the store of the default process group: its message, or nothing while the rank only
# knows that a collective failed, or with this mark what it has found out about that.
_KEY = "lowmem/failed/{}"
_FOUND = "found: "

_GLOO = re.compile("/gloo/|caused pair closure")
_TIMEOUT = re.compile(r"(?:[Tt]imed out waiting |Timeout\(ms\)=|timeout after )(\d+)")
_TOO_SLOW = re.compile(r"tim(?:ed|e)[ -]?out", re.IGNORECASE)


@contextmanager
def explained() -> Iterator[None]:
    """Raises `RankError` in place of an error of a collective, and tells the other ranks of every other error."""
    try:
        yield
    except Exception as error:
        if (reason := explain(error)) is not None:
            raise reason from error
        raise


def explain(error: BaseException) -> RankError | None:
    """The rank that ended a collective, if that is what `error`, or what caused it, is of.

    Every rank tells the others of its error: one that failed by itself is named with its message.
    """
    if not in_group() or isinstance(error, RankError):
        return None
    collective = _of_collective(error)
    if collective is None:
        line = str(error).strip().partition("\n")[0]
        line = line if len(line) <= 200 else f"{line[:197]}..."
        _within_grace(_tell, f"{type(error).__name__}: {line}")
        return None
    seconds = _TIMEOUT.search(collective)
    others: dict[int, str | None] = {}
    answered = _within_grace(_ask, others)
    if answered:
        reason = _reason(others, collective, seconds and int(seconds[1]) / 1000)
        _within_grace(_tell, _FOUND + reason)
    else:
        reason = "the process with the store of the process group (mostly rank 0) has ended or does not answer"
    return RankError(f"{reason}. Continue from the last checkpoint once the cause is removed")


def _reason(others: dict[int, str | None], collective: str, seconds: float | None) -> str:
    told = {rank: message for rank, message in others.items() if message}
    for rank, message in told.items():
        if not message.startswith(_FOUND):
            return f"rank {rank} failed: {message}"
    for message in told.values():
        return message.removeprefix(_FOUND)
    if silent := [rank for rank, message in others.items() if message is None]:
        ranks = "rank" if len(silent) == 1 else "ranks"
        names = f"{ranks} {', '.join(map(str, silent[:8]))}{' ...' if len(silent) > 8 else ''}"
        if not _TOO_SLOW.search(collective):
            return f"{names} ended without a message: killed (out of memory?), or crashed"
        within = "in time" if seconds is None else f"within {seconds:g} seconds"
        return f"{names} did not answer {within} (ddp_timeout of a trainer): dead, hanging, or too slow"
    return f"the ranks lost their connection, and all of them are there: {collective.strip().splitlines()[0][:300]}"


def _of_collective(error: BaseException | None) -> str | None:
    """The message of the first error of a collective in a chain of causes."""
    while error is not None:
        message = str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO.search(message)):
            return message
        error = error.__cause__ or error.__context__
    return None


def _tell(message: str) -> None:
    dist.distributed_c10d._get_default_store().set(_KEY.format(dist.get_rank()), message)


def _ask(others: dict[int, str | None]) -> None:
    """Collects what the other ranks tell; None of one that tells nothing."""
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + _GRACE
    _tell("")
    others |= {rank: None for rank in range(dist.get_world_size()) if rank != dist.get_rank()}
    while True:
        for rank, message in others.items():
            if not message and store.check([_KEY.format(rank)]):
                others[rank] = store.get(_KEY.format(rank)).decode()
        if any(others.values()) or None not in others.values() or time.monotonic() > end:
            return
        time.sleep(0.05)


def _within_grace(function: Callable[..., None], *args: Any) -> bool:
    """Returns whether a function that talks to the store returned: the process with the store may be gone, or hang."""
    returned = []

    def call() -> None:
        try:
            function(*args)
            returned.append(True)
        except RuntimeError:  # the store is gone
            pass

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(2 * _GRACE)
    return bool(returned)
