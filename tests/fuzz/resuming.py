"""Runs that are resumed with something changed: each trains what is left of its first run, or is refused before a step.

A seed decides about a run, the step after which it is interrupted, and what is changed before it is resumed. A hook of
the model notes the first token of each row, by which rows differ, and which step it belongs to. The rows of each step
that is left have to be those of the run that was not interrupted, and so have the weights at the end, to the last bit,
where processes and batches are as they were. Ranks run one after the other, without a group: each gets the data loader
of its rank from Accelerate.
"""

import random
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate.accelerator
import datasets
import pytest
import torch
import torch.utils.data
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments, logging

from lowmem.errors import LowmemError
from lowmem.trainer import FusedTrainer

VOCABULARY = 128


@dataclass(frozen=True)
class Run:
    """A run, whose arguments have their names."""

    data: str = "tokens"
    rows: int = 32
    edit: str = "none"
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    seed: int = 42
    data_seed: int | None = None
    train_sampling_strategy: str = "random"
    seedable: bool = True
    dataloader_drop_last: bool = False
    max_steps: int = 8
    dropout: float = 0.2
    hidden: int = 8

    @property
    def is_stream(self) -> bool:
        return self.data in ("stream", "shuffled stream", "generator")


CHOICES: dict[str, list[Any]] = {
    "data": ["list", "tokens", "packed", "indexed", "stream", "shuffled stream", "generator"],
    "rows": [6, 10, 16, 16, 24, 32],
    "per_device_train_batch_size": [1, 2, 2, 4, 4],
    "gradient_accumulation_steps": [1, 1, 2, 2, 3],
    "world_size": [1, 1, 2, 2, 4],
    "seed": [42, 7],
    "data_seed": [None, None, 3, 4],
    "train_sampling_strategy": ["random", "random", "sequential", "group_by_length", "batch_rebalance"],
    "seedable": [True, True, False],
    "dataloader_drop_last": [False, False, True],
    "max_steps": [5, 8, 11],
}
# Changes before a run is resumed.
CHANGES = CHOICES | {"edit": ["a token", "a row less", "two swapped", "longer"], "dropout": [0.0], "hidden": [16]}
CHANGES |= {"seed": [1], "max_steps": [9, 12], "rows": [8, 12]}


