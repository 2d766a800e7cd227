"""Overrides of the command line: mutated words after a valid configuration."""

import contextlib
import random
from pathlib import Path

from mutations import any_value, misspelt
from runs import KNOWN, LONGEST, SMALL, samples, text_of

from lowmem.errors import LowmemError
from lowmem.run import build
from lowmem.run.config import SYNONYMS, load, save

VALID = ["trainer.max_steps=10", "optimizer.lr=1e-3", "model.config.hidden_size=32", "data.columns.text=body", "seed=3"]
VALID += ["trainer={save_steps: 5}", "optimizer.groups=[{match: norm, lr: 1}]", "model.dtype=bfloat16", "trainer.bf16="]
VALUES = [
    "",
    " ",
    "1",
    "-1",
    "0",
    "1e400",
    "nan",
    ".nan",
    ".inf",
    "null",
    "[",
    "{",
    "*a",
    "&a [*a]",
    "!!int x",
    "a: b: c",
]
VALUES += [
    "[" * 2000,
    "9" * 6000,
    "x" * 6000,
    "\x00",
    "\ud800",
    "a\nb: 1",
    "---\na\n---\nb",
    "{<<: 1}",
    "{1: 2}",
    "é",
    "no",
]
SECRET = "correcthorsebatterystaple"
SECRETS = [f"trainer.hub_token={SECRET}", f"data.path=https://a:{SECRET}@b/c", f"trainer.x.api_key={SECRET}"]
SECRETS += [f"password={SECRET}", f"trainer.run_name=hf_{SECRET}", f"model={{path: x, secret: {SECRET}}}"]


def run(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    path = folder / "run.yaml"
    path.write_text(text_of(rng.choice(SMALL)), encoding="utf-8")
    overrides = [override(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
    try:
        with contextlib.chdir(folder):
            config = load(path, overrides)
            save(config, folder / "saved.yaml")
            assert load(folder / "saved.yaml") == config, f"{overrides}: what is saved reads back different"
            assert SECRET not in (folder / "saved.yaml").read_text()
            build.arguments(config, samples(bool(config.data.eval_path or config.data.eval_fraction)))
    except LowmemError as error:
        message = str(error)
        assert 0 < len(message) <= LONGEST, f"{overrides}: {len(message)} characters: {message[:LONGEST]}"
        assert SECRET not in message, f"{overrides}: {message}"
        return type(error).__name__
    return "accepted"


def override(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(SECRETS)
    if kind == 1:  # a key that exists, with any value
        section = rng.choice(list(KNOWN))
        return f"{'.'.join((*section, rng.choice(KNOWN[section])))}={rng.choice(VALUES)}"
    if kind == 2:
        section = rng.choice(["", "trainer.", "optimizer.", "data.", "model.", "model.config."])
        return f"{section}{rng.choice(list(SYNONYMS))}={any_value(rng)}"
    word = rng.choice(VALID)
    key, _, value = word.partition("=")
    if kind == 3:
        return f"{misspelt(rng, key)}={value}"
    if kind == 4:
        return f"{key}.{rng.choice(['', 'x', '0', 'a.b', 'é', ' '])}={value}"
    begin = rng.randrange(len(word))
    return word[:begin] + rng.choice(VALUES) + word[begin + rng.randrange(3) :]
