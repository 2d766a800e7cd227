"""Types that pydantic checks, and what it found as sentences. YAML and JSON say of which type a value is."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError, with_config
from pydantic.config import ExtraValues
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict  # Python before 3.12 has one that pydantic refuses

from lowmem.errors import did_you_mean

STRICT = ConfigDict(extra="forbid", strict=True, use_enum_values=True)


Whole = Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)]
"""An integer, which may be written `1e3`."""


def mapping(required: Mapping[str, Any], optional: Mapping[str, Any], extra: ExtraValues = "forbid") -> Any:
    """The type of a dictionary with these keys."""
    types = {**required, **{key: NotRequired[optional[key]] for key in optional}}
    return with_config(STRICT | {"extra": extra})(TypedDict("mapping", types))  # type: ignore[operator, typeddict-item]


def within(kind: Any, valid: Callable[[Any], bool], words: str) -> Any:
    """The type of a value of this kind that is valid; `words` go on after "should be"."""

    def check(value: Any) -> Any:
        if not valid(value):
            raise PydanticCustomError("range", f"Input should be {words}")
        return value

    return Annotated[kind, AfterValidator(check)]


class Problem(NamedTuple):
    """What is wrong at one place of a value."""

    path: tuple[Any, ...]
    kind: str  # pydantic's name for the type of error
    text: str  # as in "should be a valid number or 'dynamic', found true.", or the message of a validator


def problems(error: ValidationError, value: Any) -> list[Problem]:
    """One problem for each place in `value`. A member of a union that fails deeper in it hides the other members."""
    places: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        inner, path = value, list[Any]()
        for part in details["loc"]:  # which also has the names of members of a union
            if part in (inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()):
                inner = inner[part]
                path.append(part)
        if details["type"] == "missing":
            path.append(details["loc"][-1])
        places.setdefault(tuple(path), []).append(details)
    deepest = [path for path in places if not any(len(p) > len(path) and p[: len(path)] == path for p in places)]
    return [_problem(path, places[path]) for path in deepest]


def _problem(path: tuple[Any, ...], errors: list[ErrorDetails]) -> Problem:
    if raised := [details["ctx"]["error"] for details in errors if details["type"] == "value_error"]:
        return Problem(path, "value_error", str(raised[0]))
    value, expected = errors[0]["input"], " or ".join(details["msg"].partition(" should ")[2] for details in errors)
    for words, plain in ((" or be ", " or "), (" after validation", ""), ("an object", "a mapping"), ("array", "list")):
        expected = expected.replace(words, plain)
    expected = expected.partition(", not ")[0]  # "at least 1 item, not 0": what was found follows
    found = json.dumps(value, ensure_ascii=False, default=repr)
    found = found if len(found) < 80 else f"{found[:76]} ..."
    short = isinstance(value, str) and len(value) < 100
    hint = did_you_mean(value, re.findall(r"'([^']*)'", expected)) if short else ""
    return Problem(path, errors[0]["type"], f"should {expected}, found {found}.{hint}")
