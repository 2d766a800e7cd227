"""Prepares data for TRL's SFT trainer with exact labels, and does only what TRL and datasets don't do themselves.

`load` reads and checks the records, `for_tokenizer` labels them, `sft_arguments` are arguments of the trainer, and
`check_tokenized` counts what the trainer tokenized. `fingerprint` identifies it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from itertools import accumulate, compress, groupby
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pydantic
import xxhash
from datasets import Dataset
from pydantic import Field
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from lowmem.errors import ConfigError, DataError
from lowmem.run.checks import STRICT, Whole
from lowmem.run.readers import Record, listed
from lowmem.run.records import FieldName, read_rows

_MARK = "{% generation %} around"


@pydantic.dataclasses.dataclass(config=STRICT)
class DataConfig:
    """The `data:` section of a configuration."""

    # a .jsonl, .json, .csv, .parquet or .txt file, a directory of them, or a Hub name: `org/name[:config]`
    path: Annotated[str, Field(min_length=1)]
    kind: Literal["auto", "messages", "prompt_completion", "instruction", "sharegpt", "text"] = "auto"
    split: str = "train"  # of `path`, if that is a Hub name
    columns: dict[FieldName, str] = field(default_factory=dict)  # field → its name in the data: `{output: answer}`
    # use only this many records, the first of `path`
    max_samples: Annotated[Whole, Field(ge=1, le=2**63 - 1)] | None = None
    eval_path: str | None = None  # held-out data, as `path`
    eval_split: str = "test"  # of `eval_path`, if that is a Hub name
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the share of `path` that is held out, chosen by `seed`
    seed: Annotated[Whole, Field(ge=0)] = 0
    # tokens; a longer chat is cut at its end, packed text is split
    max_length: Annotated[Whole, Field(ge=2, le=2**31 - 1)] = 1024
    packing: bool = False  # put several samples, which don't attend to each other, into one row of `max_length` tokens
    answer_only: bool | None = None  # loss on answers alone (None: if there are answers) or on every token (False)
    workers: Annotated[Whole, Field(ge=1, le=1024)] | None = None  # processes that tokenize; None uses this process

    def __post_init__(self) -> None:
        if self.eval_path and self.eval_fraction:
            raise ConfigError("data.eval_path and data.eval_fraction are both set; keep one of them.")


class Segment(NamedTuple):
    """Consecutive tokens of a sample that are all targets of the loss, or none of them."""

    text: str
    trained: bool
    tokens: int


class TokenCounts(NamedTuple):
    """Samples and tokens after tokenization, and how many tokens the loss is taken on."""

    samples: int
    tokens: int
    trained_tokens: int
    dropped: tuple[str, ...]  # `source` of samples that TRL dropped: no answer token within max_length (not if packed)
    at_max_length: int  # samples of length max_length, nearly all of which were cut (packed text: split)
    without_target: int  # samples that add nothing to the loss: packed with others, or a single token long


def load(config: DataConfig) -> tuple[Dataset, Dataset | None]:
    """Reads and checks the training data and the held-out data, or None, and converts them to the columns of TRL.

    A row has `messages`, or `prompt` and `completion` (both strings or both lists of messages), or `text`, and its
    `source` ("data/x.jsonl, record 12"). Instructions become a question and an answer, paragraphs of a .txt file texts.

    Raises:
        DataError: the first file, record or combination that cannot be used.
    """
    need_answers, held_out = config.answer_only is not False, None
    read = partial(read_rows, kind=config.kind, columns=config.columns, need_answers=need_answers)
    train = read(config.path, "data.path", config.split, limit=config.max_samples)
    if config.eval_path:
        held_out = read(config.eval_path, "data.eval_path", config.eval_split, limit=None)
        if _columns(train) != _columns(held_out):
            raise DataError(f"{config.eval_path} has {', '.join(_columns(held_out))} but {config.path} has "
                            f"{', '.join(_columns(train))}. Use held-out data of the same kind.")  # fmt: skip
    elif config.eval_fraction:
        count = int(len(train) * config.eval_fraction)
        if count == 0:
            raise DataError(f"data.eval_fraction {config.eval_fraction} of {len(train)} records holds out no record. "
                            f"Set it to at least {1 / len(train):.3g}, or to 0.")  # fmt: skip
        train, held_out = train.train_test_split(test_size=count, seed=config.seed).values()
    if "text" in train.column_names and config.answer_only:
        raise DataError(f"{config.path} is text and has no answers. Omit data.answer_only, or set it to false.")
    return train, held_out


def texts(dataset: Dataset) -> Iterator[str]:
    """Yields every string of a data set from `load`, to train a tokenizer on."""
    for row in dataset.select_columns(_columns(dataset)):
        for value in row.values():
            yield from [value] if isinstance(value, str) else (message["content"] for message in value)


def for_tokenizer(dataset: Dataset, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Makes sure that the trainer takes the loss on exactly the answers, with this tokenizer.

    TRL finds the answers of `messages` if the chat template has `{% generation %}` around them. For other templates
    the rows are returned with `input_ids` and `labels`, where an answer is what the template adds to the prompt before
    it; each row is checked to begin as its shorter chats do. A template that TRL knows is replaced by TRL's variant.

    Raises:
        DataError: the tokenizer has no chat template or end token, or the template refuses, drops or rewrites turns.
    """
    if "messages" not in dataset.column_names and isinstance(dataset[0].get("prompt", ""), str):
        if tokenizer.eos_token is None:
            raise DataError("The tokenizer has no end-of-text token, so no text would ever end. Set its eos_token.")
        return dataset
    if tokenizer.chat_template is None:
        raise DataError(f"{dataset[0]['source']} is a chat and the tokenizer has no chat template. Set "
                        "model.chat_template to a Jinja file, or use data of kind text or "
                        "prompt_completion with strings.")  # fmt: skip
    masked = config.answer_only is not False and "messages" in dataset.column_names
    template, by_turns = _training_template(tokenizer) if masked else (None, False)
    sources: dict[tuple[str, ...], str] = {}  # of the first row with each sequence of roles
    for row in dataset:
        messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        sources.setdefault(tuple(message["role"] for message in messages), row["source"])
    for roles, source in sources.items():
        _try_roles(roles, source, tokenizer, template, masked and not by_turns)
    if not by_turns:
        return dataset
    options = {"remove_columns": "messages", "num_proc": config.workers, "desc": "Labelling the answers"}
    return dataset.map(_answer_labels, fn_kwargs={"tokenizer": tokenizer, "template": template}, **options)


