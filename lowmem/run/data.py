"""The data of a run: loaded with `datasets` as TRL does, checked before training, and shown by `inspect`."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from torch import nn
from transformers import (
    AutoProcessor,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    set_seed,
)
from trl import get_dataset

from lowmem.errors import ConfigError, DataError
from lowmem.hf.layers import embedding
from lowmem.run import build, images
from lowmem.run.boundary import convert_errors, reason
from lowmem.run.recipe import Recipe
from lowmem.run.terminal import warn

# Columns of tokens that TRL's trainers create.
_IDS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")

# Names of learned position embeddings in transformers 5.23.
_POSITIONS = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed")

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


class Segment(NamedTuple):
    """Consecutive tokens of a row that all contribute to the loss (`trained`), or all do not."""

    text: str
    trained: bool
    tokens: int


def load(recipe: Recipe) -> tuple[Any, Any]:
    """Loads the training data and, if the run evaluates, the evaluation data with `datasets`.

    Raises:
        ConfigError: no data set is named, or it does not have such a split.
        DataError: `datasets` cannot load it.
    """
    script, mixture = recipe.script, recipe.mixture
    if not mixture.datasets and script.dataset_name is None:
        raise ConfigError("no data: set dataset_name, or datasets: [{path: json, data_files: chats.jsonl}]")
    for name in [entry.path for entry in mixture.datasets] or [script.dataset_name]:
        if builder := _BUILDERS.get(Path(name).suffix.lower()):
            raise ConfigError(f"{name!r} is a file; write datasets: [{{path: {builder}, data_files: {name}}}]")
    set_seed(recipe.training.seed)  # TRL splits by NumPy's random state, which must be the same on every rank and start
    try:
        splits = _load_splits(script, mixture)
    except Exception as error:  # each reader of `datasets` raises its own types
        raise DataError(f"the data cannot be loaded: {_fault(mixture.datasets) or _cause(error)}") from error
    train = _require_split(splits, script.dataset_train_split, "dataset_train_split", "")
    if recipe.training.eval_strategy == "no":
        if share := mixture.test_split_size:
            warn(f'test_split_size={share} has no effect with eval_strategy="no". Omit it, or set eval_strategy: steps')
        return train, None
    test = script.dataset_test_split
    advice = f"; or name its file in data_files: {{train: FILE, {test}: FILE}}, or set test_split_size, such as 0.05"
    return train, _require_split(splits, test, "dataset_test_split", advice if mixture.datasets else "")


def _cause(error: Exception) -> str:
    if isinstance(error, StopIteration):
        return f"{reason(error)} (a file without rows)"
    cause = error.__cause__ or error.__context__
    text = reason(error) if cause is None else f"{reason(error)} ({reason(cause)})"
    if "cast" in text or "aligned" in text:
        text += ". List files with different keys in one entry of datasets, starting with the file that has all keys"
    return text


def _load_splits(script: Any, mixture: Any) -> Any:
    """Returns the splits of the data: TRL's splits, and evaluation splits that `data_files` of the mixture names."""
    if mixture.datasets:
        splits, test = get_dataset(mixture), script.dataset_test_split
        named = [entry for entry in mixture.datasets if isinstance(entry.data_files, dict) and test in entry.data_files]
        if named and test not in splits:
            entries = [replace(entry, split=test) for entry in named]
            splits[test] = get_dataset(replace(mixture, datasets=entries, test_split_size=None))["train"]
    else:
        splits = datasets.load_dataset(
            script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
        )
    for split in splits.values():
        if isinstance(split, datasets.Dataset):
            split.data.validate(full=True)  # text in other encodings may have been loaded
    return splits


def _require_split(splits: Any, name: str, key: str, more: str) -> Any:
    if name not in splits:
        raise ConfigError(f"the data has no split {name!r}. It has {', '.join(splits)}. Set {key} to one of them{more}")
    if next(iter(splits[name]), None) is None:
        raise DataError(f"the split {name!r} of the data has no rows")
    return splits[name]


