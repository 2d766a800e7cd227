"""Data: what is read becomes what TRL takes, the loss is on exactly the answers, and each error says what to do."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from lowmem.errors import ConfigError, DataError
from lowmem.run import data
from lowmem.run.data import DataConfig, check_tokenized, for_tokenizer, load, segments, sft_arguments
from lowmem.run.tokenizers import CHAT_TEMPLATE, train_tokenizer

MARKLESS_TEMPLATE = re.sub(r"\{%- (end)?generation -%\}", "", CHAT_TEMPLATE)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(name, records):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


def rows(config):
    return [{key: value for key, value in row.items() if key != "source"} for row in load(config)[0]]


CHATS = [
    {"messages": [user(f"what is {n} plus {n}?"), assistant(f"it is {2 * n}"), user("thanks"), assistant("welcome")]}
    for n in range(6)
]
INSTRUCTIONS = [{"instruction": f"Double {n}", "input": "quickly", "output": f"{2 * n}"} for n in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["what is plus it is thanks welcome Double quickly 0123456789"] * 4, 320)


@pytest.fixture
def markless(tokenizer):
    copy = train_tokenizer(["unused"], 262, MARKLESS_TEMPLATE)
    copy._tokenizer = tokenizer._tokenizer
    return copy


def tiny_llama(tokenizer, **settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    )


def prepared(config, tokenizer, **model_settings):
    """The trainer, and the data set that was given to it."""
    train = for_tokenizer(load(config)[0], config, tokenizer)
    args = SFTConfig("out", bf16=False, use_cpu=True, report_to="none", **sft_arguments(config, train))
    model = tiny_llama(tokenizer, **model_settings)
    return SFTTrainer(model, args, train_dataset=train, processing_class=tokenizer), train


def answers_of(ids, tokenizer):
    """Labels found in another way: everything after `<|assistant|>`, up to and with the `<|end|>` that follows."""
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    labels, inside = [], False
    for token in ids:
        labels.append(token if inside else -100)
        inside = token == begin or (inside and token != end)
    return labels


# ------------------------------------------------------------------------------------------------- kinds and files

QUESTION_AND_ANSWER = {"prompt": [user("Add\n\n1 2")], "completion": [assistant("3")]}


@pytest.mark.parametrize(
    ("record", "row"),
    [
        (
            {"messages": [user("a"), assistant("b") | {"tool_calls": None, "name": "x"}], "input": 7, "tools": []},
            {"messages": [user("a"), assistant("b")]},
        ),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        (
            {"prompt": [user("a")], "completion": [assistant("b")]},
            {"prompt": [user("a")], "completion": [assistant("b")]},
        ),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, QUESTION_AND_ANSWER),
        (
            {"instruction": "Add", "input": None, "output": "3"},
            {"prompt": [user("Add")], "completion": [assistant("3")]},
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": [user("a"), assistant("b")]},
        ),
        (
            {"conversations": [{"from": who, "value": "a"} for who in ("system", "user", "assistant")]},
            {"messages": [{"role": "system", "content": "a"}, user("a"), assistant("a")]},
        ),
        ({"text": "a b"}, {"text": "a b"}),
    ],
)
def test_each_kind_is_recognised_and_converted(record, row):
    assert rows(DataConfig(write("d.jsonl", [record] * 2))) == [row] * 2


def test_every_format_gives_the_same_rows():
    import pyarrow.parquet

    write("d.jsonl", INSTRUCTIONS)
    write("lines.json", INSTRUCTIONS)
    Path("list.json").write_text("\ufeff" + json.dumps(INSTRUCTIONS, indent=2), encoding="utf-8")
    lines = [f'"{r["instruction"]}",{r["input"]},{r["output"]}' for r in INSTRUCTIONS]
    Path("d.csv").write_text("\n".join(["instruction,input,output", *lines]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(INSTRUCTIONS), "d.parquet")
    expected = rows(DataConfig("d.jsonl"))
    assert len(expected) == 6
    for name in ("lines.json", "list.json", "d.csv", "d.parquet"):
        assert rows(DataConfig(name)) == expected, name


def test_txt_gives_one_sample_per_paragraph():
    Path("d.txt").write_text("one\ntwo\n\n  \nthree\n")
    assert rows(DataConfig("d.txt")) == [{"text": "one\ntwo"}, {"text": "three"}]


def test_a_directory_is_read_in_the_order_of_names_and_each_row_has_its_source():
    write("folder/b.jsonl", [{"text": "second"}])
    write("folder/a.jsonl", [{"text": "first"}, {"text": "and"}])
    Path("folder/README.md").write_text("not data")
    train, held_out = load(DataConfig("folder"))
    assert train["text"][:] == ["first", "and", "second"]
    assert train["source"][:] == ["folder/a.jsonl, record 1", "folder/a.jsonl, record 2", "folder/b.jsonl, record 1"]
    assert held_out is None


def test_columns_are_renamed_and_the_rest_is_left_out():
    path = write("d.jsonl", [{"question": "q", "answer": "a", "text": "q a", "output": "other"}])
    config = DataConfig(path, kind="instruction", columns={"instruction": "question", "output": "answer"})
    assert rows(config) == [{"prompt": [user("q")], "completion": [assistant("a")]}]


def test_max_samples_takes_the_first_and_reads_no_further():
    Path("d.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nbroken')
    assert rows(DataConfig("d.jsonl", max_samples=2)) == [{"text": "a"}, {"text": "b"}]


def test_a_changed_file_is_read_again():
    config = DataConfig(write("d.jsonl", [{"text": "old"}]))
    assert rows(config) == [{"text": "old"}]
    write("d.jsonl", [{"text": "new text"}])
    assert rows(config) == [{"text": "new text"}]


def test_eval_fraction_splits_the_data_by_the_seed():
    config = DataConfig(write("d.jsonl", [{"text": str(n)} for n in range(20)]), eval_fraction=0.25)
    train, held_out = load(config)
    assert len(train) == 15 and len(held_out) == 5
    assert {*train["text"], *held_out["text"]} == {str(n) for n in range(20)}
    assert load(config)[1]["text"][:] == held_out["text"][:]
    assert set(load(replace(config, seed=1))[1]["text"]) != set(held_out["text"])


def test_eval_path_is_read_as_held_out_data():
    train, held_out = load(DataConfig(write("a.jsonl", [{"text": "a"}]), eval_path=write("b.jsonl", [{"text": "b"}])))
    assert (train["text"][:], held_out["text"][:]) == (["a"], ["b"])


def test_a_hub_name_is_loaded_with_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return Dataset.from_list([{"text": "from the Hub"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    train, _ = load(DataConfig("org/name:small", split="validation"))
    assert asked == [("org/name", "small", "validation")]
    assert train[:] == {"text": ["from the Hub"], "source": ["org/name:small, record 1"]}


def test_texts_yields_every_string():
    config = DataConfig(write("d.jsonl", CHATS[:1]))
    assert list(data.texts(load(config)[0])) == ["what is 0 plus 0?", "it is 0", "thanks", "welcome"]
    assert list(data.texts(load(DataConfig(write("t.jsonl", [{"text": "x"}])))[0])) == ["x"]


# -------------------------------------------------------------------------------------- what the loss is taken on


@pytest.mark.parametrize("records", [CHATS, INSTRUCTIONS], ids=["messages", "instruction"])
def test_only_answers_are_trained_on(records, tokenizer):
    trainer, train = prepared(DataConfig(write("d.jsonl", records)), tokenizer)
    assert len(trainer.train_dataset) == 6
    for row in trainer.train_dataset:
        assert row["labels"] == answers_of(row["input_ids"], tokenizer)
        assert any(label != -100 for label in row["labels"])
    counts = check_tokenized(trainer.train_dataset, train, DataConfig("d.jsonl"))
    labels = [label for row in trainer.train_dataset for label in row["labels"]]
    assert (counts.samples, counts.tokens) == (6, len(labels))
    assert counts.trained_tokens == sum(label != -100 for label in labels)
    assert (counts.dropped, counts.at_max_length, counts.without_target) == ((), 0, 0)


def test_every_answer_of_a_chat_is_trained_on_where_the_template_has_no_marks(tokenizer, markless):
    config = DataConfig(write("d.jsonl", CHATS))
    marked, _ = prepared(config, tokenizer)
    labelled, train = prepared(config, markless)
    assert train.column_names == ["source", "input_ids", "labels"]
    for ours, trls in zip(labelled.train_dataset, marked.train_dataset, strict=True):
        assert ours["input_ids"] == trls["input_ids"]
        assert ours["labels"] == trls["labels"] == answers_of(ours["input_ids"], tokenizer)
        assert tokenizer.decode([label for label in ours["labels"] if label != -100]).count("<|end|>") == 2


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "llama3_1", "gemma3", "phi3"])
def test_well_known_templates_are_trained_on_answers_and_their_end(name, markless):
    markless.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    trainer, _ = prepared(DataConfig(write("d.jsonl", CHATS)), markless)
    trained = [part.text for part in segments(trainer.train_dataset[1], markless) if part.trained]
    bare = [re.sub(r"<think>\n\n</think>\n\n|(\s*<[|\w]+>)+\n?$", "", text) for text in trained]
    assert bare == ["it is 2", "welcome"]
    assert all(re.search(r"<(end_of_turn|\|\w+\|)>\s*$", text) for text in trained)


def test_plain_strings_are_trained_on_their_completion_and_end(tokenizer):
    trainer, _ = prepared(DataConfig(write("d.jsonl", [{"prompt": "what is 1?", "completion": " it is 1"}])), tokenizer)
    parts = segments(trainer.train_dataset[0], tokenizer)
    assert [(part.text, part.trained) for part in parts] == [("<|begin|>what is 1?", False), (" it is 1<|end|>", True)]


@pytest.mark.parametrize("record", [CHATS[0], INSTRUCTIONS[0], {"prompt": "a", "completion": "b"}, {"text": "a b"}])
def test_everything_is_trained_on_where_that_is_asked(record, tokenizer):
    trainer, _ = prepared(DataConfig(write("d.jsonl", [record]), answer_only=False), tokenizer)
    assert trainer.train_dataset[0]["labels"] == trainer.train_dataset[0]["input_ids"]


def test_packed_rows_give_the_loss_of_their_samples(tokenizer):
    """Also that samples of a row don't see each other: large weights make the loss depend on all that is seen."""
    config = DataConfig(write("d.jsonl", CHATS), max_length=64)
    alone, _ = prepared(config, tokenizer, initializer_range=1.0)
    packed, train = prepared(replace(config, packing=True), tokenizer, initializer_range=1.0)
    assert len(packed.train_dataset) < len(alone.train_dataset)

    def loss_sum(trainer):
        total = 0.0
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            targets = (batch["labels"][:, 1:] != -100).sum()
            total += (trainer.model.eval()(**batch).loss * targets).item()
        return total

    assert loss_sum(packed) == pytest.approx(loss_sum(alone), rel=1e-5)
    counts = [check_tokenized(trainer.train_dataset, train, config) for trainer in (alone, packed)]
    assert counts[0] == counts[1]
    parts = segments(packed.train_dataset[0], tokenizer)
    assert all(part.text.endswith("<|end|>") for part in parts if part.trained)
    assert sum(part.tokens for part in parts) == len(packed.train_dataset[0]["input_ids"])


