"""Finds credentials in a configuration, which is copied into the run folder, and blanks them in messages."""

import os
import re
from collections.abc import Iterable
from typing import Any

_BLANK = "***"

# The last part of a name shows that its value is secret: `hub_token`, `WANDB_API_KEY`, `aws-secret`, not `eos_token`.
_SPECIAL = "bos|eos|pad|unk|sep|cls|mask|stop|image|audio|video|special|system|user|assistant|end|max|new|num"
_NAME = (
    rf"(?<![\w-])(?!(?:[\w-]*[_-])?(?:{_SPECIAL})[_-]?tokens?\b)"
    r"(?:[\w-]*[_-])?(?:\w*(?:secret|password|passwd|credentials?)|(?:access|api|auth|hf|hub|private|secret)?[_-]?tokens?"
    r"|(?:access|api|auth|private|secret)[_-]?keys?|passphrase)(?![A-Za-z0-9])"
)
_KEY = re.compile(_NAME, re.IGNORECASE)
# Tokens of known services, and user and password in a URL.
_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,})|(?<=\w://)[^/\s@'\"]+(?=@)"
)
_SHORTEST = 8  # minimum length of blanked values; shorter words may occur by chance
_ASSIGNED = re.compile(rf"({_NAME}[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;}}\])\"']+)", re.IGNORECASE)

# Other values to blank.
_HIDDEN: set[str] = set()


def hide(values: Iterable[str]) -> None:
    """Blanks these values from now on, except short ones."""
    _HIDDEN.update(value for value in values if len(value) >= _SHORTEST)


def redacted(text: str) -> str:
    """Replaces credentials in a text by `***`: the values of keys such as `hub_token` and `api_key` in `key=value` and
    `key: value`, tokens of known services, user and password in URLs, the values of environment variables such as
    `WANDB_API_KEY`, and hidden values.
    """
    for value in (*_environment(), *_HIDDEN):
        text = text.replace(value, _BLANK)
    return _ASSIGNED.sub(lambda match: match[1] + _BLANK, _VALUE.sub(_BLANK, text))


def is_secret(name: str, value: Any) -> bool:
    """Returns whether a value of a configuration, or an item in it, is a credential, judging by its name or content."""
    if isinstance(value, dict):  # an item is named by its key, and by the keys around it
        secret = _KEY.fullmatch(name[-100:])
        return any(is_secret(name if secret else str(key), item) for key, item in value.items())
    if isinstance(value, list):
        return any(is_secret(name, item) for item in value)
    if not isinstance(value, str) or not value:
        return False
    known = any(part in value for part in _environment())
    return known or bool(_VALUE.search(value) or _KEY.fullmatch(name[-100:]))


def _environment() -> list[str]:
    return [value for name, value in os.environ.items() if len(value) >= _SHORTEST and _KEY.fullmatch(name)]