def _fault(entries: list[Any]) -> str | None:
    """Finds the first line in local files that is not UTF-8 or, in a .jsonl file, not a JSON object."""
    for path in (path for entry in entries for path in _files_of_lines(entry)):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    text = line.decode()
                    row = json.loads(text) if path.suffix == ".jsonl" and text.strip() else {}
                    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair has no encoding
                    if not isinstance(row, dict):
                        raise ValueError('it is not a JSON object, such as {"text": "..."}')
                except ValueError as error:
                    return f"{path}, line {number}: {reason(error)}"
    return None


def _files_of_lines(entry: Any) -> list[Path]:
    with contextlib.suppress(Exception):  # it has no local files
        builder = datasets.load_dataset_builder(entry.path, data_files=entry.data_files)
        paths = map(Path, builder.config.data_files[entry.split])
        return [path for path in paths if path.suffix in (".jsonl", ".csv", ".txt") and path.is_file()]
    return []


def first(train: Any, samples: int = 0) -> Any:
    """Returns the rows that `inspect` counts, including the `samples` that it shows, as a data set in memory."""
    count = max(build.FIRST_ROWS, samples)
    if isinstance(train, datasets.Dataset):
        return train.select(range(min(count, len(train))))
    return datasets.Dataset.from_list(list(train.take(count)))


def tiny_trainer(recipe: Recipe, train: Any) -> Any:
    """Creates the trainer of a run for these rows, with the run's tokenizer and a tiny model."""
    with convert_errors("model_name_or_path"):
        tokenizer = AutoProcessor.from_pretrained(recipe.model.model_name_or_path, **recipe.loading_options)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    words = len(getattr(tokenizer, "tokenizer", tokenizer))
    config = LlamaConfig(vocab_size=words, num_labels=1, eos_token_id=None, **size)
    model = (LlamaForSequenceClassification if recipe.command == "reward" else LlamaForCausalLM)(config)
    with tempfile.TemporaryDirectory() as folder:  # a trainer creates its output folder, and loads a reference model
        model.config._name_or_path = folder
        model.save_pretrained(folder)
        for file in ("config.json", "generation_config.json"):  # a model may have only the first
            with contextlib.suppress(OSError):
                name, revision = recipe.model.model_name_or_path, recipe.model.model_revision
                model.generation_config = GenerationConfig.from_pretrained(name, file, revision=revision)
        return build.trainer(recipe.probe(folder), train, None, model, processing_class=tokenizer)


def check(trainer: Any, loaded: Any, evaluation: Any = None) -> str:
    """Checks the tokenized data of a trainer, and describes its counts. `loaded` and `evaluation` are the data before
    tokenization.

    Raises:
        ConfigError: a token is outside the model's embedding, or a row is longer than its positions.
        DataError: no token contributes to the loss, or the rows do not fill a batch.
    """
    counts = _counts(trainer, loaded, "train")
    return counts if evaluation is None else f"{counts}; evaluation: {_counts(trainer, evaluation, 'eval')}"