def test_packed_text_loses_no_token(tokenizer):
    path = write("d.jsonl", [{"text": "what is 12345 plus 67890? " * 10}] * 3)
    config = DataConfig(path, max_length=32, packing=True)
    trainer, train = prepared(config, tokenizer)
    ids = tokenizer(train[0]["text"] + "<|end|>")["input_ids"]
    assert sum(len(row["input_ids"]) for row in trainer.train_dataset) == 3 * len(ids)
    assert check_tokenized(trainer.train_dataset, train, config).tokens == 3 * len(ids)


def test_samples_cut_before_their_answer_are_listed(tokenizer):
    long = [user("what is " * 40), assistant("it is")]
    config = DataConfig(write("d.jsonl", [*CHATS[:2], {"messages": long}]), max_length=32)
    trainer, train = prepared(config, tokenizer)
    assert check_tokenized(trainer.train_dataset, train, config).dropped == ("d.jsonl, record 3",)

    packing = replace(config, packing=True)
    trainer, train = prepared(packing, tokenizer)
    counts = check_tokenized(trainer.train_dataset, train, packing)
    assert (counts.samples, counts.without_target, counts.at_max_length) == (3, 1, 1)


@pytest.mark.parametrize("packing", [False, True])
def test_data_without_any_target_is_refused(tokenizer, packing):
    config = DataConfig(write("d.jsonl", CHATS), max_length=4, packing=packing)
    trainer, train = prepared(config, tokenizer)
    with pytest.raises(DataError, match=r"data\.max_length"):
        check_tokenized(trainer.train_dataset, train, config)


