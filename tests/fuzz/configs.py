"""Configurations: mutated values, damaged texts, and what a run makes of them."""

import contextlib
import copy
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutations import PLAUSIBLE, at, damage, mutate
from runs import CONFIGS, KNOWN, LONGEST, SMALL, VALID, samples, text_of, train, write_data

from lowmem.errors import LowmemError
from lowmem.run import build
from lowmem.run.config import RunConfig, load, save

# What would take long or reach out of the folder, and is nonsense to nobody.
SLOW = ("dataloader_num_workers", "workers", "torch_compile", "push_to_hub", "use_liger_kernel", "report_to")


def run(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    path = folder / "run.yaml"
    if seed % 20 == 0:
        written = _varied(rng) if rng.random() < 0.8 else _mutated(rng, SMALL)
        write_data(folder)
        for name in SLOW:
            for section in written.values():
                if isinstance(section, dict):
                    section.pop(name, None)
        if isinstance(written.get("trainer"), dict) and written["trainer"].get("max_steps") in (-1, 1000):
            written["trainer"]["num_train_epochs"] = 1
        path.write_text(text_of(written), encoding="utf-8")
        status, _ = train(folder, path)
        return "accepted" if status == 0 else "LowmemError"
    written = None
    if rng.random() < 0.3:
        texts = [text_of(config).encode() for config in SMALL] + [config.read_bytes() for config in CONFIGS]
        path.write_bytes(damage(rng, rng.choice(texts)))
    else:
        written = _mutated(rng, VALID)
        path.write_text(text_of(written), encoding="utf-8")
    try:
        with contextlib.chdir(folder):
            return check(path, written, folder)
    except LowmemError as error:
        assert 0 < len(str(error)) <= LONGEST, f"{len(str(error))} characters: {str(error)[:LONGEST]}"
        return type(error).__name__


def check(path: Path, written: Any, folder: Path) -> str:
    config = load(path)
    save(config, folder / "saved.yaml")
    assert same(config, load(folder / "saved.yaml")), "what is saved reads back different"
    if written is not None:
        assert means(written, merged(config)), f"{written} was read as {merged(config)}"
    args = build.arguments(config, samples(bool(config.data.eval_path or config.data.eval_fraction)))
    for name, value in config.trainer.items():
        if isinstance(value, bool | int | float):
            assert getattr(args, name) == value, f"trainer.{name}={value!r} became {getattr(args, name)!r}"
    return "accepted"


def _mutated(rng: random.Random, valid: list[Any]) -> Any:
    config = rng.choice(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        config = mutate(rng, config, KNOWN) if config else config
    return config


def _varied(rng: random.Random) -> Any:
    """A small run with values that may be allowed for some of its keys."""
    config = copy.deepcopy(rng.choice(SMALL))
    for _ in range(rng.choice((1, 1, 2, 3))):
        section = rng.choice([key for key in KNOWN if key] + [("trainer",)] * 5)
        at(config, section)[rng.choice(KNOWN[section])] = copy.deepcopy(rng.choice(PLAUSIBLE))
    return config


def merged(config: RunConfig) -> dict[str, Any]:
    """A configuration with the hyperparameters where they are written."""
    values = asdict(config)
    return values | {"optimizer": values["optimizer"] | values["optimizer"]["hyper"]}


def same(one: RunConfig, other: RunConfig) -> bool:
    return means(asdict(one), asdict(other)) and means(asdict(other), asdict(one))


def means(written: Any, read: Any) -> bool:
    """Whether everything that is written was read as it is written."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(name in read and means(value, read[name]) for name, value in written.items())
    if isinstance(written, list | tuple) and isinstance(read, list | tuple):
        return len(written) == len(read) and all(map(means, written, read))
    if isinstance(written, bool) or isinstance(read, bool):
        return written is read
    return written == read or (written != written and read != read)