def sft_arguments(config: DataConfig, dataset: Dataset) -> dict[str, Any]:
    """The keyword arguments of `trl.SFTConfig` for a data set from `for_tokenizer`."""
    answer_only = config.answer_only is not False
    return {
        "max_length": config.max_length,
        "packing": config.packing,
        "packing_strategy": "bfd_split" if "text" in dataset.column_names else "bfd",
        "completion_only_loss": answer_only and "prompt" in dataset.column_names,
        "assistant_only_loss": answer_only and "messages" in dataset.column_names,
        "dataset_num_proc": config.workers,
    }


def check_tokenized(tokenized: Dataset, loaded: Dataset, config: DataConfig) -> TokenCounts:
    """Counts what the trainer will train on: `tokenized` is the trainer's data set, made from `loaded`.

    Raises:
        DataError: no sample is left, or the loss is on no token.
    """
    advice = "Raise data.max_length, or check the data with `lowmem inspect`."
    if len(tokenized) == 0:
        raise DataError(f"None of the {len(loaded)} samples has an answer token within max_length. {advice}")
    pairs = []  # of each sample: tokens, and those among them that are targets
    for batch in tokenized.with_format("arrow").iter(batch_size=1000):
        labels = batch["labels"].combine_chunks()
        packed = "seq_lengths" in batch.column_names
        counts = batch["seq_lengths"].combine_chunks().flatten() if packed else pc.list_value_length(labels)
        length = counts.to_numpy()
        ends = length.cumsum()
        is_target = labels.flatten().to_numpy() != -100
        is_target[(ends - length)[length > 0]] = False  # nothing comes before the first token of a sample
        running = np.concatenate([[0], is_target.cumsum()])
        pairs.append([length, running[ends] - running[ends - length]])
    lengths, targets = np.concatenate(pairs, axis=1)
    tokens, trained = int(lengths.sum()), int(targets.sum())
    if trained == 0:
        raise DataError(f"All {tokens} tokens of the {len(lengths)} samples are masked, so there is no loss. {advice}")
    left = set(tokenized["source"] if "source" in tokenized.column_names else loaded["source"])
    dropped = tuple(source for source in loaded["source"] if source not in left)
    at_max_length, without_target = int((lengths == config.max_length).sum()), int((targets == 0).sum())
    return TokenCounts(len(lengths), tokens, trained, dropped, at_max_length, without_target)


def fingerprint(tokenized: Dataset) -> str:
    """Returns a hash of the tokens, the labels and, where packed, the bounds of the samples of every row in order.

    The trainer's data sets have the same hash if and only if they train the same, wherever the rows come from and
    however `datasets` holds them.
    """
    names = [name for name in ("input_ids", "labels", "seq_lengths") if name in tokenized.column_names]
    hashes = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in names}  # of lengths, and of values
    for batch in tokenized.select_columns(names).with_format("arrow").iter(batch_size=1000):
        for name, (lengths, values) in hashes.items():
            rows = batch[name].combine_chunks()
            lengths.update(_eight_bytes_each(pc.list_value_length(rows)))
            values.update(_eight_bytes_each(rows.flatten()))
    digests = [f"{name} {lengths.hexdigest()} {values.hexdigest()}" for name, (lengths, values) in hashes.items()]
    return xxhash.xxh3_128_hexdigest(" ".join(digests).encode())