def test_the_first_token_which_nothing_predicts_is_not_trained_on(tokenizer):
    config = DataConfig(write("d.jsonl", [{"text": "it is"}] * 2))
    trainer, train = prepared(config, tokenizer)
    assert segments(trainer.train_dataset[0], tokenizer) == [("<|begin|>", False, 1), ("it is<|end|>", True, 4)]
    counts = check_tokenized(trainer.train_dataset, train, config)
    assert (counts.tokens, counts.trained_tokens) == (10, 8)


# ------------------------------------------------------------------------------------- templates that cannot be used


def refused(records, tokenizer, **settings):
    config = DataConfig(write("d.jsonl", records), **settings)
    with pytest.raises(DataError) as caught:
        for_tokenizer(load(config)[0], config, tokenizer)
    return str(caught.value)


def test_a_chat_needs_a_template(markless):
    markless.chat_template = None
    for records in (CHATS, INSTRUCTIONS):
        message = refused(records, markless)
        assert "d.jsonl, record 1" in message and "model.chat_template" in message


def test_text_needs_an_end_token(markless):
    markless.eos_token = None
    assert "eos_token" in refused([{"text": "a"}], markless)


def test_a_template_that_rewrites_earlier_turns_is_refused(markless):
    markless.chat_template = "{{ messages | length }}" + MARKLESS_TEMPLATE
    message = refused(CHATS[:3], markless)
    assert "d.jsonl, record 1: the chat template rewrites earlier turns (message 2)" in message
    assert "data.answer_only" in message


