"""The data of a run: loaded by `datasets` as TRL does, looked at before training, and recognized when it is resumed."""

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from transformers import (
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from trl import get_dataset

from lowmem.errors import ConfigError, DataError, LowmemError
from lowmem.hf.layers import embedding, positions
from lowmem.run import build
from lowmem.run.arguments import Arguments, reason, refused

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


class Segment(NamedTuple):
    """Consecutive tokens of a row that all contribute to the loss, or none of which does."""

    text: str
    trained: bool
    tokens: int


def load(arguments: Arguments) -> tuple[Any, Any]:
    """The training data and the evaluation data, or None, as `datasets` has them.

    Raises:
        ConfigError: no data set is named, or it has no such split.
        DataError: `datasets` cannot load it.
    """
    script, mixture = arguments.script, arguments.mixture
    name = script.dataset_name
    if not mixture.datasets and name is None:
        raise ConfigError("no data: set dataset_name, or datasets: [{path: json, data_files: chats.jsonl}]")
    if not mixture.datasets and (builder := _BUILDERS.get(Path(name).suffix.lower())):
        raise ConfigError(
            f"dataset_name {name!r} is the name of a file; write datasets: [{{path: {builder}, data_files: {name}}}]"
        )
    set_seed(arguments.training.seed)  # TRL splits by the state of NumPy, which has to be that of every rank and start
    evaluates = arguments.training.eval_strategy != "no"
    if not mixture.datasets:
        with _loading():
            splits = datasets.load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
        names = {"dataset_train_split": script.dataset_train_split, "dataset_test_split": script.dataset_test_split}
        splits = [_split(splits, split, key) for key, split in names.items() if evaluates or "train" in key]
        train, *evaluation = [_checked(split, arguments) for split in splits]
        return train, evaluation[0] if evaluation else None
    train = _mixture(arguments, mixture)
    if mixture.test_split_size is not None:
        with _loading():
            splits = train.train_test_split(test_size=mixture.test_split_size)
        return splits["train"], splits["test"] if evaluates else None
    if not evaluates:
        return train, None
    test = script.dataset_test_split
    entries = [replace(entry, split=test) for entry in mixture.datasets if test in (entry.data_files or ())]
    entries = [entry for entry in entries if isinstance(entry.data_files, dict)]
    if not entries:
        raise ConfigError(
            f"datasets: no entry has data_files of a split {test!r} to evaluate on. Write data_files: {{train: a.jsonl, "
            f"{test}: b.jsonl}}, or set test_split_size, such as 0.05, to hold out a part of the data"
        )
    return train, _mixture(arguments, replace(mixture, datasets=entries))


def _mixture(arguments: Arguments, mixture: Any) -> Any:
    """The rows of all entries of `datasets`, each looked at by itself."""
    parts = []
    for entry in mixture.datasets:
        with _loading(entry):
            alone = replace(mixture, datasets=[replace(entry, fraction=None)], test_split_size=None)
            parts.append(_checked(get_dataset(alone)["train"], arguments, entry))
    if len(parts) == 1:
        return parts[0]
    with _loading():
        return get_dataset(replace(mixture, test_split_size=None))["train"]


@contextmanager
def _loading(entry: Any = None) -> Iterator[None]:
    """Raises `DataError` where `datasets` cannot load data, with the line of the file if one is at fault."""
    try:
        yield
    except LowmemError:
        raise
    except Exception as error:  # each reader of `datasets` raises its own types
        if (fault := _unreadable(entry)) is not None:
            raise DataError(fault) from error
        cause = error.__cause__ or error.__context__
        because = f" ({reason(cause)})" if cause is not None else ""
        because = " (a file without rows)" if isinstance(error, StopIteration) else because
        raise DataError(f"the data cannot be loaded: {reason(error)}{because}") from error


def _files(entry: Any) -> list[Path]:
    """The local files of an entry, in the order of their rows; none if that is unknown."""
    try:
        files = datasets.load_dataset_builder(entry.path, data_files=entry.data_files).config.data_files[entry.split]
    except Exception:  # it has none, or is not where it should be
        return []
    return [Path(file) for file in files if Path(file).is_file()]


def _unreadable(entry: Any) -> str | None:
    """Says which line of an entry's files cannot be read, or which file has other columns than the first."""
    columns: dict[Path, set[str]] = {}
    for file in _files(entry):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    line.decode()
                    if file.suffix == ".jsonl" and line.strip():
                        json.dumps(row := json.loads(line), ensure_ascii=False).encode()  # a surrogate has no encoding
                        columns.setdefault(file, set()).update(row)
                except UnicodeDecodeError as error:
                    return f"{file}, line {number}: {error}. Convert the file: iconv -f LATIN1 -t UTF-8"
                except (ValueError, TypeError) as error:
                    return f"{file}, line {number} cannot be read: {reason(error)}"
    first = next(iter(columns), None)
    for file, names in columns.items():
        if extra := names - columns[first]:
            return (
                f"{file} has {', '.join(sorted(extra))}, which {first} does not have. Name each file in its own entry of "
                "datasets, or first the file that has all columns"
            )
    return None


def _split(splits: Any, name: str, key: str) -> Any:
    if name not in splits:
        raise ConfigError(f"the data has no split {name!r}. It has {', '.join(splits)}; set {key} to one")
    return splits[name]


def _checked(split: Any, arguments: Arguments, entry: Any = None) -> Any:
    """A data set whose rows have what their command reads. Those of a stream are looked at as they come.

    Raises:
        DataError: it has no rows, a column is missing, or a row has something else in it.
    """
    if (example := next(iter(split), None)) is None:
        raise DataError(f"the split {entry.split if entry else split.split!r} of the data has no rows")
    names = _columns(arguments, example)

    def look(values: Any, number: int) -> None:
        for name in names:
            if fault := _fault(name, values[name], example[name]):
                raise DataError(f"{_place(entry, number)}: {fault}. Correct the row, or leave it out")

    if not isinstance(split, datasets.Dataset):
        return split.map(look, with_indices=True, features=split.features)
    number = 0
    for batch in split.select_columns(names).iter(batch_size=1000) if names else ():
        for row in zip(*batch.values(), strict=True):
            look(dict(zip(batch, row, strict=True)), number)
            number += 1
    return split


def _columns(arguments: Arguments, example: Mapping[str, Any]) -> list[str]:
    """The columns that the trainer of a command tokenizes, where it does."""
    command = arguments.command
    if any(name.endswith("_ids") for name in example) or "images" in example or "image" in example:
        return []  # tokenized, or read by a processor
    pair, prompt = ["chosen", "rejected"], ["prompt"] if "prompt" in example else []
    chats = [name for name in ("messages", "conversations") if name in example]
    names = {
        "sft": [*prompt, "completion"] if prompt else chats[:1] or [arguments.training.dataset_text_field]
        if command == "sft" else [],
        "dpo": [*prompt, *pair], "reward": [*prompt, *pair],
        "kto": [*prompt, *pair] if "chosen" in example else ["prompt", "completion", "label"],
    }.get(command, ["prompt"])  # fmt: skip
    for name in names:
        if name not in example:
            advice = f", or select one column: columns: [{chats[0]}]" if command == "sft" and chats else ""
            raise DataError(
                f"the data has no column {name!r}, which {command} needs. It has {', '.join(example)}{advice}"
            )
    return names


def _fault(name: str, value: Any, usual: Any) -> str | None:
    """Says why a text, a conversation or a label cannot be trained on, where it is not of the kind of the first row."""
    if value is None or not isinstance(value, str | list | bool | int):
        return f"{name} is {'missing or null' if value is None else repr(value)[:80]}"
    if isinstance(value, str) != isinstance(usual, str) or (isinstance(value, int) and name != "label"):
        return f"{name} is {repr(value)[:80]}, where a {'text' if name != 'messages' else 'list of messages'} is expected"
    if value == []:
        return f"{name} has no messages"
    for number, message in enumerate(value if isinstance(value, list) else (), start=1):
        if not isinstance(message, dict) or not (message.get("role") or message.get("from")):
            return f"message {number} of {name} has no role"
        if all(part is None for key, part in message.items() if key not in ("role", "from")):
            return f"message {number} of {name} has no content"
    return None


def _place(entry: Any, number: int) -> str:
    """A row in the user's files: "row 3 of chats.jsonl"."""
    files = _files(entry)
    for file in files:
        count = len(datasets.load_dataset(entry.path, data_files=str(file), split="train")) if files[1:] else number + 1
        if number < count:
            return f"row {number + 1} of {file}"
        number -= count
    return f"row {number + 1} of {entry.path if entry else 'the data'}"


def first(train: Any) -> Any:
    """The rows that `inspect` shows and counts, as a data set in memory."""
    if isinstance(train, datasets.Dataset):
        return train.select(range(min(build.FIRST_ROWS, len(train))))
    return datasets.Dataset.from_list(list(train.take(build.FIRST_ROWS)))


def stand_in(arguments: Arguments, train: Any) -> Any:
    """The trainer of a run with the first rows alone and a small model in place of its own, whose tokenizer it has."""
    name, args = arguments.model.model_name_or_path, copy.copy(arguments.training)
    args.deepspeed = args.fsdp = None
    args.report_to, args.eval_strategy = [], "no"
    with refused("model_name_or_path"):
        tokenizer = AutoProcessor.from_pretrained(
            name, revision=arguments.model.model_revision, trust_remote_code=arguments.training.trust_remote_code
        )
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(getattr(tokenizer, "tokenizer", tokenizer)), num_labels=1, **size)
    model = (LlamaForSequenceClassification if arguments.command == "reward" else LlamaForCausalLM)(config)
    with tempfile.TemporaryDirectory() as folder:  # a trainer creates its output folder, and loads a reference model
        args.output_dir = model.config._name_or_path = folder
        model.save_pretrained(folder)
        return build.trainer(replace(arguments, training=args), first(train), None, model, processing_class=tokenizer)


