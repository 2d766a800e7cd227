"""Every format and kind of record becomes what TRL takes, and each error names the record and says what to do."""

import json
from pathlib import Path

import pytest
from chats import CHATS, INSTRUCTIONS, assistant, rows, user, write
from datasets import Dataset

from lowmem.errors import DataError
from lowmem.run.data import DataConfig, load

pytestmark = pytest.mark.usefixtures("empty_cache")

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


def test_a_hub_name_is_loaded_with_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return Dataset.from_list([{"text": "from the Hub"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    train, _ = load(DataConfig("org/name:small", split="validation"))
    assert asked == [("org/name", "small", "validation")]
    assert train[:] == {"text": ["from the Hub"], "source": ["org/name:small, record 1"]}


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
        ([], {}, ["d.jsonl: the file has no records"]),
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
        ("d.txt", "\n\n", ["d.txt: the file has no records"]),
        ("d.jsonl", b'{"text": "\xff"}', ["d.jsonl, line 1: not UTF-8", "Convert"]),
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