def segments(example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """Splits one tokenized row (`input_ids`, `labels`; packed: `seq_lengths`) where the loss begins or ends."""
    starts = set(accumulate(example.get("seq_lengths", ()), initial=0))  # nothing comes before the first token
    trained = [label != -100 and position not in starts for position, label in enumerate(example["labels"])]
    pairs = zip(trained, example["input_ids"], strict=True)
    runs = ((state, [token for _, token in run]) for state, run in groupby(pairs, key=lambda pair: pair[0]))
    return [Segment(tokenizer.decode(ids), state, len(ids)) for state, ids in runs]


def _training_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, bool]:
    """The template with which TRL renders training chats (None: the tokenizer's), and whether to label turn by turn.

    TRL's masks need `{% generation %}` in the template and a tokenizer with offsets. Some of TRL's variants of
    templates also mark a token of the prompt, which labelling turn by turn does not.
    """
    if has_generation_markers(tokenizer.chat_template):
        return None, not tokenizer.is_fast
    try:
        template = get_training_chat_template(tokenizer)
    except ValueError:
        return None, True
    chat = [{"role": role, "content": f"some {role} text"} for role in ("user", "assistant", "user", "assistant")]
    try:
        _answer_labels({"messages": chat, "source": "a test chat"}, tokenizer, template)
    except DataError:
        return template, not tokenizer.is_fast
    return template, True


def _try_roles(roles: tuple[str, ...], source: str, tokenizer: PreTrainedTokenizerBase, template: str | None,
               masked: bool) -> None:  # fmt: skip
    """Renders a chat of these roles; if TRL masks by the template, checks that it masks all but the answers."""
    messages = [{"role": role, "content": f"word{number}word"} for number, role in enumerate(roles)]
    rendered = _render(messages, source, tokenizer, chat_template=template, return_assistant_tokens_mask=masked)
    ids = rendered["input_ids"]
    trained = tokenizer.decode(list(compress(ids, rendered["assistant_masks"])) if masked else ids)
    for role, word in (message.values() for message in messages):
        if (word in trained) != (not masked or role == "assistant"):
            verb = "drops" if role == "assistant" or not masked else "trains on"
            raise DataError(f"{source}: the chat template {verb} a {role!r} message of the roles {listed(roles)}. "
                            f"Use a model.chat_template that has {_MARK} every answer and nothing else.")  # fmt: skip


def _answer_labels(example: Record, tokenizer: PreTrainedTokenizerBase, template: str | None) -> Record:
    """`input_ids` and `labels` of one chat: an answer is what the template adds to the prompt before it."""
    messages, source = example["messages"], example["source"]
    if messages[0]["role"] == "assistant":
        raise DataError(f"{source}: the chat begins with an answer, which this chat template cannot mask. Put a user "
                        f"message before it, or set model.chat_template to one with {_MARK} the answers.")  # fmt: skip
    render = partial(_render, source=source, tokenizer=tokenizer, chat_template=template)
    ids = render(messages)["input_ids"]
    labels = [-100] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(messages[:place], add_generation_prompt=True)["input_ids"]
            answered = render(messages[: place + 1])["input_ids"]
            if ids[: len(answered)] != answered or answered[: len(prompt)] != prompt:
                raise DataError(f"{source}: the chat template rewrites earlier turns (message {place + 1}), so its "
                                f"answers cannot be located exactly. Use a model.chat_template with {_MARK} the "
                                "answers, or set data.answer_only to false.")  # fmt: skip
            labels[len(prompt) : len(answered)] = answered[len(prompt) :]
    return {"input_ids": ids, "labels": labels}


def _render(messages: list[Record], source: str, tokenizer: PreTrainedTokenizerBase,
            **options: Any) -> Mapping[str, list[int]]:  # fmt: skip
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except Exception as error:  # a template computes with what it is given, and may fail in any way
        roles = listed(message["role"] for message in messages)
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{source}: the chat template refuses the roles {roles} ({reason}). Change the data, or set "
                        "model.chat_template to one that accepts them.") from error  # fmt: skip


def _eight_bytes_each(integers: Any) -> bytes:
    """The integers of an Arrow array, of whatever type, as bytes."""
    return integers.to_numpy(zero_copy_only=False).astype("<i8").tobytes()


def _columns(dataset: Dataset) -> list[str]:
    return [name for name in dataset.column_names if name != "source"]