def check(trainer: Any, loaded: Any, evaluation: Any = None) -> str:
    """Looks at what a trainer has made of its data, and says how much that is.

    Args:
        trainer: with its data tokenized.
        loaded: the training data before that.
        evaluation: the evaluation data before that, or None.

    Raises:
        ConfigError: the model has no row in its embedding for a token, or too few positions for a row.
        DataError: no token contributes to the loss, or no batch is complete.
    """
    args = trainer.args
    counts = _counts(trainer, trainer.train_dataset, loaded, "train", args.train_batch_size)
    if evaluation is None:
        return counts
    return f"{counts}; evaluation: {_counts(trainer, trainer.eval_dataset, evaluation, 'eval', args.eval_batch_size)}"


def _counts(trainer: Any, tokenized: Any, loaded: Any, name: str, batch_size: int) -> str:
    """Rows, tokens and the tokens that contribute to the loss, of one of a trainer's two data sets."""
    if not isinstance(tokenized, datasets.Dataset):
        return f"streamed; columns {', '.join(next(iter(tokenized)))}"
    args, limit = trainer.args, getattr(trainer.args, "max_length", None)
    which = "" if name == "train" else " of the evaluation data"
    if len(tokenized) == 0:
        raise DataError(
            f"none of {len(loaded):,} rows{which} is left: nothing of them lies within max_length={limit} tokens. Raise "
            "max_length, or look at the rows with `lowmem inspect`"
        )
    if args.dataloader_drop_last and len(tokenized) < (batch := batch_size * args.world_size):
        raise DataError(
            f"{len(tokenized):,} rows{which} are fewer than a batch of {batch:,}, and dataloader_drop_last leaves out a "
            "batch that is not complete. Omit dataloader_drop_last, or reduce the batch"
        )
    lengths = _lengths(trainer, tokenized)
    if "labels" not in tokenized.column_names:
        cut = sum(np.maximum(row - (limit or row.max()), 0).sum() for row in lengths)
        counts = f"{len(tokenized):,} rows{_missing(loaded, tokenized)}{_cut(int(cut), limit)}"
        return f"{counts}; columns {', '.join(tokenized.column_names)}"
    tokens = trained = empty = 0
    for batch in tokenized.with_format("arrow").iter(batch_size=1000):
        labels = batch["labels"].combine_chunks()
        borders = np.append(0, np.cumsum(pc.list_value_length(labels)))
        parts = pc.list_flatten(batch["seq_lengths"]) if "seq_lengths" in tokenized.column_names else np.diff(borders)
        contributes = np.append(labels.flatten().to_numpy() != -100, False)
        contributes[np.append(0, np.cumsum(parts))] = False  # nothing comes before the first token of a sample
        sums = np.append(0, np.cumsum(contributes))[borders]
        tokens, trained, empty = tokens + borders[-1], trained + sums[-1], empty + np.sum(np.diff(sums) == 0)
    if trained == 0:
        raise DataError(
            f"none of the {tokens:,} tokens in {len(loaded):,} rows{which} contributes to the loss. Raise max_length, or "
            "look at the rows with `lowmem inspect`"
        )
    whole = getattr(trainer, "untruncated", {}).get(name)
    before = int(np.sum(_lengths(trainer, whole))) if whole is not None else tokens
    rows = f"{len(loaded):,} rows" + _missing(loaded, tokenized)
    if args.packing:
        rows = f"{len(loaded):,} rows packed into {len(tokenized):,}"
    rows += f", {empty:,} without a token to train on" if empty else ""
    return f"{rows}, {tokens:,} tokens{_cut(before - tokens, limit)}, loss on {trained:,} ({trained / tokens:.0%})"


