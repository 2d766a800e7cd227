"""Damaged checkpoints: each damage is named and the checkpoint before is used."""

import functools
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments, logging

from lowmem.hf import checkpoint
from lowmem.trainer import FusedTrainer
from scripts.make_model import train_tokenizer

LONGEST = 2000
EXTREMES = [None, True, 0, -1, 3, 2**31, 2**63, -(10**30), 0.5, 1e308, float("nan"), "", "3", "\0", "é" * 300, [], {}]
EXTREMES += [[None], [[]], {"": 1}, {"args": 1}]


@functools.cache
def _tokenizer() -> Any:
    return train_tokenizer(["the old cat sat"], 270)


def _trainer(folder: Path, steps: int, save: bool = False) -> FusedTrainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(_tokenizer()), attention_dropout=0.2))
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1, logging_steps=2, report_to="none",
        disable_tqdm=True, save_strategy="steps" if save else "no", save_steps=1, dataloader_pin_memory=False,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    ids = [[n, n + 1, n + 2, n + 3] for n in range(8)]
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = FusedTrainer(model=model, args=args, train_dataset=data, processing_class=_tokenizer())
    trainer.remove_callback(PrinterCallback)
    return trainer


@functools.cache
def _original() -> tuple[Path, list[torch.Tensor]]:
    """A run directory with two checkpoints, and the weights of a run that is resumed from the second."""
    logging.set_verbosity_error()
    folder = Path(tempfile.mkdtemp(prefix="lowmem-fuzz-")) / "run"
    _trainer(folder, 2, save=True).train()
    return folder, _resumed(folder, folder / "checkpoint-2")


def _resumed(folder: Path, last: Path) -> list[torch.Tensor]:
    trainer = _trainer(folder, 3)
    trainer.train(resume_from_checkpoint=str(last))
    return [param.detach().clone() for param in trainer.model.parameters()]


def run(seed: int, folder: Path) -> str:
    """Damages one to three files of the newest checkpoint, looks for the last one, and resumes from it."""
    chance = random.Random(seed)
    original, weights = _original()
    home = shutil.copytree(original, folder / "run")
    newest = home / "checkpoint-2"
    chosen = chance.sample(sorted(path.name for path in newest.iterdir()), chance.choice([1, 1, 1, 2, 3]))
    for name in chosen:
        _damage(chance, newest / name)
    last, reasons = checkpoint.find_last(home)  # an error is a defect: the first checkpoint is intact
    if last != newest:
        if len(reasons) != 1 or len(reasons[0]) > LONGEST or "checkpoint-2" not in reasons[0]:
            raise AssertionError(f"the damage is not named: {reasons}")
        return "CheckpointError"
    if not all(map(torch.equal, _resumed(home, newest), weights)):
        raise AssertionError(f"{chosen} were damaged, and the run went on with other weights")
    return "accepted"


def _damage(chance: random.Random, path: Path) -> None:
    structured: list[Callable[[random.Random, Path], None]] = []
    match path.suffix:
        case ".json":
            structured = [_damage_json] * 4
        case ".pt" | ".pth":
            structured = [_damage_torch] * 4
        case ".safetensors":
            structured = [_damage_header] * 4
    chance.choice([_damage_bytes, _damage_bytes, _damage_bytes, _damage_entry, *structured])(chance, path)


def _damage_bytes(chance: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content) + 1)
    end = min(len(content), start + chance.choice([1, 8, 512, 4096]))
    match chance.randrange(8):
        case 0:
            del content[start:]
        case 1:
            del content[start:end]
        case 2:
            content[start:end] = bytes(end - start)
        case 3:
            content[start:start] = chance.randbytes(8)
        case 4:
            content += content[:end]
        case 5:
            content = bytearray()
        case 6:
            content = bytearray(chance.randbytes(chance.choice([1, 100, 5000])))
        case _:
            for _ in range(chance.choice([1, 1, 5])):
                if content:
                    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _damage_entry(chance: random.Random, path: Path) -> None:
    """The file is gone, is another file, a directory or a link."""
    other = chance.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
    content = other.read_bytes()
    path.unlink()
    match chance.randrange(5):
        case 0:
            path.write_bytes(content)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path.parent.parent / "checkpoint-1" / path.name)
        case 3:
            path.symlink_to(path.name)  # to itself
        case _:
            pass


def _damage_json(chance: random.Random, path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(_mutated(chance, content)), encoding="utf-8")


def _damage_torch(chance: random.Random, path: Path) -> None:
    torch.save(_mutated(chance, torch.load(path, weights_only=False)), path)


def _damage_header(chance: random.Random, path: Path) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if "lowmem" in metadata and chance.random() < 0.7:
        metadata["lowmem"] = json.dumps(_mutated(chance, json.loads(metadata["lowmem"])))
    else:
        header = _mutated(chance, header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _mutated(chance: random.Random, value: Any) -> Any:
    """A copy with one value somewhere inside deleted, copied, renamed or replaced."""
    inner = isinstance(value, dict | list | tuple) and len(value) > 0
    if not inner or chance.random() < 0.15:
        return _replaced(chance, value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, way = chance.choice(keys), chance.randrange(8)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if way == 0:
        del copy[key]
    elif way == 1 and isinstance(copy, dict):
        copy[chance.choice(["", "other", "step", "__class__"])] = copy.pop(key)
    elif way == 1:
        copy.insert(key, copy[key])
    else:
        copy[key] = _mutated(chance, copy[key])
    return tuple(copy) if isinstance(value, tuple) else copy


def _replaced(chance: random.Random, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and chance.random() < 0.5:
        return chance.choice([value[:1], value.double(), value[None], torch.zeros_like(value)])
    if isinstance(value, int | float) and chance.random() < 0.5:
        return chance.choice([value + 1, -value, value * 1000])
    return chance.choice(EXTREMES)
