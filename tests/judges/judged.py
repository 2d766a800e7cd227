"""Runs cases of a judge and reports their verdicts.

A judge compares this package with the plain computation on third-party cases. A verdict is `equal` (bitwise, unless the
judge says otherwise), `refused` (an error before the first update, with its reason) or `different`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from lowmem.errors import LowmemError

EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"


def judge(compare: Callable[[], bool]) -> tuple[str, str]:
    """Returns the verdict on one case and the reason for an error. `compare` returns whether both results are equal."""
    try:
        return (EQUAL if compare() else DIFFERENT), ""
    except LowmemError as error:
        return REFUSED, str(error)


def report(name: str, verdicts: Mapping[str, tuple[str, str]], at_least: int) -> None:
    """Prints the verdicts of a judge. Fails if any case differs or if fewer than `at_least` cases are equal."""
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
    """Fails if training in this context raises LowmemError after it has changed a weight of `model`."""
    before = [param.detach().clone() for param in model.parameters()]
    try:
        yield
    except LowmemError as error:
        moved = [
            name for (name, param), old in zip(model.named_parameters(), before, strict=True) if not param.equal(old)
        ]
        assert not moved, f"refused after {moved} had moved: {error}"
        raise