def _missing(loaded: Any, tokenized: Any) -> str:
    missing = len(loaded) - len(tokenized)
    return f", {missing:,} left out, of which nothing to train on lies within max_length" if missing > 0 else ""


def _cut(tokens: int, limit: int | None) -> str:
    return f" and {tokens:,} cut off by max_length={limit}" if tokens else ""


def _lengths(trainer: Any, tokenized: Any) -> list[Any]:
    """The tokens of each row, once for each answer, if the model has a position and an embedding for all of them."""
    columns = [name for name in tokenized.column_names if name.endswith("_ids")]
    table, places = embedding(trainer.model, "input"), positions(trainer.model)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    largest, lengths = tokenizer.pad_token_id or 0, dict.fromkeys(columns, np.zeros(0, dtype=np.int64))
    for batch in tokenized.select_columns(columns).with_format("arrow").iter(batch_size=1000) if columns else ():
        for name in columns:
            largest = max(largest, pc.max(pc.list_flatten(batch[name])).as_py() or 0)
            lengths[name] = np.append(lengths[name], pc.list_value_length(batch[name]))
    if largest >= (rows := getattr(table, "num_embeddings", largest + 1)):
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            f"token {largest}, {token!r}, of the tokenizer has no row in the embedding of the model, which has {rows}. "
            "Use the tokenizer of the model; if it is the pad token, set pad_token to another one, such as "
            f"{tokenizer.eos_token!r}, or save the model after model.resize_token_embeddings({len(tokenizer)})"
        )
    prompt = lengths.pop("prompt_ids", 0)
    sums = [prompt + length for length in lengths.values()]
    longest = max((int(row.max(initial=0)) for row in sums), default=0)
    if places is not None and min(longest, getattr(trainer.args, "max_length", None) or longest) > places:
        raise ConfigError(f"a row has {longest:,} tokens, and the model {places:,} positions; set max_length: {places}")
    return sums