def test_a_template_that_prompts_differently_than_it_answers_is_refused(markless):
    markless.chat_template = MARKLESS_TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"
    assert "rewrites earlier turns (message 2)" in refused(CHATS, markless)


def test_a_chat_that_begins_with_an_answer_needs_marks(tokenizer, markless):
    record = {"messages": [assistant("hello"), user("hi"), assistant("well?")]}
    assert "record 2: the chat begins with an answer" in refused([CHATS[0], record], markless)
    trainer, _ = prepared(DataConfig("d.jsonl"), tokenizer)
    assert [part.text for part in segments(trainer.train_dataset[1], tokenizer) if part.trained] == [
        "hello<|end|>",
        "well?<|end|>",
    ]


def test_marks_around_the_wrong_text_are_refused(markless):
    markless.chat_template = "{% generation %}" + MARKLESS_TEMPLATE + "{% endgeneration %}"
    assert "trains on a 'user' message" in refused(CHATS, markless)


def test_a_template_for_messages_of_parts_drops_plain_ones_and_is_refused(markless):
    markless.chat_template = (Path(trl.__file__).parent / "chat_templates" / "smolvlm.jinja").read_text()
    assert "drops a 'user' message" in refused(CHATS, markless)


def test_a_template_that_drops_an_answer_is_refused(markless):
    marked_end = "{% generation %}{{ messages[-1].content + eos_token }}{% endgeneration %}"
    markless.chat_template = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}" + marked_end
    assert "drops a 'assistant' message of the roles user, assistant, user, assistant" in refused(CHATS, markless)


@pytest.mark.parametrize("answer_only", [None, False])
def test_a_sequence_of_roles_that_the_template_refuses_names_its_record(markless, answer_only):
    markless.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + MARKLESS_TEMPLATE
    )
    record = {"messages": [{"role": "system", "content": "s"}, *CHATS[0]["messages"]]}
    message = refused([CHATS[0], record], markless, answer_only=answer_only)
    assert "d.jsonl, record 2: the chat template refuses the roles system, user" in message
    assert "no system here" in message and "model.chat_template" in message


