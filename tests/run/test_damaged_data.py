"""Damaged or odd files are refused with one short message that names file and line; no garbage is trained on."""

import os
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chats import CHATS, INSTRUCTIONS, assistant, rows, user, write

from lowmem.errors import DataError
from lowmem.run import readers
from lowmem.run.data import DataConfig, load

pytestmark = pytest.mark.usefixtures("empty_cache")


def refusal(name, content=None, **settings):
    """The message about a file of this content."""
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(DataConfig(name, **settings))
    message = str(caught.value)
    assert len(message) < 600
    message.encode()  # it can be printed
    assert not list(Path("cache").rglob("*incomplete*/"))
    return message


def parquet(name, table):
    pyarrow.parquet.write_table(table, name)
    return name


# ------------------------------------------------------------------------------------------------------------ text

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (DEEP, "line 2: not valid JSON (Nested too deeply at column 1)"),
        ('{"text": ' + DEEP, "line 2: not valid JSON (Nested too deeply"),
        ('{"text": "b", "n": ' + "1" * 10_000 + "}", "line 2: not valid JSON (Exceeds the limit (4300 digits)"),
        ('{"text": "\\ud800"}', "line 2: not valid JSON (Half a character, '\\ud800'"),
        ('{"text\\udc00": "b"}', "line 2: not valid JSON (Half a character"),
        ('{"text": NaN}', "record 2: 'text' should be a valid string, found NaN"),
        ('{"text": -Infinity}', "record 2: 'text' should be a valid string, found -Infinity"),
        ('{"text": "b", "text": "c", "x": {}}', "line 2: not valid JSON (Two values of 'text'"),
        ('{"text": "b", "x": [{"y": 1, "y": 2}]}', "line 2: not valid JSON (Two values of 'y'"),
        ('{"text": "b"} {"text": "c"}', "line 2: not valid JSON (Extra data at column 14)"),
        ('{"text": "b\0"}', "line 2: has a NUL byte"),
        ('{"text": ""}', "record 2: the text is empty, so there is nothing to train on"),
        ('{"text": " \\n"}', "record 2: the text is empty"),
    ],
)
def test_a_damaged_line_is_named(content, part):
    content = '{"text": "a"}\n' + content
    assert refusal("d.jsonl", content).startswith("d.jsonl, " + part)
    if "not valid JSON" in part and "Extra data" not in part:  # which a list tells as a missing comma
        assert part.rpartition(" at column")[0] in refusal("d.json", f"[{content.replace('}', '},', 1)}]")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [user("a"), assistant("")]},
        {"messages": [user("a"), assistant("b"), user("c"), assistant("\n")]},
        {"prompt": [user("a")], "completion": [assistant("")]},
        {"prompt": "a", "completion": " "},
        {"instruction": "a", "output": ""},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
    ],
)
def test_an_empty_answer_is_refused(record):
    assert "record 1: an answer is empty, so there is nothing to train on" in refusal(write("d.jsonl", [record]))


def test_a_list_of_records_is_parsed_as_json_does():
    for text in ("[]", " [ ] ", "\ufeff[]"):
        assert "no records" in refusal("d.json", text)
    for text in ("[", '[{"text": "a"}', '[{"text": "a"},', '[{"text": "a"},]', '[{"text": "a"} {"text": "b"}]', "[,]",
                 '[{"text": "a"}] x', '[{"text": "a"}][]', "[] []", '{\n"text": "a"\n}'):  # fmt: skip
        assert "not valid JSON" in refusal("d.json", text)


def test_a_record_of_many_fields_gives_a_short_message():
    fields = {f"field {number}": number for number in range(10_000)}
    assert "no kind fits the fields field 0, field 1" in refusal(write("d.jsonl", [fields]))
    assert "and 9,991 more" in refusal(write("d.jsonl", [{"prompt": "a"} | fields]), kind="prompt_completion")
    assert "Did you mean" not in refusal(write("d.jsonl", [fields]), columns={"text": "body"})
    assert "xxx ..." in refusal(write("d.jsonl", [{"x" * 10_000: 1}]))
    assert "'\\x1b[31m\\n'" in refusal(write("d.jsonl", [{"\x1b[31m\n": 1}]))


def test_a_chat_of_many_bad_messages_is_refused_at_once():
    """Sorting out what is wrong with every message took time that grew with the square of their number."""
    assert "message 1 of 'messages'" in refusal(write("d.jsonl", [{"messages": ["hello"] * 100_000}]))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.txt"])