def rows(trainer: Any, count: int) -> Iterator[list[Segment]]:
    """The first rows of a trainer's data in words: each column of tokens, split where the loss begins or ends."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    for row in islice(trainer.train_dataset, count):
        if "labels" in row:
            yield segments(row, tokenizer)
            continue
        columns = [name for name in row if name.endswith(("_ids", "prompt", "completion", "chosen", "rejected"))]
        parts = []
        for name in columns:
            tokens = row[name] if name.endswith("_ids") and row[name] else []
            text = tokenizer.decode(tokens) if name.endswith("_ids") else str(row[name])
            parts.append(Segment(f"{name}: {text}\n", "prompt" not in name, len(tokens)))
        yield parts


def segments(row: Mapping[str, Any], tokenizer: Any) -> list[Segment]:
    """Splits one tokenized row (`input_ids`, `labels`; packed: `seq_lengths`) where the loss begins or ends."""
    starts = set(accumulate(row.get("seq_lengths") or (), initial=0))  # nothing comes before the first token
    trained = [label != -100 and position not in starts for position, label in enumerate(row["labels"])]
    runs = groupby(zip(trained, row["input_ids"], strict=True), key=lambda pair: pair[0])
    parts = ((state, [token for _, token in run]) for state, run in runs)
    return [Segment(tokenizer.decode(ids), state, len(ids)) for state, ids in parts]


class DataFingerprint(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves a fingerprint of the training data in each checkpoint, and refuses to resume with other data."""

    fingerprint: str | None = None

    def state(self) -> dict[str, Any]:
        """Returns the entry of this callback in `trainer_state.json`."""
        return {"args": {}, "attributes": {"fingerprint": self.fingerprint}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Raises `DataError` if the checkpoint that is resumed was trained on other data."""
        data = train_dataloader.dataset
        self.fingerprint = fingerprint(data) if isinstance(data, datasets.Dataset) else None
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and saved["attributes"]["fingerprint"] not in (None, self.fingerprint):
            raise DataError(
                "the data, as it is tokenized now, is not what this checkpoint was trained on. Restore the data and "
                "its settings (max_length, the chat template) to continue the run, or start another from these "
                "weights: model_name_or_path=CHECKPOINT and another output_dir"
            )


def fingerprint(dataset: datasets.Dataset) -> str:
    """A hash of every row in order, which depends on what is trained on alone, and not on how `datasets` holds it."""
    names = sorted({"input_ids", "labels", "seq_lengths"} & set(dataset.column_names)) or sorted(dataset.column_names)
    digest = xxhash.xxh3_128(" ".join(names).encode())
    for batch in dataset.select_columns(names).with_format("arrow").iter(batch_size=1000):
        for name in names:
            column = batch[name].combine_chunks()
            is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
            if is_list and pa.types.is_integer(column.type.value_type):
                digest.update(pc.list_value_length(column).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
                digest.update(column.flatten().to_numpy(zero_copy_only=False).astype("<i8").tobytes())
            else:
                digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()