# ---------------------------------------------------------------------------------------------------------- errors

OK = {"text": "a"}


@pytest.mark.parametrize(
    ("records", "settings", "parts"),
    [
        ([{"instruction": "a", "output": "b"}, {"instruction": "a", "input": "b"}], {},
         ["d.jsonl, record 2: 'output' is missing", "needs instruction and output", "(found: instruction, input)"]),
        ([INSTRUCTIONS[0] | {"input": 5}], {}, ["record 1", "'input' should be a valid string, found 5"]),
        ([{"prompt": "a"}], {"kind": "prompt_completion"}, ["record 1", "'completion' is missing"]),
        ([{"messages": [user("a"), assistant(5)]}], {},
         ["record 1, message 2 of 'messages': 'content' should be a valid string, found 5"]),
        ([{"messages": "hello"}], {}, ["record 1: 'messages' should be a valid list, found \"hello\""]),
        ([{"messages": []}], {}, ["record 1: 'messages' should have at least 1 item, found []"]),
        ([{"messages": ["hello"]}], {}, ["message 1 of 'messages': it should be a valid dictionary, found \"hello\""]),
        ([{"messages": [{"role": "user"}]}], {}, ["message 1 of 'messages': 'content' is missing (found: role)"]),
        ([{"messages": [{"role": "asistant", "content": "a"}]}], {},
         ["'role' should be 'system', ", "Did you mean 'assis"]),
        ([{"messages": [user("a")]}], {}, ["record 1", "no message is from the assistant"]),
        ([{"messages": [user("a"), assistant("b") | {"tool_calls": [{}]}]}], {}, ["message 2", "'tool_calls' is not"]),
        ([{"conversations": [{"from": "gpt", "value": "a", "weight": 0}]}], {}, ["message 1", "'weight' is not supp"]),
        ([{"messages": [user("a"), assistant("b") | {"weight": 0}]}], {}, ["message 2", "'weight' is not supported"]),
        ([{"messages": [user("a"), assistant("b")], "tools": "[]"}], {}, ["record 1", "'tools' is not supported"]),
        ([{"conversations": [{"from": "robot", "value": "a"}]}], {},
         ["'from' should be 'system', 'human'", "found \"robot\""]),
        ([{"prompt": [user("a")], "completion": [user("b")]}], {},
         ["message 1 of 'completion': 'role' should be 'assistant'"]),
        ([{"prompt": "a", "completion": "b"}, {"prompt": [user("a")], "completion": [assistant("b")]}], {},
         ["record 2", "strings in some records and messages in others"]),
        ([OK, {"text": None}], {}, ["record 2: 'text' should be a valid string, found null"]),
        ([OK, [1]], {}, ["record 2: should be an object with named fields, found a list"]),
        ([OK, CHATS[0]], {}, ["record 2", "kind 'messages', expected kind 'text'", "one kind"]),
        ([{"body": "a"}], {}, ["record 1", "no kind fits the fields body", "data.columns"]),
        ([{"instruction": "a", "output": "b", "text": "a b"}], {}, ["kinds instruction, text", "data.kind"]),
        ([OK], {"columns": {"text": "boddy"}}, ["takes 'text' from 'boddy'", "found: text"]),
        ([OK], {"answer_only": True}, ["text and has no answers", "data.answer_only"]),
        ([OK] * 3, {"eval_fraction": 0.1}, ["data.eval_fraction 0.1 of 3 records holds out no record", "0.333"]),
        ([], {}, ["d.jsonl: the file is empty"]),
    ],
)  # fmt: skip
def test_a_bad_record_is_named(records, settings, parts):
    config = DataConfig(write("d.jsonl", records), **settings)
    with pytest.raises(DataError) as caught:
        load(config)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("d.jsonl", '{"text": "a"}\n\n{"text": "b" "c"}\n', ["d.jsonl, line 3: not valid JSON", "column 14", "delete"]),
        ("d.json", '[{"text": "a"},\n{"text" 1}]', ["d.json, line 2: not valid JSON", "column 9"]),
        ("d.csv", "text,more\na,b\nc\n", ["d.csv, line 3", "the header's 2"]),
        ("d.csv", "text\na\n" + '"b', ["d.csv, line 3: not valid CSV", "Fix the line"]),
        ("d.parquet", "text", ["d.parquet: not a Parquet file"]),
        ("d.txt", "\n\n", ["d.txt: the file is empty"]),
        ("d.jsonl", b'{"text": "\xff"}', ["d.jsonl: not UTF-8", "Convert"]),
        ("d.jsom", "{}", ["data.path: d.jsom is of an unknown type '.jsom'", ".jsonl, .json, .csv, .parquet, .txt"]),
    ],
)
def test_a_bad_file_is_named(name, content, parts):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(DataConfig(name))
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_file_names_the_nearest_one():
    write("docs.jsonl", [OK])
    with pytest.raises(DataError, match=r"data\.path: dosc\.jsonl does not exist\. Did you mean 'docs\.jsonl'\?"):
        load(DataConfig("dosc.jsonl"))
    with pytest.raises(DataError, match=r"data\.eval_path: far/x\.jsonl does not exist\. The directory far does not"):
        load(DataConfig("docs.jsonl", eval_path="far/x.jsonl"))


