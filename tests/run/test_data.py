"""The data of a run: loaded as TRL does, looked at before training, shown by `inspect`, recognized when resumed."""

import json

import pytest
from datasets import Dataset
from support import runs
from transformers import AutoTokenizer

from lowmem.errors import ConfigError, DataError
from lowmem.run import data
from lowmem.run.arguments import parse

LONG = {"messages": runs.user("why") + runs.assistant("because " * 40)}
LATE = {"messages": runs.user("why " * 40) + runs.assistant("so")}
NO_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def arguments(tmp_path):
    """A function: the arguments of a command whose data are these rows, or those of its own file."""

    def of(rows=None, command="sft", **changes):
        if rows is not None:
            path = runs.write_rows(tmp_path / "rows.jsonl", rows)
            changes["datasets"] = [{"path": "json", "data_files": str(path)}]
        return parse(command, ["--config", str(runs.write(tmp_path, command, **changes))])

    return of


@pytest.fixture
def looked_at(arguments):
    """A function: what is said of data before training."""

    def of(rows=None, command="sft", **changes):
        parsed = arguments(rows, command, **changes)
        train, _ = data.load(parsed)
        return data.check(data.stand_in(parsed, train), data.first(train))

    return of


# --- Loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": None, "dataset_name": "chats.jsonl"}, "datasets: [{path: json, data_files: chats.jsonl}]"),
        ({"datasets": None, "dataset_name": "a/b.Parquet"}, "datasets: [{path: parquet, data_files: a/b.Parquet}]"),
        ({"datasets": None}, "no data: set dataset_name, or datasets: [{path: json, data_files: chats.jsonl}]"),
        ({"datasets": None, "dataset_name": "no/such"}, "the data cannot be loaded: "),
        ({"datasets": [{"path": "json", "data_files": "none.jsonl"}]}, "none.jsonl"),
        ({"dataset_train_split": "all"}, "no split 'all'. It has train; set dataset_train_split"),
        ({"eval_strategy": "steps"}, "set dataset_test_split to one; or set test_split_size"),
    ],
)  # fmt: skip
def test_data_that_is_not_there(changes, message, arguments):
    with pytest.raises((ConfigError, DataError)) as error:
        data.load(arguments(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the data cannot be loaded: "),
        ('{"text": 1\n', "(JSON parse error: "),
        ("\x00\x01", "the data cannot be loaded: "),
    ],
)
def test_data_that_cannot_be_read(content, message, arguments, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError) as error:
        data.load(arguments(datasets=[{"path": "json", "data_files": str(tmp_path / "bad.jsonl")}]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_part_is_held_out_and_rows_are_the_same_every_time(arguments):
    parsed = arguments(test_split_size=0.25, eval_strategy="steps", eval_steps=1)
    train, evaluation = data.load(parsed)
    assert (len(train), len(evaluation)) == (12, 4)
    assert data.load(parsed)[0][:] == train[:]


def test_a_stream_is_looked_at(arguments, looked_at):
    changes = {"dataset_streaming": True, "streaming": True}
    train, _ = data.load(arguments(**changes))
    assert not isinstance(train, Dataset) and len(data.first(train)) == len(runs.SENTENCES)
    assert looked_at(**changes).startswith("16 rows, ")


def test_a_stream_is_trained_on(tmp_path):
    path = runs.write(tmp_path, streaming=True, save_strategy="steps", save_steps=1)
    ended = runs.train(tmp_path, "sft", "--config", path)
    assert (ended.status, ended.err) == (0, "") and "data       streamed; columns " in ended.out
    resumed = ("--resume_from_checkpoint", "last", "--max_steps", 3)
    ended = runs.lowmem("sft", "--config", tmp_path / "run" / "config.yaml", *resumed)
    assert ended.status == 0 and len(runs.logged(tmp_path / "run")) == 3


# --- The look before training -----------------------------------------------------------------------------------------


def test_rows_tokens_and_what_is_trained_on_are_counted(looked_at):
    everything = looked_at()
    rows, tokens, trained = everything.split(", ")
    count = int(tokens.split()[0])
    assert rows == "16 rows" and trained == f"loss on {count} (100%)"
    answers = looked_at(assistant_only_loss=True)
    assert answers.startswith(f"16 rows, {count} tokens, loss on ") and "100%" not in answers
    assert looked_at(packing=True, max_length=32).startswith("16 rows packed into ")
    assert looked_at(command="dpo").startswith("16 rows; columns prompt, chosen, rejected, prompt_ids")


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([LONG] * 3, {"max_length": 10, "assistant_only_loss": True}, None),
        ([LONG, LATE], {"max_length": 16, "assistant_only_loss": True}, "row 2 of the data: its answer begins after"),
        ([LATE], {"max_length": 16, "assistant_only_loss": True}, "row 1"),
    ],
)  # fmt: skip
def test_an_answer_that_max_length_cuts_off_is_named(rows, changes, message, looked_at):
    if message is None:
        assert "rows" in looked_at(rows, **changes)
        return
    with pytest.raises(DataError) as error:
        looked_at(rows, **changes)
    assert message in str(error.value) and "`lowmem inspect`" in str(error.value)


def test_rows_of_which_nothing_is_trained_on_are_refused(looked_at):
    with pytest.raises(DataError, match="none of the 48 tokens in 3 rows contributes to the loss"):
        looked_at([LATE] * 3, max_length=16, assistant_only_loss=True, packing=True)
    with pytest.raises(DataError, match="none of 2 rows is left"):
        looked_at([{"messages": "a text"}] * 2)


