"""The data of a run: loaded by `datasets` as TRL does, and looked at before training."""

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow.compute as pc
from transformers import (
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    set_seed,
)
from trl import get_dataset

from lowmem.errors import ConfigError, DataError
from lowmem.run import build
from lowmem.run.arguments import Arguments, reason, refused

# The rows that are looked at before training, and in which every answer has to be trained on.
LOOKED_AT = 100

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
    try:
        if mixture.datasets:
            splits = get_dataset(mixture)
        else:
            splits = datasets.load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    except Exception as error:  # each reader of `datasets` raises its own types
        cause = error.__cause__ or error.__context__
        because = f" ({reason(cause)})" if cause is not None else ""
        because = " (a file without rows)" if isinstance(error, StopIteration) else because
        raise DataError(f"the data cannot be loaded: {reason(error)}{because}") from error
    train = _split(splits, script.dataset_train_split, "dataset_train_split", "")
    if arguments.training.eval_strategy == "no":
        return train, None
    advice = "; or set test_split_size, such as 0.05, to hold out a part of the data" if mixture.datasets else ""
    return train, _split(splits, script.dataset_test_split, "dataset_test_split", advice)


def _split(splits: Any, name: str, key: str, advice: str) -> Any:
    if name not in splits:
        raise ConfigError(f"the data has no split {name!r}. It has {', '.join(splits)}; set {key} to one{advice}")
    split = splits[name]
    if next(iter(split), None) is None:
        raise DataError(f"the split {name!r} of the data has no rows")
    return split


def first(train: Any) -> Any:
    """The rows that are looked at, as a data set in memory."""
    if isinstance(train, datasets.Dataset):
        return train.select(range(min(LOOKED_AT, len(train))))
    return datasets.Dataset.from_list(list(train.take(LOOKED_AT)))


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


def check(trainer: Any, loaded: Any) -> str:
    """Looks at what a trainer has made of its data, and says how much that is.

    Args:
        trainer: with its data tokenized.
        loaded: the data before that.

    Raises:
        DataError: no token contributes to the loss, or `max_length` cuts off the answer of one of the first rows.
    """
    tokenized = trainer.train_dataset
    if not isinstance(tokenized, datasets.Dataset):
        return f"streamed; columns {', '.join(next(iter(tokenized)))}"
    if not tokenized.column_names:
        raise DataError(f"none of {len(loaded):,} rows is left once they are tokenized. Look at their format")
    if "labels" not in tokenized.column_names:
        return f"{len(tokenized):,} rows; columns {', '.join(tokenized.column_names)}"
    limit = trainer.args.max_length
    advice = "Raise max_length, or look at the rows with `lowmem inspect`"
    packed = "seq_lengths" in tokenized.column_names
    if not packed and len(tokenized) < len(loaded) and (row := _first_dropped(trainer, loaded)) is not None:
        raise DataError(
            f"row {row + 1} of the data: its answer begins after max_length={limit} tokens, so nothing of it is "
            "trained on. Raise max_length, or leave such rows out. `lowmem inspect` shows the rows with a max_length "
            "that is large enough"
        )
    tokens, trained = 0, 0
    for batch in tokenized.with_format("arrow").iter(batch_size=1000):
        labels = batch["labels"].combine_chunks()
        tokens += len(labels.flatten())
        trained += pc.sum(pc.not_equal(labels.flatten(), -100)).as_py() or 0
    if trained == 0:
        raise DataError(f"none of the {tokens:,} tokens in {len(loaded):,} rows contributes to the loss. {advice}")
    dropped = len(loaded) - len(tokenized)
    missing = f", {dropped:,} left out, whose answers begin after max_length" if dropped > 0 and not packed else ""
    rows = f"{len(loaded):,} rows" + (f" packed into {len(tokenized):,}" if packed else "")
    return f"{rows}{missing}, {tokens:,} tokens, loss on {trained:,} ({trained / max(tokens, 1):.0%})"


def _first_dropped(trainer: Any, loaded: Any) -> int | None:
    """The number of the first row that TRL leaves out, among those that are looked at."""
    rows = first(loaded)
    rows = rows.add_column("row", range(len(rows)))
    kept = trainer._prepare_dataset(rows, trainer.processing_class, trainer.args, False, None, "train")
    missing = set(range(len(rows))) - set(kept["row"])
    return min(missing, default=None)


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