class Indexed(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """In another order in each pass, by the random state of Python."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        yield from random.sample(self.rows, len(self.rows))


def dataset(run: Run) -> Any:
    source = random.Random(run.rows)
    rows = [[n + 2, *source.choices(range(40, VOCABULARY), k=source.randrange(2, 9))] for n in range(run.rows)]
    if run.edit == "a token":
        rows[-1][1] = 39
    elif run.edit == "a row less":
        del rows[0]
    elif run.edit == "two swapped":
        rows[0], rows[1] = rows[1], rows[0]
    elif run.edit == "longer":
        rows[2] = rows[2] * 2
    if run.data == "packed":
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
    rows = [{"input_ids": row} for row in rows]
    if run.data in ("list", "indexed", "generator"):
        return {"list": list, "indexed": Indexed, "generator": Stream}[run.data](rows)
    table = datasets.Dataset.from_list(rows)
    if not run.is_stream:
        return table
    stream = table.to_iterable_dataset()
    return stream.shuffle(seed=5, buffer_size=4) if run.data == "shuffled stream" else stream


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def model(run: Run) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": run.hidden, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, attention_dropout=run.dropout, use_cache=False))


class Noted(TrainerCallback):
    """By step, how often each row was trained."""

    def __init__(self) -> None:
        self.rows: dict[int, Counter[int]] = {}
        self.step: Counter[int] = Counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rows[state.global_step], self.step = self.step, Counter()

    def note(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
        self.step.update(inputs["input_ids"][:, 0].tolist())


def trained(run: Run, folder: Path, saves: dict[str, Any], resume: Path | None) -> tuple[Any, dict[int, Counter[int]]]:
    """The weights of rank 0, and the rows of each step on all ranks."""
    rows: dict[int, Counter[int]] = {}
    weights = None
    for rank in range(run.world_size):
        noted = Noted()
        try:
            home = folder if rank == 0 else folder.with_name(f"{folder.name}-{rank}")
            trainer = trained_on(run, home, saves, resume, rank, noted)
        except LowmemError:
            assert not noted.rows and not noted.step, "refused after a step"
            raise
        if rank == 0:
            weights = [param.detach().clone() for param in trainer.model.parameters()]
        for path in home.glob("checkpoint-*/*.pth"):  # of another rank, in the directory that rank 0 has published
            if home != folder:
                shutil.copy(path, folder / path.relative_to(home))
        for step, counts in noted.rows.items():
            rows[step] = rows.get(step, Counter()) + counts
    return weights, rows


def sampling(strategy: str) -> dict[str, Any]:
    """The arguments that give an order of rows. Skips the test that runs if transformers does not have it."""
    choices = getattr(TrainingArguments.__dataclass_fields__.get("train_sampling_strategy"), "metadata", {})
    if strategy in choices.get("choices", ()):
        return {"train_sampling_strategy": strategy}
    pytest.skip(f"this transformers has no order {strategy!r}")


def trained_on(
    run: Run, folder: Path, saves: dict[str, Any], resume: Path | None, rank: int, noted: Noted
) -> FusedTrainer:
    prepare = accelerate.accelerator.prepare_data_loader

    def prepared(loader: Any, *args: Any, **options: Any) -> Any:
        options |= {"num_processes": run.world_size, "process_index": rank}
        return prepare(loader, *args, **options)

    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed")
    names += ("dataloader_drop_last", "max_steps")
    with ExitStack() as stack:
        if run.world_size > 1:
            stack.enter_context(mock.patch.object(accelerate.accelerator, "prepare_data_loader", prepared))
            for name, value in {"world_size": run.world_size, "process_index": rank}.items():
                stack.enter_context(mock.patch.object(TrainingArguments, name, value))
        args = TrainingArguments(
            output_dir=str(folder), report_to="none", disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True,
            bf16=False, optim="adamw_torch", lr_scheduler_type="constant", learning_rate=0.05, logging_strategy="no",
            accelerator_config={"use_seedable_sampler": run.seedable}, average_tokens_across_devices=False,
            **{name: getattr(run, name) for name in names}, **sampling(run.train_sampling_strategy), **saves,
        )  # fmt: skip
        trainer = FusedTrainer(
            model=model(run), args=args, train_dataset=dataset(run), data_collator=collate, callbacks=[noted]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.model.register_forward_pre_hook(noted.note, with_kwargs=True)
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def drawn(seed: int) -> tuple[Run, Run, int, str]:
    """A run, the one that continues it, the step between them, and when checkpoints are saved."""
    source = random.Random(seed)
    values = {name: source.choice(choices) for name, choices in CHOICES.items()}
    if values["data"] in ("stream", "shuffled stream", "generator"):
        # Accelerate would need a group; transformers never ends if a pass has fewer batches than a step
        values |= {"world_size": 1, "gradient_accumulation_steps": source.choice([1, 1, 2])}
        values |= {"rows": max(values["rows"], 10)}
    if values["data"] == "generator":
        values["train_sampling_strategy"] = "random"
    run = Run(**values)
    changed = run
    for name in source.sample(list(CHANGES), k=source.choice([0, 1, 1, 1, 1, 2])):
        changed = replace(changed, **{name: source.choice(CHANGES[name])})
    if source.random() < 0.35:  # the same rows per step, in another way
        total = run.per_device_train_batch_size * run.gradient_accumulation_steps * run.world_size
        ways = [(b, a, w) for b in (1, 2, 4) for a in (1, 2, 3, 4, 6) for w in (1, 2, 3, 4) if b * a * w == total]
        b, a, w = source.choice(ways)
        changed = replace(changed, per_device_train_batch_size=b, gradient_accumulation_steps=a, world_size=w)
    if changed.data in ("indexed", "generator"):  # torch's data sets are not read twice, so an edit is not noticed
        changed = replace(changed, edit="none", rows=run.rows)
    if changed.is_stream:
        changed = replace(changed, world_size=1)
    return run, changed, source.randrange(1, run.max_steps), source.choice(["steps", "steps", "steps", "epoch"])


def run(seed: int, folder: Path) -> str:
    first, second, step, when = drawn(seed)
    try:
        continued(first, second, step, when, folder)
    except LowmemError as error:
        assert first != second, error
        return type(error).__name__
    return "accepted"


def continued(first: Run, second: Run, step: int, when: str, folder: Path) -> None:
    """Interrupts a run after a step, or its first epoch, and compares what `second` trains of the rest.

    Raises:
        LowmemError: `second` is refused.
    """
    logging.set_verbosity_error()
    saves = {"save_strategy": when} | ({"save_steps": step} if when == "steps" else {})
    try:
        weights, rows = trained(first, folder / "run", saves, None)
    except (LowmemError, ValueError):
        return  # no data loader can be made of it, also if it is not resumed
    points = sorted((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not points:
        return  # it has ended within its first epoch
    point = points[0]
    step = int(point.name.rpartition("-")[2])
    if second.max_steps != first.max_steps:
        weights, rows = trained(
            replace(first, max_steps=second.max_steps), folder / "longer", {"save_strategy": "no"}, None
        )
    others, again = trained(second, folder / "resumed", {"save_strategy": "no"}, point)
    left = {number: counts for number, counts in rows.items() if number > step}
    assert again == left, f"{step}: {again} instead of {left}\n{first}\n{second}"
    shape = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    if all(getattr(first, name) == getattr(second, name) for name in shape):
        same = all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
        assert same, f"other weights\n{first}\n{second}"