@pytest.mark.parametrize("row", [{"text": None}, {"text": 3}])
def test_rows_with_values_of_another_kind_are_refused(row, looked_at):
    with pytest.raises(DataError, match="a row of the data has a value that is missing"):
        looked_at([row] * 2)


def test_a_template_that_marks_no_answers_is_refused(arguments, tmp_path):
    (tmp_path / "plain.jinja").write_text(NO_TEMPLATE)
    parsed = arguments(assistant_only_loss=True, chat_template_path=str(tmp_path / "plain.jinja"))
    with pytest.raises((ConfigError, DataError)) as error:
        data.stand_in(parsed, data.load(parsed)[0])
    assert "generation" in str(error.value) and "\n" not in str(error.value)


def test_rows_without_the_columns_of_a_command_are_refused(arguments):
    for command, row, missing in (("sft", {"foo": "a"}, "text"), ("dpo", {"prompt": "a", "chosen": "b"}, "rejected")):
        parsed = arguments([row] * 2, command)
        with pytest.raises(DataError, match=f"has no column '{missing}'.*It has {', '.join(row)}"):
            data.stand_in(parsed, data.load(parsed)[0])


# --- What `inspect` shows ---------------------------------------------------------------------------------------------


def inspected(tmp_path, command="sft", *words, **changes):
    ended = runs.lowmem("inspect", command, "--config", runs.write(tmp_path, command, **changes), *words)
    assert (ended.status, ended.err) == (0, "")
    assert not (tmp_path / "run").exists()
    return ended.out


def test_inspect_marks_what_is_trained_on(tmp_path):
    shown = inspected(tmp_path, "sft", "--samples", 2, assistant_only_loss=True)
    assert "<|begin|><|user|>where 0<|assistant|>⟦the old cat sat<|end|>⟧\n" in shown
    assert shown.count(" tokens, trained on ") == 2 and "Trained on: the text in ⟦ ⟧. First rows: 16 rows" in shown
    shown = inspected(tmp_path, "sft", "--samples", 1, "--device", "cpu")
    assert "<|begin|>⟦<|user|>where 0<|assistant|>the old cat sat<|end|>⟧\n" in shown


def test_inspect_of_packed_rows_and_of_preferences(tmp_path):
    shown = inspected(tmp_path, "sft", "--samples", 1, packing=True, max_length=32)
    assert shown.count("<|begin|>⟦") >= 2  # nothing comes before the first token of a sequence
    shown = inspected(tmp_path, "dpo", "--samples", 1)
    assert "prompt_ids: <|begin|><|user|>who<|assistant|>" in shown
    assert "⟦chosen_ids: the old cat sat<|end|>\n⟧" in shown and "rejected_ids: the new dog hid too" in shown
    for command in ("kto", "reward", "grpo", "rloo"):
        assert "the old cat sat" in inspected(tmp_path, command, "--samples", 1)


# --- Recognizing it ---------------------------------------------------------------------------------------------------


def test_a_run_is_not_continued_with_other_data(tmp_path):
    path = runs.write_rows(tmp_path / "rows.jsonl", runs.FILES["chats.jsonl"])
    changes = {"save_strategy": "steps", "save_steps": 1, "datasets": [{"path": "json", "data_files": str(path)}]}
    assert runs.lowmem("sft", "--config", runs.write(tmp_path, **changes), "--max_steps", 1).status == 0
    again = ("sft", "--config", tmp_path / "run" / "config.yaml", "--resume_from_checkpoint", "last", "--max_steps", 2)
    runs.write_rows(path, runs.FILES["chats.jsonl"][1:])
    other = runs.lowmem(*again)
    assert other.status == 2 and "is not what this checkpoint was trained on" in other.err
    runs.write_rows(path, runs.FILES["chats.jsonl"])
    assert runs.lowmem(*again).status == 0
    assert len(json.loads((tmp_path / "run" / "checkpoint-2" / "data.json").read_text())["data"]) == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--per_device_train_batch_size", 4), "was [2, 1, 1] and is [4, 1, 1]. Write per_device_train_batch_size: 2"),
        (("--seed", 1), "seed was 42 and is 1. Write seed: 42, or ignore_data_skip: true"),
        (("--train_sampling_strategy", "group_by_length"), "Write train_sampling_strategy: \"random\""),
        (("--packing", True, "--max_length", 32), "is not what this checkpoint was trained on"),
    ],
)  # fmt: skip
def test_a_run_is_not_continued_with_other_rows(change, message, stopped):
    ended = runs.lowmem(*stopped, *change)
    assert ended.status == 2 and message in ended.err


def test_the_rows_of_a_step_may_come_in_other_batches(stopped, tmp_path):
    ended = runs.lowmem(*stopped, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2)
    assert ended.status == 0 and len(runs.logged(tmp_path / "run")) == 2


@pytest.fixture
def stopped(tmp_path):
    """The words of a command that continues a run after its first step."""
    changes = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1}
    assert runs.lowmem("sft", "--config", runs.write(tmp_path, **changes), "--max_steps", 1).status == 0
    return "sft", "--config", tmp_path / "run" / "config.yaml", "--resume_from_checkpoint", "last", "--max_steps", 2


def test_segments_of_a_row():
    tokenizer = AutoTokenizer.from_pretrained(runs.assets() / "model")
    ids = tokenizer("the old cat")["input_ids"]
    parts = data.segments({"input_ids": ids, "labels": [-100, -100, *ids[2:]]}, tokenizer)
    assert [(part.trained, part.tokens) for part in parts] == [(False, 2), (True, len(ids) - 2)]
    assert "".join(part.text for part in parts) == tokenizer.decode(ids)