def test_a_directory_without_data_is_refused():
    Path("folder").mkdir()
    with pytest.raises(DataError, match=r"the directory folder has no file of a known type \(\.jsonl"):
        load(DataConfig("folder"))


def test_a_hub_name_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load(DataConfig("nobody/nothing:small"))
    for part in ("data.path: 'nobody/nothing:small'", "'train'", "hf download --repo-type dataset nobody/nothing"):
        assert part in str(caught.value)


def test_held_out_data_of_another_kind_is_refused():
    config = DataConfig(write("a.jsonl", [OK]), eval_path=write("b.jsonl", CHATS))
    with pytest.raises(DataError, match=r"b\.jsonl has messages but a\.jsonl has text"):
        load(config)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"path": ""}, "path\n  String should have at least 1 character"),
        ({"kind": "chat"}, "kind\n  Input should be 'auto', 'messages'"),
        ({"columns": {"promt": "q"}}, "columns.promt.[key]\n  Input should be 'messages', 'prompt'"),
        ({"max_length": 1}, "max_length\n  Input should be greater than or equal to 2"),
        ({"max_length": 10.5}, "max_length\n  Input should be a valid integer"),
        ({"max_samples": 0}, "max_samples\n  Input should be greater than or equal to 1"),
        ({"workers": True}, "workers\n  Input should be a valid integer"),
        ({"seed": -1}, "seed\n  Input should be greater than or equal to 0"),
        ({"eval_fraction": "a tenth"}, "eval_fraction\n  Input should be a valid number"),
        ({"eval_fraction": 1.0}, "eval_fraction\n  Input should be less than 1"),
        ({"eval_fraction": 0.1, "eval_path": "x.jsonl"}, "both set"),
    ],
)
def test_a_value_out_of_range_is_named(settings, part):
    with pytest.raises(ValidationError) as caught:
        DataConfig(**{"path": "d.jsonl"} | settings)
    assert part in str(caught.value)


# ------------------------------------------------------------------------------------------------------- tokenizer


def test_a_trained_tokenizer_gives_any_text_back(tokenizer):
    for text in ("plain", "tab\tand\nline  two spaces", "Größe → 日本 🙂", " lead , trail . "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_same_texts_give_the_same_tokenizer(tmp_path):
    texts = [f"the {word} of {word[::-1]}" for word in ("alpha", "beta", "gamma", "delta")] * 3
    first, second = (train_tokenizer(iter(texts), 300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    first.save_pretrained(tmp_path)
    loaded = type(first).from_pretrained(tmp_path)
    chat = CHATS[0]["messages"]
    assert loaded.apply_chat_template(chat) == first.apply_chat_template(chat)
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|end|>", "<|pad|>", "<|begin|>")


def test_its_prompt_is_a_prefix_of_prompt_and_answer(tokenizer):
    for answer in ("it is", " it is", "\nit", "", "<|user|>"):
        chat = [user("what is "), assistant(answer)]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
        assert tokenizer.apply_chat_template(chat)["input_ids"][: len(prompt)] == prompt


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"vocab_size is 200; it must be at least 262"):
        train_tokenizer(["a"], 200)
