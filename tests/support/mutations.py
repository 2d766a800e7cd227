"""Mutations of values and of texts, by which `tests/fuzz` makes damaged inputs from valid ones."""

import copy
import random
from typing import Any

NUMBERS = [0, -1, 1, 2, 3, 7, 0.5, -0.5, 1.5, 1e-30, 1e30, 1e9, 2**31, 2**32, 2**63, -(2**63), 10**30, True, False]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
STRINGS = ["", " ", "no", "yes", "none", "auto", "nope", "1", "1e-3", "-1", "true", "null", "~", ".nan", "a" * 5000]
STRINGS += ["ü", "\u202e", "\U0001f600", "\x07", "\x1b[31m", "a\nb", "a\tb", "../..", "/", ".", "{}", "[]", "%s", "{0}"]
PLAUSIBLE = [0, 1, 2, 3, -1, 0.5, 1e-8, 1.0, True, False, None, "no", "steps", "epoch", "best", "auto", "all", "none"]
PLAUSIBLE += ["cosine", "constant", "random", "eager", "gelu", "bfloat16", {}, [], "text.jsonl", "loss", 16, 1000]
OTHERS = [None, [], {}, [None], [[]], {"": 1}, {"a": {"b": {"c": 1}}}, [1, "a", None], list(range(1000))]


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below this one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in ((*prefix, key), *paths(item, (*prefix, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def any_value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, STRINGS, OTHERS))))


def misspelt(rng: random.Random, word: str) -> str:
    """A word with one letter deleted, doubled, changed, or swapped with the next."""
    if len(word) < 2:
        return word + "x"
    n = rng.randrange(len(word) - 1)
    changes = (word[n + 1 :], word[n] * 2 + word[n + 1 :], "x" + word[n + 1 :], word[n + 1] + word[n] + word[n + 2 :])
    return word[:n] + rng.choice(changes)


def mutate(rng: random.Random, value: Any, known: dict[tuple[Any, ...], list[str]] | None = None) -> Any:
    """A copy of a mapping with one thing changed somewhere in it. `known` has keys that could be added, by section."""
    value = copy.deepcopy(value)
    path = rng.choice(paths(value))
    parent, key, old = at(value, path[:-1]), path[-1], at(value, path)
    kind = rng.choice(("value", "value", "number", "delete", "swap", "retype", "misspell", "add", "add", "add"))
    if kind == "value":
        parent[key] = any_value(rng)
    elif kind == "number":
        parent[key] = rng.choice(NUMBERS)
    elif kind == "delete":
        del parent[key]
    elif kind == "swap":
        other = rng.choice(paths(value))
        parent[key] = copy.deepcopy(at(value, other))
    elif kind == "retype":
        parent[key] = rng.choice((str(old), [old], {"value": old}, not old))
    elif kind == "misspell" and isinstance(key, str):
        parent[misspelt(rng, key)] = parent.pop(key)
    elif known:
        section = rng.choice(list(known))
        try:
            target = at(value, section)
            target[rng.choice(known[section])] = any_value(rng)
        except (KeyError, TypeError, IndexError):
            pass  # an earlier mutation has removed the section
    return value


def damage(rng: random.Random, data: bytes) -> bytes:
    """A copy of a text with some of its bytes deleted, repeated, flipped, moved or replaced."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        begin = rng.randrange(len(data) + 1)
        end = min(len(data), begin + rng.choice((1, 1, 2, 8, 64)))
        kind = rng.choice(("delete", "repeat", "flip", "insert", "insert", "cut", "move"))
        if kind == "delete":
            del data[begin:end]
        elif kind == "repeat":
            data[begin:begin] = data[begin:end] * rng.choice((1, 2, 50))
        elif kind == "flip" and begin < len(data):
            data[begin] ^= 1 << rng.randrange(8)
        elif kind == "insert":
            data[begin:begin] = rng.choice(TOKENS)
        elif kind == "cut" and rng.random() < 0.3:
            del data[begin:]
        elif kind == "move":
            moved = data[begin:end]
            del data[begin:end]
            place = rng.randrange(len(data) + 1)
            data[place:place] = moved
    return bytes(data)


# What has a meaning in YAML or JSON, or for a reader of text.
TOKENS = [b":", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"<<: *a\n", b"!!int ", b"!!float ", b"!!binary ", b"? "]
TOKENS += [
    b"!!python/object:os.system ",
    b"|\n",
    b">\n",
    b"\t",
    b"\r",
    b"\r\n",
    b"\n",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"#",
]
TOKENS += [b"'", b'"', b"%YAML 1.1\n---\n", b"---\n", b"...\n", b"~", b".nan", b".inf", b"0x1", b"1e999", b"9" * 5000]
TOKENS += [
    b"[" * 3000,
    b"{a: " * 500,
    b"\xe2\x80\xae",
    b"!!set ",
    b"!!timestamp ",
    b"!a ",
    b"@",
    b"`",
    b"1_000",
    b"0o7",
]