def test_text_in_another_encoding_is_refused(name, encoding):
    content = {"d.csv": "text\nGröße\n", "d.txt": "a\nGröße"}.get(name, '{"text": "a"}\n{"text": "Größe"}\n')
    message = refusal(name, content.encode(encoding))
    assert message.startswith((f"{name}, line 1: ", f"{name}, line 2: ")) and "Convert the file to UTF-8" in message


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_separates_records(end):
    for name, text in (("d.jsonl", '{"text": "a"}\n\n{"text": "b"}'), ("d.csv", "text\na\n\nb"), ("d.txt", "a\n\nb\n")):
        Path(name).write_bytes(text.replace("\n", end).encode())
        assert rows(DataConfig(name)) == [{"text": "a"}, {"text": "b"}], name


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "d.csv: the file has no records"),
        ("text,id\n", "d.csv: the file has no records"),
        ("text,text\na,b\n", "line 1: the header has several columns 'text'"),
        ("text,id\na,1\nb,2,3\n", "line 3: 3 fields, unlike the header's 2"),
        ('text,id\na,1\n"b,2\nc,3\nd,4\n', "line 3: not valid CSV (unexpected end of data)"),
        ('text,id\na,1\n"b" c,2\n', "line 3: not valid CSV"),
        ("text,id\na,1\nb\0,2\n", "line 3: has a NUL byte"),
        ("text,id\na,1\n,2\n", "record 2: the text is empty"),
    ],
)
def test_a_damaged_csv_file_names_the_line(content, part):
    assert part in refusal("d.csv", content)


# --------------------------------------------------------------------------------------------------------- Parquet


def test_damaged_parquet_files_are_refused_or_read_as_they_were():
    """With checksums of pages, no damage of the data is read. The footer, with the names of the columns, has none."""
    table = pyarrow.Table.from_pylist(INSTRUCTIONS)
    pyarrow.parquet.write_table(table, "d.parquet", write_page_checksum=True, compression="none")
    content = Path("d.parquet").read_bytes()
    expected = rows(DataConfig("d.parquet"))
    footer = int.from_bytes(content[-8:-4], "little") + 8
    for position in range(0, len(content) - footer, 13):
        damaged = content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :]
        for name, damage in (("flipped.parquet", damaged), ("cut.parquet", content[:position])):
            Path(name).write_bytes(damage)
            try:
                assert rows(DataConfig(name)) == expected
            except DataError as error:
                assert name in str(error) and len(str(error)) < 600


@pytest.mark.parametrize(
    ("column", "part"),
    [
        (pyarrow.array([b"\xff"]), "record 1: 'text' should be a valid string, found \"b'"),
        (pyarrow.array([{"a": {"b": "c"}}]), "'text' should be a valid string, found {\"a\""),
        (pyarrow.array([1.5]).cast(pyarrow.decimal128(5, 1)), "'text' should be a valid string, found"),
        (pyarrow.array([2**62]).cast(pyarrow.timestamp("us")), "not a Parquet file that can be read"),
        (pyarrow.array([None], pyarrow.string()), "'text' should be a valid string, found null"),
        (pyarrow.array([], pyarrow.string()), "the file has no records"),
    ],
)
def test_a_column_of_another_type_is_refused(column, part):
    assert part in refusal(parquet("d.parquet", pyarrow.table({"text": column})))


def test_a_dictionary_column_holds_its_texts():
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    expected = [{"text": "a"}, {"text": "b"}, {"text": "a"}]
    assert rows(DataConfig(parquet("d.parquet", pyarrow.table({"text": column})))) == expected


def test_two_columns_of_one_name_are_refused():
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    assert "several columns 'text'" in refusal(parquet("d.parquet", table))


class Unpickled:
    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_pickled_extension_types_are_not_unpickled():
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Unpickled()),
    }
    field = pyarrow.field("text", pyarrow.string(), metadata=metadata)
    table = pyarrow.table([pyarrow.array(["a"])], schema=pyarrow.schema([field]))
    assert rows(DataConfig(parquet("d.parquet", table))) == [{"text": "a"}]
    assert not Path("unpickled").exists()


# ------------------------------------------------------------------------------------------ files that are not files


