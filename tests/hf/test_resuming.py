"""A resumed run trains the remaining rows of the interrupted run, or raises before its first step.

A model hook records the first token, which identifies the row, and the step. Ranks run one after the other without a
process group. Accelerate gives each one the data loader of its rank.
"""

import logging
import random
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import accelerate.accelerator
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from support import trainers
from support.products import in_turn
from support.trainers import fused
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from lowmem.errors import CheckpointError, DataError, LowmemError
from lowmem.hf.resuming import fingerprint
from lowmem.trainer import FusedTrainer

SAVES = {"save_strategy": "steps", "save_steps": 1}
VOCABULARY = 128
SHAPE = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")


@dataclass(frozen=True)
class Run:
    """The configuration of a run. Fields have the names of training arguments."""

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


class Indexed(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """Shuffles rows in each pass with Python's random state."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from random.sample(self.rows, len(self.rows))


KINDS = {
    "list": list, "tokens": Dataset.from_list, "indexed": Indexed, "generator": Stream,
    "stream": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
}  # fmt: skip


def dataset(run):
    source = random.Random(run.rows)
    rows = [[n + 2, *source.choices(range(40, VOCABULARY), k=source.randrange(2, 9))] for n in range(run.rows)]
    if run.edit == "a token":
        rows[-1][1] = 39
    elif run.edit == "a row less":
        del rows[0]
    elif run.edit == "two swapped":
        rows[0], rows[1] = rows[1], rows[0]
    return KINDS[run.data]([{"input_ids": row} for row in rows])


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def model(run):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, attention_dropout=run.dropout, use_cache=False))


class Noted(TrainerCallback):
    """Records how often each row was trained in each step."""

    def __init__(self):
        self.rows, self.step = {}, Counter()

    def on_step_end(self, args, state, control, **_):
        self.rows[state.global_step], self.step = self.step, Counter()

    def note(self, module, args, inputs):
        self.step.update(inputs["input_ids"][:, 0].tolist())


def trained_on(run, folder, rank, resume=None, **saves):
    """Returns the weights, and the rows of each step on one rank."""
    prepare = accelerate.accelerator.prepare_data_loader
    noted = Noted()

    def prepared(loader, *args, **options):
        return prepare(loader, *args, **options | {"num_processes": run.world_size, "process_index": rank})

    order = {
        name: getattr(run, name) for name in (*SHAPE[:2], "seed", "data_seed", "dataloader_drop_last", "max_steps")
    }
    if run.train_sampling_strategy != "random":
        order["train_sampling_strategy"] = run.train_sampling_strategy
    with ExitStack() as stack:
        if run.world_size > 1:
            stack.enter_context(mock.patch.object(accelerate.accelerator, "prepare_data_loader", prepared))
            for name, value in {"world_size": run.world_size, "process_index": rank}.items():
                stack.enter_context(mock.patch.object(TrainingArguments, name, value))
        usual = trainers.quiet(
            folder, optim="adamw_torch", lr_scheduler_type="constant", learning_rate=0.05, use_cpu=True,
            accelerator_config={"use_seedable_sampler": run.seedable}, average_tokens_across_devices=False,
        )  # fmt: skip
        trainer = FusedTrainer(
            model(run), TrainingArguments(**usual | order | saves), collate, dataset(run), callbacks=[noted]
        )
        trainer.model.register_forward_pre_hook(noted.note, with_kwargs=True)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except LowmemError:
            assert not noted.rows and not noted.step, "refused after a step"
            raise
    return [param.detach().clone() for param in trainer.model.parameters()], noted.rows


def trained(run, folder, resume=None, **saves):
    """Returns the weights of rank 0, and the rows of each step on all ranks."""
    rows = {}
    for rank in reversed(range(run.world_size)):
        home = folder if rank == 0 else folder.with_name(f"{folder.name}-{rank}")
        weights, of_rank = trained_on(run, home, rank, resume, **saves)
        for step, counts in of_rank.items():
            rows[step] = rows.get(step, Counter()) + counts
    for path in folder.parent.glob(f"{folder.name}-*/checkpoint-*/*.pth"):  # of the other ranks
        shutil.copy(path, folder / path.parent.name)
    return weights, rows


def continued(run, changes, step, folder):
    """Interrupts a run after a step, resumes it with changed arguments, and compares the remaining steps."""
    changed = replace(run, **changes)
    weights, rows = trained(run, folder / "run", save_strategy="steps", save_steps=step)
    if changed.max_steps != run.max_steps:
        weights, rows = trained(replace(run, max_steps=changed.max_steps), folder / "longer")
    others, again = trained(changed, folder / "resumed", str(folder / "run" / f"checkpoint-{step}"))
    assert again == {number: counts for number, counts in rows.items() if number > step}
    if changes.keys().isdisjoint(SHAPE):
        assert all(map(torch.equal, weights, others))


PLAIN = Run()
SHORT = replace(PLAIN, rows=10, per_device_train_batch_size=1)
BATCH = "per_device_train_batch_size"

# Run, step after which it is interrupted, and changed arguments.
CONTINUED = {
    "two processes with half of a batch": (PLAIN, 3, {"world_size": 2, BATCH: 2}),
    "accumulation in place of a batch": (PLAIN, 3, {"gradient_accumulation_steps": 4, BATCH: 1}),
    "a seed that differs from data_seed": (replace(PLAIN, data_seed=3), 3, {"seed": 1}),
    "more steps": (PLAIN, 3, {"max_steps": 11}),
    "two processes in a second epoch": (replace(PLAIN, rows=12, world_size=2, max_steps=5), 3, {}),
    "lengths in a second epoch": (replace(PLAIN, rows=16, train_sampling_strategy="group_by_length"), 6, {}),
    "a sampler without a seed": (replace(PLAIN, rows=16, seedable=False), 6, {}),
    "a stream in its second pass": (replace(SHORT, data="stream", max_steps=20), 14, {}),
    "a stream of torch in its second pass": (replace(SHORT, data="generator", max_steps=20), 14, {}),
    "a stream with more steps": (replace(SHORT, rows=16, data="stream"), 7, {"max_steps": 12}),
}


def require(run):
    if (
        run.train_sampling_strategy != "random"
        and "train_sampling_strategy" not in TrainingArguments.__dataclass_fields__
    ):
        pytest.skip("this transformers has no other order")


@pytest.mark.parametrize(("run", "step", "changes"), CONTINUED.values(), ids=CONTINUED)
def test_a_resumed_run_trains_the_remaining_rows(run, step, changes, tmp_path):
    require(run)
    continued(run, changes, step, tmp_path)


REFUSED = {
    "two processes": (PLAIN, {"world_size": 2}, "rows: the number of processes was 1 and is now 2. Restore"),
    "processes that would pad": (
        replace(PLAIN, rows=10), {"world_size": 2, BATCH: 2},
        f"rows: {BATCH} was 4 and is now 2, the number of processes was 1 and is now 2. Restore",
    ),
    "a seed": (
        PLAIN, {"seed": 1}, "seed was 42 and is now 1. Restore the previous values, or write ignore_data_skip: true",
    ),
    "a seed of the data": (PLAIN, {"data_seed": 3}, "data_seed was null and is now 3"),
    "a sampler": (PLAIN, {"train_sampling_strategy": "group_by_length"}, 'train_sampling_strategy was "random"'),
    "a last batch": (replace(PLAIN, rows=10), {"dataloader_drop_last": True}, "drop_last was false and is now true"),
    "a stream in other batches": (
        replace(PLAIN, data="stream"), {BATCH: 2, "gradient_accumulation_steps": 2}, f"{BATCH} was 4 and is now 2"
    ),
    "a token": (PLAIN, {"edit": "a token"}, "differs from the data of this checkpoint"),
    "a row of a list": (replace(PLAIN, data="list"), {"edit": "two swapped"}, "differs from the data of this"),
    "a row of a stream": (replace(PLAIN, data="stream"), {"edit": "a row less"}, "differs from the data of this"),
    "the number of torch's rows": (replace(PLAIN, data="indexed"), {"rows": 30}, "differs from the data of this"),
    "a stream of torch": (replace(PLAIN, data="stream"), {"data": "generator"}, "differs from the data of this"),
    "the model": (PLAIN, {"dropout": 0.0}, "attention_dropout is 0.2 in its config.json and 0.0 in this model"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_resuming_with_different_rows_raises(run, changes, message, tmp_path):
    require(replace(run, **changes))
    with pytest.raises((CheckpointError, DataError)) as error:
        continued(replace(run, max_steps=4), changes, 1, tmp_path)
    assert message in str(error.value)


def test_ignore_data_skip_is_respected(make, tmp_path):
    """Checkpoints of the resumed run must record two trained steps of the data rather than four."""
    make(**SAVES, max_steps=2).train()
    chosen = make(**SAVES, max_steps=4, seed=1, ignore_data_skip=True)
    chosen.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    again = make(max_steps=5, seed=1)  # ten steps per epoch
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert (chosen.state.epoch, again.state.epoch) == pytest.approx((0.2, 0.3))


@pytest.mark.parametrize(
    ("name", "options"), in_turn(["GRPO", "RLOO"], [{"num_iterations": 2}, {"steps_per_generation": 2}])
)
def test_resuming_between_steps_that_share_completions_raises(name, options, tmp_path):
    """Checkpoints do not contain completions, so the resumed run would generate different ones."""
    trainers.require(name)

    def trained(checkpoint=None):
        cls, config, usual, parts = trainers.ROWS[name]()
        args = config(
            str(tmp_path), max_steps=3, save_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=1,
            use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-2, **usual | options,
        )  # fmt: skip
        trainer = fused(cls)(args=args, **parts)
        trainer.train(resume_from_checkpoint=checkpoint)
        return [param.detach().clone() for param in trainer.model.parameters()]

    whole = trained()
    assert all(map(torch.equal, trained(str(tmp_path / "checkpoint-2")), whole))
    with pytest.raises(CheckpointError, match=r"checkpoint-1 was .* share completions.* a multiple of 2"):
        trained(str(tmp_path / "checkpoint-1"))


def test_data_that_cannot_be_compared_is_warned_about(make, samples, tmp_path, caplog):
    first, resumed = make(**SAVES, max_steps=1), make(max_steps=2)
    first.train_dataset = resumed.train_dataset = Indexed(samples)
    first.train()
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert "only the number of rows of the data was compared" in caplog.text


# -- fingerprints -----------------------------------------------------------------------------------------------------

ROWS = [[1, 2, 3], [4], [], [5, 6]] * 400


def table(kind, rows, chunks):
    size = -(-len(rows) // chunks)
    parts = [pa.array(rows[start : start + size], kind) for start in range(0, len(rows), size)]
    return Dataset(pa.table({"input_ids": pa.chunked_array(parts)}))


def test_fingerprints_cover_only_the_columns_that_are_trained_on():
    usual = fingerprint(table(pa.list_(pa.int64()), ROWS, 1))
    assert usual == fingerprint(table(pa.list_(pa.int32()), ROWS, 7))
    assert usual == fingerprint(table(pa.large_list(pa.int64()), ROWS, 3))
    both = table(pa.list_(pa.int64()), ROWS, 1)
    assert usual == fingerprint(both.add_column("text", ["a"] * len(ROWS)))
    for other in (ROWS[1:], [[1, 2], [3, 4], *ROWS[2:]], [*ROWS[:-1], [5, 7]], ROWS[::-1]):
        assert fingerprint(table(pa.list_(pa.int64()), other, 1)) != usual
    assert fingerprint(both.add_column("labels", ROWS)) != usual
    texts = [Dataset.from_list([{"prompt": text}]) for text in ("a", "b")]
    assert fingerprint(texts[0]) != fingerprint(texts[1])