def _counts(trainer: Any, loaded: Any, name: str) -> str:
    """Checks and describes the training data (`name` is "train") or the evaluation data ("eval")."""
    args, tokenized = trainer.args, getattr(trainer, f"{name}_dataset")
    if not isinstance(tokenized, datasets.Dataset):
        return f"streamed; columns {', '.join(next(iter(tokenized)))}"
    limit = getattr(args, "max_length", None)
    rows = f"{len(loaded):,} rows"
    which = " of the evaluation data" if name == "eval" else ""
    if len(tokenized) == 0:
        raise DataError(f"max_length={limit} removes all {rows}{which}. Increase it, or check the format of the rows")
    batch_size = getattr(args, f"{name}_batch_size") * args.world_size
    if args.dataloader_drop_last and len(tokenized) < batch_size:
        raise DataError(f"{rows}{which} do not fill a batch of {batch_size:,}; omit dataloader_drop_last, or add rows")
    if getattr(trainer, "_is_vision_dataset", False):
        loaded = first(loaded)
        if len(loaded) < len(tokenized):
            rows += f", of which the first {len(loaded)} are counted"
        tokenized = images.tokenized(trainer, loaded)
    packed = getattr(args, "packing", False)
    if name == "eval" and getattr(args, "eval_packing", None) is not None:
        packed = args.eval_packing
    counts = _measured(tokenized, None if packed and args.packing_strategy != "bfd" else limit)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    highest = max(counts.highest, tokenizer.pad_token_id or 0)
    _require_places(trainer.model, tokenizer, highest, min(counts.longest, limit or counts.longest))
    has_labels = "labels" in tokenized.column_names
    if has_labels and counts.trained == 0:
        raise DataError(
            f"none of the {counts.tokens:,} tokens in {rows}{which} contributes to the loss. Increase max_length, or "
            "check the rows with `lowmem inspect`"
        )
    if has_labels and name == "train":
        _warn_of_answers_without_end(trainer.model, tokenizer, first(tokenized), limit)
    rows += f" packed into {len(tokenized):,}" if packed else ""
    dropped = 0 if packed else len(loaded) - len(tokenized)
    text = ", ".join([rows, *counts.described(dropped, limit, packed)])
    return text if has_labels else f"{text}; columns {', '.join(tokenized.column_names)}"


@dataclass
class _Counts:
    """Counts of a tokenized data set: lengths of rows and, for SFT, tokens and tokens that contribute to the loss."""

    tokens: int = 0
    trained: int = 0  # tokens that contribute to the loss
    empty: int = 0  # rows without such a token
    cut: int = 0  # samples of `max_length` tokens or more, which TRL cuts off there
    highest: int = 0  # the highest token
    longest: int = 0  # the length of the longest row, with its prompt

    def add(self, row: Mapping[str, Any], limit: int | None) -> None:
        ids = {name: row[name] for name in _IDS if name in row}
        self.highest = max(self.highest, *(int(tokens.max(initial=0)) for tokens in ids.values()))
        prompt = len(ids.pop("prompt_ids", ()))
        lengths = [prompt + len(tokens) for tokens in ids.values()] or [prompt]
        self.longest = max(self.longest, *lengths)
        if limit is not None:
            self.cut += sum(length >= limit for length in row.get("seq_lengths", [max(lengths)]))
        self.tokens += len(ids.get("input_ids", ()))
        if "labels" in row:
            contributes = row["labels"] != -100
            contributes[:1] = False  # the first token of a sample is never predicted
            contributes[np.cumsum(row.get("seq_lengths", ()), dtype=int)[:-1]] = False
            trained = int(contributes.sum())
            self.trained += trained
            self.empty += trained == 0

    def described(self, dropped: int, limit: int | None, packed: bool) -> Iterator[str]:
        """Describes the counts. dropped: the number of rows that tokenization removed."""
        if dropped > 0:
            yield f"{dropped:,} dropped by max_length={limit}"
        if self.cut:
            advice = "; packing_strategy: wrapped does not truncate" if packed else ""
            yield f"{self.cut:,} have max_length={limit} tokens or more (longer ones are truncated{advice})"
        if self.empty:
            yield f"{self.empty:,} without a token to train on"
        if self.trained:  # there are labels
            yield f"{self.tokens:,} tokens"
            yield f"loss on {self.trained:,} ({self.trained / self.tokens:.0%})"


def _measured(tokenized: datasets.Dataset, limit: int | None = None) -> _Counts:
    counts = _Counts()
    columns = [name for name in (*_IDS, "labels", "seq_lengths") if name in tokenized.column_names]
    for batch in tokenized.select_columns(columns).with_format("numpy").iter(1000) if columns else ():
        for values in zip(*batch.values(), strict=True):
            counts.add(dict(zip(batch, values, strict=True)), limit)
    return counts


