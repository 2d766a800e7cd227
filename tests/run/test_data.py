"""Data of a run are loaded as in TRL, inspected before training, and shown by `inspect`."""

import pytest
from support import runs
from support.products import in_turn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lowmem.errors import ConfigError, DataError
from lowmem.run import build, data
from lowmem.run.recipe import parse

SHORT = {"messages": runs.user("why") + runs.assistant("so")}
LATE = {"messages": runs.user("why " * 40) + runs.assistant("so")}


@pytest.fixture
def arguments(tmp_path):
    """Returns a function that parses a command's arguments with these rows, or with the default file."""

    def parse_rows(rows=None, command="sft", **changes):
        if rows is not None:
            path = runs.write_rows(tmp_path / "rows.jsonl", rows)
            changes["datasets"] = [{"path": "json", "data_files": str(path)}]
        return parse(command, ["--config", str(runs.write(tmp_path, command, **changes))])

    return parse_rows


@pytest.fixture
def summary(arguments):
    """Returns a function that summarizes the data before training."""

    def summarize(rows=None, command="sft", **changes):
        parsed = arguments(rows, command, **changes)
        train, _ = data.load(parsed)
        return data.check(data.tiny_trainer(parsed, data.first(train)), data.first(train))

    return summarize


# --- Loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": None, "dataset_name": "chats.jsonl"}, "datasets: [{path: json, data_files: chats.jsonl}]"),
        ({"datasets": [{"path": "chats.csv"}]}, "datasets: [{path: csv, data_files: chats.csv}]"),
        ({"datasets": None}, "no data: set dataset_name, or datasets: [{path: json, data_files: chats.jsonl}]"),
        ({"datasets": [{"path": "json", "data_files": "none.jsonl"}]}, "none.jsonl"),
        ({"dataset_train_split": "all"}, "no split 'all'. It has train. Set dataset_train_split"),
        ({"eval_strategy": "steps"}, "Set dataset_test_split to one of them; or name its file in data_files: {train: "),
    ],
)  # fmt: skip
def test_missing_data_raises(changes, message, arguments):
    with pytest.raises((ConfigError, DataError)) as error:
        data.load(arguments(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the data cannot be loaded: "),
        ('{"text": "a"}\n{"text": 1\n', "bad.jsonl, line 2: "),
        ('{"text": "a"}\n{"text": "\\ud83d"}\n', "bad.jsonl, line 2: 'utf-8' codec can't encode"),
        ('{"text": "a"}\n{"text": "\xe9"}\n'.encode("latin-1"), "bad.jsonl, line 2: 'utf-8' codec can't decode byte"),
    ],
    ids=["nothing", "broken", "half an emoji", "Latin-1"],
)
def test_data_that_cannot_be_read(content, message, arguments, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        data.load(arguments(datasets=[{"path": "json", "data_files": str(tmp_path / "bad.jsonl")}]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_evaluation_split_is_reproducible(arguments):
    parsed = arguments(test_split_size=0.25, eval_strategy="steps", eval_steps=1)
    train, evaluation = data.load(parsed)
    assert (len(train), len(evaluation)) == (12, 4)
    assert data.load(parsed)[0][:] == train[:]


def test_a_stream_is_trained_on(tmp_path):
    path = runs.write(tmp_path, streaming=True, save_strategy="steps", save_steps=1)
    ended = runs.train(tmp_path, "sft", "--config", path)
    assert (ended.status, ended.err) == (0, "") and "data       streamed; columns " in ended.out
    resumed = ("--resume_from_checkpoint", "last", "--max_steps", 3)
    ended = runs.lowmem("sft", "--config", tmp_path / "run" / "config.yaml", *resumed)
    assert ended.status == 0 and len(runs.logged(tmp_path / "run")) == 3


# --- Inspection before training ---------------------------------------------------------------------------------------


def test_rows_tokens_and_trained_tokens_are_counted(summary):
    everything = summary()
    rows, tokens, trained = everything.split(", ")
    count = int(tokens.split()[0])
    assert rows == "16 rows" and trained == f"loss on {count - 16} (91%)"  # the first token is not predicted
    answers = summary(assistant_only_loss=True)
    assert answers.startswith(f"16 rows, {count} tokens, loss on ") and "100%" not in answers
    assert summary(packing=True, max_length=32).startswith("16 rows packed into ")
    assert summary(command="dpo").startswith("16 rows; columns prompt, chosen, rejected, prompt_ids")


@pytest.mark.parametrize("place", [0, 110])
def test_rows_truncated_to_nothing_are_counted(place, arguments):
    rows = [SHORT] * 111
    rows[place] = LATE
    parsed = arguments(rows, max_length=16, assistant_only_loss=True)
    train, _ = data.load(parsed)
    counts = data.check(build.trainer(parsed, train, None), train)
    assert counts.startswith("111 rows, 1 dropped by max_length=16, ")


def test_rows_cut_off_by_max_length_are_counted(summary):
    rows = [{"text": "the old cat sat " * 10}] * 3
    tokens = int(summary(rows).split(", ")[1].split()[0])
    lost = "3 have max_length=8 tokens or more (longer ones are truncated"
    assert summary(rows, max_length=8) == f"3 rows, {lost}), 24 tokens, loss on 21 (88%)"
    packed = summary(rows, max_length=8, packing=True)
    keeps = "packing_strategy: wrapped does not truncate"
    assert packed == f"3 rows packed into 3, {lost}; {keeps}), 24 tokens, loss on 21 (88%)"
    for strategy in ("bfd_split", "wrapped"):
        packed = summary(rows, max_length=8, packing=True, packing_strategy=strategy)
        assert packed.startswith(f"3 rows packed into {-(-tokens // 8)}, {tokens} tokens, loss on ")
    mixed = summary([{"input_ids": [5, 6]}, {"input_ids": [5]}])
    assert mixed.startswith("2 rows, 1 without a token to train on, ")


@pytest.mark.parametrize("command", ["dpo", "reward", "kto"])
def test_pairs_that_are_too_long_are_counted(command, summary):
    usual = runs.FILES["kto.jsonl" if command == "kto" else "preferences.jsonl"]
    long = {**usual[0], "prompt": runs.user("the " * 40)}
    assert summary([long, *usual], command, max_length=20).startswith("17 rows, 1 dropped by max_length=20; ")
    if command != "reward":
        assert "16 have max_length=8 tokens or more (longer ones" in summary(usual, command, max_length=8)
    with pytest.raises(DataError, match="max_length=20 removes all 2 rows"):
        summary([long] * 2, command, max_length=20)


def test_rows_without_trained_tokens_raise(summary):
    with pytest.raises(DataError, match="none of the 48 tokens in 3 rows contributes to the loss"):
        summary([LATE] * 3, max_length=16, assistant_only_loss=True, packing=True)
    with pytest.raises(DataError, match=r"max_length=1024 removes all 2 rows\. .* the format of the rows"):
        summary([{"messages": "a text"}] * 2)
    with pytest.raises(DataError, match="none of the 2 tokens in 2 rows contributes to the loss"):
        summary([{"text": "the old cat"}] * 2, max_length=1)
    with pytest.raises(DataError, match="16 rows do not fill a batch of 32; omit dataloader_drop_last"):
        summary(per_device_train_batch_size=32, dataloader_drop_last=True)
    with pytest.raises(ConfigError, match="max_steps=0 is not valid"):
        summary(max_steps=0)


def test_evaluation_data_are_inspected_too(arguments, tmp_path):
    files = {"train": [SHORT] * 8, "test": [SHORT, LATE]}
    names = {split: str(runs.write_rows(tmp_path / f"{split}.jsonl", rows)) for split, rows in files.items()}
    usual = {"max_length": 16, "assistant_only_loss": True, "eval_strategy": "steps", "eval_steps": 1}
    parsed = arguments(datasets=[{"path": "json", "data_files": names}], **usual)
    train, evaluation = data.load(parsed)
    assert (len(train), len(evaluation)) == (8, 2)
    counts = data.check(build.trainer(parsed, train, evaluation), train, evaluation)
    assert "; evaluation: 2 rows, 1 dropped" in counts
    packed = arguments(datasets=[{"path": "json", "data_files": names}], **usual, packing=True, eval_packing=False)
    counts = data.check(build.trainer(packed, train, evaluation), train, evaluation)
    assert counts.startswith("8 rows packed into ") and "; evaluation: 2 rows, 1 dropped" in counts
    runs.write_rows(tmp_path / "test.jsonl", [LATE] * 2)
    train, evaluation = data.load(parsed)
    with pytest.raises(DataError, match="max_length=16 removes all 2 rows of the evaluation data"):
        data.check(build.trainer(parsed, train, evaluation), train, evaluation)


WRONG = {
    "null content": ("sft", {"messages": [*runs.user("a"), {"role": "assistant", "content": None}]}),
    "empty conversation": ("sft", {"messages": []}),
    "number": ("sft", {"text": 3}),
    "other columns": ("sft", {"foo": "a"}),
    "one column too few": ("dpo", {"prompt": "a", "chosen": "b"}),
}


@pytest.mark.parametrize(("case", "alone"), in_turn(WRONG, [True, False]))
def test_the_row_that_cannot_be_tokenized_is_named(case, alone, arguments):
    command, row = WRONG[case]
    column = next(iter(row))
    usual = [chat for file in runs.FILES.values() for chat in file if column in chat and chat.keys() >= row.keys()]
    rows = [row] if alone or not usual else [*usual[:11], row, usual[11]]
    parsed = arguments(rows, command)
    with pytest.raises(DataError) as error:
        data.tiny_trainer(parsed, data.first(data.load(parsed)[0]))
    number = rows.index(row) + 1
    assert str(error.value).startswith(f"row {number} of the data cannot be tokenized: ")
    assert f'The row: {{"{column}": ' in str(error.value) and "\n" not in str(error.value)


def test_row_numbers_refer_to_the_file_after_a_split(arguments):
    rows = [{"text": text} for text in [*runs.SENTENCES[:10], 3, *runs.SENTENCES[10:]]]
    parsed = arguments(rows, test_split_size=0.25, eval_strategy="steps", eval_steps=1)
    train, evaluation = data.load(parsed)
    with pytest.raises(DataError, match="row 11 of the data"):
        build.trainer(parsed, train if 3 in train["text"] else evaluation, None)


def test_files_with_different_keys_can_be_used_in_one_entry(arguments, tmp_path):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    tools = {"messages": [*runs.user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    chats = str(runs.write_rows(tmp_path / "chats.jsonl", runs.FILES["chats.jsonl"]))
    other = str(runs.write_rows(tmp_path / "tools.jsonl", [tools] * 4))
    for entries in ([[chats, other]], [chats, other]):
        with pytest.raises(DataError, match="in one entry of datasets, starting with the file that has all keys"):
            data.load(arguments(datasets=[{"path": "json", "data_files": files} for files in entries]))
    train, _ = data.load(arguments(datasets=[{"path": "json", "data_files": [other, chats]}]))
    assert len(train) == 20 and train[0]["messages"][1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("positions", "rows", "message"), [(4, 300, "12 tokens, but the model has 4"), (64, 200, "has 200")]
)
def test_a_model_too_small_for_the_tokens_raises(positions, rows, message, arguments, tmp_path):
    config = GPT2Config(vocab_size=rows, n_positions=positions, n_embd=16, n_layer=1, n_head=2)
    parsed = arguments()
    train, _ = data.load(parsed)
    tokenizer = AutoTokenizer.from_pretrained(runs.assets() / "model")
    trainer = build.trainer(parsed, train, None, GPT2LMHeadModel(config), processing_class=tokenizer)
    with pytest.raises(ConfigError, match=message):
        data.check(trainer, train)


ENDS = "{% for m in messages %}{% generation %}{{ m.content }}<|user|>\n{% endgeneration %}{% endfor %}"


def test_rows_whose_last_token_does_not_end_answers_are_warned_about(arguments, summary, tmp_path, capsys):
    (tmp_path / "ends.jinja").write_text(ENDS)
    changes = {"chat_template_path": str(tmp_path / "ends.jinja")}
    summary(**changes)
    assert 'Set eos_token: "<|user|>"' in capsys.readouterr().err
    parsed = arguments(**changes)
    train, _ = data.load(parsed)
    trainer = build.trainer(parsed, train, None)
    ids = trainer.processing_class.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    trainer.model.generation_config.eos_token_id = ids
    data.check(trainer, train)
    summary()
    summary(**changes, eos_token="<|user|>")
    assert "every row ends" not in capsys.readouterr().err


# --- What `inspect` shows ---------------------------------------------------------------------------------------------


def inspected(tmp_path, command="sft", *words, **changes):
    ended = runs.lowmem("inspect", command, "--config", runs.write(tmp_path, command, **changes), *words)
    assert (ended.status, ended.err) == (0, "")
    assert not (tmp_path / "run").exists()
    return ended.out


def test_inspect_marks_trained_tokens(tmp_path, monkeypatch):
    shown = inspected(tmp_path, "sft", "--samples", 2, assistant_only_loss=True)
    assert "<|begin|><|user|>where 0<|assistant|>⟦the old cat sat<|end|>⟧\n" in shown
    assert shown.count(" tokens, trained on ") == 2 and "Trained on: the text in ⟦ ⟧. First rows: 16 rows" in shown
    monkeypatch.setattr(build, "FIRST_ROWS", 2)
    shown = inspected(tmp_path, "sft", "--samples", 4, "--device", "cpu")
    assert [f"row {n}: " in shown for n in range(1, 6)] == [True] * 4 + [False]
    assert "<|begin|>⟦<|user|>where 0<|assistant|>the old cat sat<|end|>⟧\n" in shown


def test_inspect_of_packed_rows_and_of_preferences(tmp_path):
    shown = inspected(tmp_path, "sft", "--samples", 1, packing=True, max_length=32)
    assert shown.count("<|begin|>⟦") >= 2  # the first token of a sequence is not predicted
    shown = inspected(tmp_path, "dpo", "--samples", 1)
    assert "prompt_ids: <|begin|><|user|>who<|assistant|>" in shown
    assert "⟦chosen_ids: the old cat sat<|end|>\n⟧" in shown and "rejected_ids: the new dog hid too" in shown
    assert "the old cat sat" in inspected(tmp_path, "grpo", "--samples", 1)
    shown = inspected(tmp_path, "kto", "--samples", 1)
    assert "⟦completion_ids: the old cat sat<|end|>\n⟧KL_completion_ids: " in shown
