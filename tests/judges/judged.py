"""The verdicts of a judge, and how many cases are known to be equal.

A judge compares this package with the plain computation on a corpus that others wrote. Each case ends `equal` (to the
last bit, unless the judge says otherwise), `refused` (before the first update, with a reason) or `different`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from lowmem.errors import LowmemError

EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"


def judge(compare: Callable[[], bool]) -> tuple[str, str]:
    """The verdict on one case, and the reason for a refusal. `compare` returns whether both are equal."""
    try:
        return (EQUAL if compare() else DIFFERENT), ""
    except LowmemError as error:
        return REFUSED, str(error)


def report(name: str, verdicts: Mapping[str, tuple[str, str]], at_least: int) -> None:
    """Prints the verdicts of a judge, and fails on a difference or on fewer that are equal than recorded."""
    found = {
        kind: [case for case, (verdict, _) in verdicts.items() if verdict == kind]
        for kind in (EQUAL, REFUSED, DIFFERENT)
    }
    print(f"\n{name}: " + ", ".join(f"{len(cases)} {kind}" for kind, cases in found.items()))
    for case in found[REFUSED]:
        print(f"  {case}: {verdicts[case][1]}")
    assert not found[DIFFERENT], f"{name}: different: {found[DIFFERENT]}"
    assert len(found[EQUAL]) >= at_least, f"{name}: only {len(found[EQUAL])} equal, {at_least} were"


@contextmanager
def untouched_if_refused(model: nn.Module) -> Iterator[None]:
    """Fails if training inside is refused after it has moved a weight of `model`."""
    before = [param.detach().clone() for param in model.parameters()]
    try:
        yield
    except LowmemError as error:
        moved = [
            name for (name, param), old in zip(model.named_parameters(), before, strict=True) if not param.equal(old)
        ]
        assert not moved, f"refused after {moved} had moved: {error}"
        raise