def _warn_of_answers_without_end(model: Any, tokenizer: Any, rows: datasets.Dataset, limit: int | None) -> None:
    """Warns if all rows end with one special token, but generation with the trained model ends at other tokens."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    endings = set()
    for row in rows:
        if limit is not None and len(row["input_ids"]) >= limit:
            continue  # it may be cut off
        trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        last_two = reversed(trained[-2:])  # a template may end rows with a newline
        endings.add(next((token for token in last_two if token in special), None) if trained else None)
    ends: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # an id or a list
    if len(endings) == 1 and not endings & {None, tokenizer.eos_token_id, *np.atleast_1d(ends)}:
        (token,) = tokenizer.convert_ids_to_tokens([*endings])
        warn(
            f"every row ends with the token {token!r}, but generation ends at {tokenizer.eos_token!r}, which is not "
            f'trained, so answers would not end. Set eos_token: "{token}"'
        )


def _require_places(model: Any, tokenizer: Any, token: int, length: int) -> None:
    """Raises `ConfigError` unless a model has an embedding for the highest token, and positions for the longest row."""
    if token >= (count := getattr(embedding(model, "input"), "num_embeddings", token + 1)):
        raise ConfigError(
            f"token {tokenizer.convert_ids_to_tokens(token)!r} ({token:,}) is outside the model's embedding, which has "
            f"{count:,} rows. If it is the pad token, set pad_token to another token, such as {tokenizer.eos_token!r}. "
            "Otherwise, use the tokenizer of the model, or save the model after model.resize_token_embeddings(N)"
        )
    if (places := positions(model)) is not None and length > places:
        raise ConfigError(
            f"a row has {length:,} tokens, but the model has {places:,} positions. Set max_length: {places}"
        )


def positions(model: Any) -> int | None:
    """Returns the number of learned positions of a model, or None if it computes its positions."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # without the image encoder
    for name, table in decoder.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            padding = 0 if table.padding_idx is None else table.padding_idx + 1
            return int(table.num_embeddings - getattr(table, "offset", padding))
    return None


def rows(trainer: Any, count: int) -> Iterator[list[Segment]]:
    """Yields the first rows of a trainer's data: each column of tokens, split where the loss begins or ends."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    for row in islice(trainer.train_dataset, count):
        if (has_images := getattr(trainer, "_is_vision_dataset", False)) or "labels" in row:
            sequences = images.tokenized(trainer, [row]) if has_images else [row]
            yield [part for each in sequences for part in segments(each, trainer.processing_class)]
            continue
        columns = [name for name in row if name.endswith(("_ids", "prompt", "completion", "chosen", "rejected"))]
        parts = []
        for name in columns:
            tokens = row[name] if name.endswith("_ids") and row[name] else []
            text = tokenizer.decode(tokens) if name.endswith("_ids") else str(row[name])
            # KTO estimates a divergence from completions of other rows (KL_), without a gradient
            parts.append(Segment(f"{name}: {text}\n", not name.startswith(("prompt", "KL_")), len(tokens)))
        yield parts


def segments(row: Mapping[str, Any], processor: Any) -> list[Segment]:
    """Splits one tokenized row (`input_ids`, `labels`; packed: `seq_lengths`) where the loss begins or ends."""
    starts = set(accumulate(row.get("seq_lengths") or (), initial=0))  # the first token of a sample is never predicted
    trained = [label != -100 and position not in starts for position, label in enumerate(row["labels"])]
    runs = groupby(zip(trained, row["input_ids"], strict=True), key=lambda pair: pair[0])
    parts = ((state, [token for _, token in run]) for state, run in runs)
    return [Segment(images.decoded(processor, ids), state, len(ids)) for state, ids in parts]
