"""A resumed run trains the rows that its run had left, or is refused before its first step."""

import logging
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from fuzz.resuming import Indexed, Run, Stream, continued
from support import trainers
from support.products import in_turn
from support.trainers import fused

from lowmem.errors import CheckpointError, DataError
from lowmem.hf.resuming import fingerprint

SAVES = {"save_strategy": "steps", "save_steps": 1}

PLAIN = Run()
SHORT = replace(PLAIN, rows=10, per_device_train_batch_size=1)
BATCH = "per_device_train_batch_size"

# A run, its step, and what is changed.
CONTINUED = {
    "nothing": (PLAIN, 3, {}),
    "two processes with half of a batch": (PLAIN, 3, {"world_size": 2, BATCH: 2}),
    "accumulation in place of a batch": (PLAIN, 3, {"gradient_accumulation_steps": 4, BATCH: 1}),
    "a seed that differs from data_seed": (replace(PLAIN, data_seed=3), 3, {"seed": 1}),
    "more steps": (PLAIN, 3, {"max_steps": 11}),
    "lengths in a second epoch": (replace(PLAIN, rows=16, train_sampling_strategy="group_by_length"), 6, {}),
    "a sampler without a seed": (replace(PLAIN, rows=16, seedable=False), 6, {}),
    "balanced ranks in a second epoch": (
        replace(PLAIN, rows=12, world_size=2, train_sampling_strategy="batch_rebalance", max_steps=5), 3, {},
    ),
    "a stream in its second pass": (replace(SHORT, data="stream", max_steps=20), 14, {}),
    "a shuffled stream in its second pass": (replace(SHORT, data="shuffled stream", max_steps=20), 14, {}),
    "a stream of torch in its second pass": (replace(SHORT, data="generator", max_steps=20), 14, {}),
    "a stream with more steps": (replace(SHORT, rows=16, data="stream"), 7, {"max_steps": 12}),
}  # fmt: skip


@pytest.mark.parametrize(("run", "step", "changes"), CONTINUED.values(), ids=CONTINUED)
def test_a_resumed_run_trains_the_remaining_rows(run, step, changes, tmp_path):
    continued(run, replace(run, **changes), step, "steps", tmp_path)


REFUSED = {
    "two processes": (PLAIN, {"world_size": 2}, "rows: the number of processes was 1 and is now 2. Restore"),
    "half of a batch": (PLAIN, {BATCH: 2}, f"rows: {BATCH} was 4 and is now 2. Restore"),
    "twice the batch": (PLAIN, {BATCH: 8}, f"rows: {BATCH} was 4 and is now 8. Restore"),
    "processes that would pad": (
        replace(PLAIN, rows=10), {"world_size": 2, BATCH: 2},
        f"rows: {BATCH} was 4 and is now 2, the number of processes was 1 and is now 2. Restore",
    ),
    "a seed": (
        PLAIN, {"seed": 1}, "seed was 42 and is now 1. Restore the previous value, or write ignore_data_skip: true",
    ),
    "a seed of the data": (PLAIN, {"data_seed": 3}, "data_seed was null and is now 3"),
    "a sampler": (PLAIN, {"train_sampling_strategy": "group_by_length"}, 'train_sampling_strategy was "random"'),
    "batches of lengths": (
        replace(PLAIN, train_sampling_strategy="group_by_length"), {BATCH: 2, "gradient_accumulation_steps": 2},
        f"{BATCH} was 4 and is now 2, gradient_accumulation_steps was 1 and is now 2",
    ),
    "a stream in other batches": (
        replace(PLAIN, data="stream"), {BATCH: 2, "gradient_accumulation_steps": 2}, f"{BATCH} was 4 and is now 2"
    ),
    "a last batch": (replace(PLAIN, rows=10), {"dataloader_drop_last": True}, "drop_last was false and is now true"),
    "packing": (PLAIN, {"data": "packed"}, "differs from the data of this checkpoint"),
    "a token": (PLAIN, {"edit": "a token"}, "differs from the data of this checkpoint"),
    "a row of a list": (replace(PLAIN, data="list"), {"edit": "two swapped"}, "differs from the data of this"),
    "a row of a stream": (replace(PLAIN, data="stream"), {"edit": "a row less"}, "differs from the data of this"),
    "the number of torch's rows": (replace(PLAIN, data="indexed"), {"rows": 30}, "differs from the data of this"),
    "a stream of torch": (replace(PLAIN, data="stream"), {"data": "generator"}, "differs from the data of this"),
    "the model": (PLAIN, {"dropout": 0.0}, "attention_dropout is 0.2 in its config.json and 0.0 in this model"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_resuming_with_different_rows_raises(run, changes, message, tmp_path):
    run = replace(run, max_steps=4)
    with pytest.raises((CheckpointError, DataError)) as error:
        continued(run, replace(run, **changes), 1, "steps", tmp_path)
    assert message in str(error.value)


def test_ignore_data_skip_is_respected(make, tmp_path):
    """And the checkpoints after it know that they are at its second step, and not at its fourth."""
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
    """The completions are in no checkpoint, and would be drawn again."""
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


def test_fingerprints_of_lists_and_streams():
    rows = [{"input_ids": row} for row in ROWS[:20]]
    other = [*rows[:-1], {"input_ids": [7]}]
    assert fingerprint(rows) == fingerprint([dict(row) for row in rows]) != fingerprint(other)
    streams = [Dataset.from_list(each).to_iterable_dataset() for each in (rows, rows, other)]
    assert fingerprint(streams[0]) == fingerprint(streams[1]) != fingerprint(streams[2])
    assert fingerprint(Indexed(rows)) is fingerprint(Stream(rows)) is None