def test_what_is_not_a_file_is_refused():
    for name in ("pipe.jsonl", "folder/b.jsonl", "devices/zero.txt", "links/broken.csv", "links2/loop.json"):
        Path(name).parent.mkdir(exist_ok=True)
        write(f"{Path(name).parent}/a.jsonl", [{"text": "a"}])
    os.mkfifo("pipe.jsonl")
    Path("folder/b.jsonl").mkdir()
    Path("devices/zero.txt").symlink_to("/dev/zero")
    Path("links/broken.csv").symlink_to("nowhere")
    Path("links2/loop.json").symlink_to("loop.json")
    assert "pipe.jsonl is not a file but a directory, a pipe or a device" in refusal("pipe.jsonl")
    assert "folder/b.jsonl is not a file" in refusal("folder")
    assert "devices/zero.txt is not a file" in refusal("devices")
    assert "No such file or directory: 'links/broken.csv'" in refusal("links")
    assert "links2/loop.json" in refusal("links2")
    os.mkfifo("org")
    assert "unknown type" in refusal("org")


@pytest.fixture
def unreadable():
    """A function that takes the permission to read a path; as root may read everything, another user takes over."""
    user_id = os.geteuid()

    def take(*paths):
        for path in paths:
            Path(path).chmod(0)
        if user_id == 0:
            for folder in (Path.cwd(), *Path.cwd().parents[:-2]):
                folder.chmod(0o777)
            os.seteuid(65534)

    yield take
    os.seteuid(user_id)


def test_what_may_not_be_read_is_refused(unreadable):
    write("d.jsonl", [{"text": "a"}])
    write("folder/d.jsonl", [{"text": "a"}])
    unreadable("d.jsonl", "folder")
    assert "d.jsonl cannot be read: Permission denied" in refusal("d.jsonl")
    assert "folder cannot be read: [Errno 13] Permission denied" in refusal("folder")
    assert "folder/d.jsonl cannot be read: [Errno 13] Permission denied" in refusal("folder/d.jsonl")


def test_odd_paths_are_refused():
    for path in ("~nobody-of-this-name/d.jsonl", "x" * 5000, "x\0y.jsonl", "/nowhere/" + "y" * 300, "d.jsonl/", "\n"):
        assert refusal(path).startswith("data.path: ")


def test_names_of_files_that_are_not_unicode():
    name = os.fsdecode(b"\xff.jsonl")
    write("folder/" + name, [{"text": "a"}])
    assert load(DataConfig("folder"))[0]["source"][:] == ["folder/\\udcff.jsonl, record 1"]
    write("folder/" + name, [{"text": ""}])
    assert "folder/\\udcff.jsonl, record 1" in refusal("folder")


@pytest.mark.parametrize("name", ["../x", "./x", ".x/y", "x", "csv", "text", "../x:y", "a/b/c", "/etc/x", "folder:x"])
def test_a_name_on_the_hub_is_no_path(name, monkeypatch):
    """`datasets` reads local files where a name is that of a directory, or of one of its readers, such as "csv"."""
    monkeypatch.setattr("datasets.load_dataset", None)
    write("folder/sub.jsonl", [{"text": "a"}])
    assert "does not exist" in refusal(name)


# -------------------------------------------------------------------------------------------- what is not trained on


@pytest.mark.parametrize("field", ["input_ids", "tools", "images", "chat_template_kwargs"])
def test_what_would_change_the_tokens_is_refused(field):
    assert f"record 1: '{field}' is not supported" in refusal(write("d.jsonl", [CHATS[0] | {field: [1, 2]}]))


def test_records_are_only_data():
    record = {
        "text": "a",
        "labels": [10**9],
        "__class__": "os.system",
        "__reduce__": ["touch x"],
        "source": "elsewhere",
    }
    assert rows(DataConfig(write("d.json", [record]))) == [{"text": "a"}]


# ------------------------------------------------------------------------------------------------------------ cache


def test_a_file_of_the_same_size_and_time_is_read_again():
    times = []
    for text in ("one", "two"):
        write("d.jsonl", [{"text": text}])
        os.utime("d.jsonl", (1e9, 1e9))
        times.append((Path("d.jsonl").stat().st_size, Path("d.jsonl").stat().st_mtime_ns))
        assert rows(DataConfig("d.jsonl")) == [{"text": text}]
    assert times[0] == times[1]


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch):
    def read(path):
        yield from reading(path)
        write("d.jsonl", [{"text": "changed"}])

    reading = readers.read
    monkeypatch.setattr(readers, "read", read)
    assert "d.jsonl was changed while it was read" in refusal(write("d.jsonl", [{"text": "a"}]))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    Path("file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("file/cache"))
    message = refusal(write("d.jsonl", [{"text": "a"}]))
    assert "data.path: the rows of d.jsonl cannot be cached in file/cache" in message and "HF_DATASETS_CACHE" in message
