"""From files to what TRL's SFT trainer takes, with exact labels; only what TRL and datasets don't do already.

The order of use:

    train, held_out = load(config)                   # read, recognise, check every record, convert
    train = for_tokenizer(train, config, tokenizer)  # check the chat template; label turns where TRL can't
    trainer = SFTTrainer(model, SFTConfig(**sft_arguments(config, train)), train_dataset=train, ...)
    counts = check_tokenized(trainer.train_dataset, train, config)  # nothing masked away unsaid
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from lowmem.errors import ConfigError, DataError, did_you_mean
from lowmem.run.records import FIELDS, KINDS, Record, read_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass
class DataConfig:
    """The `data:` section of a configuration. Raises `ConfigError` for a value out of range."""

    path: str
    """A .jsonl, .json, .csv, .parquet or .txt file, a folder of them, or a Hub name: `org/name`, `org/name:config`."""
    kind: str = "auto"
    """auto | messages | prompt_completion | instruction | sharegpt | text"""
    split: str = "train"
    """The split to take where `path` is a Hub name."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field: the data's own name for it, as in `{instruction: question, output: answer}`."""
    max_samples: int | None = None
    """Take the first so many records of `path`; None takes all."""
    eval_path: str | None = None
    """Held-out data, as `path`."""
    eval_split: str = "test"
    """The split to take where `eval_path` is a Hub name."""
    eval_fraction: float = 0.0
    """Where there is no `eval_path`: the share of `path` that is held out, chosen by `seed`."""
    seed: int = 0
    max_length: int = 1024
    """Tokens. A longer chat is cut at its end; packed text is split and loses nothing."""
    packing: bool = False
    """Put several samples in one row of `max_length` tokens; they don't see each other."""
    answer_only: bool | None = None
    """Loss on the answers alone (None: wherever there are answers), or on every token (False)."""
    workers: int | None = None
    """Processes that tokenize; None is this one."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("data.path is empty; give a file, a folder or a Hub data set name.")
        if self.kind not in ("auto", *KINDS):
            raise ConfigError(f"data.kind is {self.kind!r}; it must be one of: auto, {', '.join(KINDS)}.")
        if unknown := set(self.columns) - FIELDS:
            name = min(unknown)
            hint = did_you_mean(name, FIELDS)
            raise ConfigError(f"data.columns: {name!r} is no field; known: {', '.join(sorted(FIELDS))}.{hint}")
        _whole("max_length", self.max_length, 2)
        _whole("seed", self.seed, 0)
        if self.max_samples is not None:
            _whole("max_samples", self.max_samples, 1)
        if self.workers is not None:
            _whole("workers", self.workers, 1)
        if not isinstance(self.eval_fraction, int | float) or not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"data.eval_fraction is {self.eval_fraction!r}; it must be at least 0 and below 1.")
        if self.eval_path and self.eval_fraction:
            raise ConfigError("data.eval_path and data.eval_fraction are both set; keep one of them.")


class Segment(NamedTuple):
    """A run of tokens of one sample that are all targets of the loss, or all not."""

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True)
class TokenCounts:
    """What tokenizing left of the data: samples, tokens, and the tokens that the loss is taken on."""

    samples: int
    tokens: int
    trained_tokens: int
    dropped: tuple[str, ...]
    """`source` of the samples TRL dropped since no answer token was left inside max_length (empty when packed)."""
    at_max_length: int
    """Samples that fill max_length: cut there, or of that very length by chance (packed text: split, nothing lost)."""
    without_target: int
    """Samples that are still there (packed beside others, or a single token long) and add nothing to the loss."""


def load(config: DataConfig) -> tuple["Dataset", "Dataset | None"]:
    """Read and check the data; convert it to the columns that TRL takes.

    A row holds `messages`, or `prompt` and `completion` (both strings or both lists of messages), or `text`, and
    `source` ("data/x.jsonl, record 12"). Instructions become a chat of one question and one answer. A .txt file gives
    one sample a paragraph (paragraphs are parted by blank lines). Raises `DataError` for the first thing wrong.
    """
    train = _read(config, config.path, "data.path", config.split, config.max_samples)
    held_out = None
    if config.eval_path:
        held_out = _read(config, config.eval_path, "data.eval_path", config.eval_split, None)
        if (ours := _columns(train)) != (theirs := _columns(held_out)):
            raise DataError(
                f"{config.eval_path} gives {', '.join(theirs)} and {config.path} gives {', '.join(ours)}. "
                "Held-out data must be of the kind that is trained on."
            )
    elif config.eval_fraction:
        count = int(len(train) * config.eval_fraction)
        if count == 0:
            raise DataError(
                f"data.eval_fraction {config.eval_fraction} of {len(train)} records holds out none. "
                f"Set it to at least {1 / len(train):.3g}, or to 0."
            )
        halves = train.train_test_split(test_size=count, seed=config.seed)
        train, held_out = halves["train"], halves["test"]
    if "text" in train.column_names and config.answer_only:
        raise DataError(f"{config.path} is text and has no answers. Leave data.answer_only out, or set it to false.")
    return train, held_out


def _read(config: DataConfig, path: str, key: str, split: str, limit: int | None) -> "Dataset":
    return read_rows(path, key, split, config.kind, config.columns, limit, config.answer_only is not False)


def texts(dataset: "Dataset") -> Iterator[str]:
    """Every string of a data set from `load`, to train a tokenizer on."""
    for row in dataset.select_columns(_columns(dataset)):
        for value in row.values():
            yield from [value] if isinstance(value, str) else (message["content"] for message in value)


def for_tokenizer(dataset: "Dataset", config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> "Dataset":
    """Make sure that the trainer will put the loss on exactly the answers, with this tokenizer.

    TRL finds the answers of `messages` where the chat template has `{% generation %}` around them. With any other
    template such rows come back tokenized, with `input_ids` and `labels`: an answer is what the template adds to the
    prompt before it. That is exact where a longer chat begins as the shorter one does, which is checked for each row.
    A template that TRL knows is replaced, for training, by TRL's variant of it, as TRL does too. Every sequence of
    roles in the data is tried on the template first.

    Raises `DataError` for a tokenizer without chat template or end token, and for a template that refuses a sequence
    of roles, drops an answer, or rewrites earlier turns.
    """
    if not _is_chat(dataset):
        if tokenizer.eos_token is None:
            raise DataError("The tokenizer has no end-of-text token, so no text would ever end. Set its eos_token.")
        return dataset
    if tokenizer.chat_template is None:
        raise DataError(
            f"{dataset[0]['source']} is a chat and the tokenizer has no chat template. Set model.chat_template to a "
            "Jinja file, or use data of kind text or prompt_completion with plain strings."
        )
    masked = config.answer_only is not False and "messages" in dataset.column_names
    template, by_turns = _training_template(tokenizer) if masked else (None, False)
    for roles, source in _role_sequences(dataset).items():
        _try_roles(roles, source, tokenizer, template, masked and not by_turns)
    if not by_turns:
        return dataset
    return dataset.map(
        _answer_labels,
        fn_kwargs={"tokenizer": tokenizer, "template": template},
        remove_columns="messages",
        num_proc=config.workers,
        desc="Labelling the answers",
    )


def sft_arguments(config: DataConfig, dataset: "Dataset") -> dict[str, Any]:
    """The `trl.SFTConfig` keyword arguments that this data needs; `dataset` is what `for_tokenizer` gave."""
    answer_only = config.answer_only is not False
    return {
        "max_length": config.max_length,
        "packing": config.packing,
        "packing_strategy": "bfd_split" if "text" in dataset.column_names else "bfd",
        "completion_only_loss": answer_only and "prompt" in dataset.column_names,
        "assistant_only_loss": answer_only and "messages" in dataset.column_names,
        "dataset_num_proc": config.workers,
    }


def check_tokenized(tokenized: "Dataset", loaded: "Dataset", config: DataConfig) -> TokenCounts:
    """Count what the trainer will train on; `tokenized` is its own data set, made from `loaded`.

    Raises `DataError` where nothing is left, or where the loss is on no token at all.
    """
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    import torch

    way_out = "Raise data.max_length, or check the data with `lowmem inspect`."
    if len(tokenized) == 0:
        raise DataError(f"None of the {len(loaded)} samples has an answer token inside max_length. {way_out}")
    samples = tokens = trained = at_max_length = without_target = 0
    for batch in tokenized.with_format("arrow").iter(batch_size=1000):
        labels = batch["labels"].combine_chunks()
        packed = "seq_lengths" in batch.column_names
        lengths = torch.tensor(
            (batch["seq_lengths"].combine_chunks().flatten() if packed else pc.list_value_length(labels)).to_numpy()
        ).long()
        ends = lengths.cumsum(0)
        targets = torch.tensor(labels.flatten().to_numpy()) != -100
        targets[(ends - lengths)[lengths > 0]] = False  # a sample's first token is predicted from nothing
        running = torch.cat([torch.zeros(1, dtype=torch.long), targets.cumsum(0)])
        per_sample = running[ends] - running[ends - lengths]
        samples += len(lengths)
        tokens += int(lengths.sum())
        trained += int(per_sample.sum())
        at_max_length += int((lengths == config.max_length).sum())
        without_target += int((per_sample == 0).sum())
    if trained == 0:
        raise DataError(f"All {tokens} tokens of the {samples} samples are masked: the loss is on none. {way_out}")
    kept = set(tokenized["source"]) if "source" in tokenized.column_names else set(loaded["source"])
    dropped = tuple(source for source in loaded["source"] if source not in kept)
    return TokenCounts(samples, tokens, trained, dropped, at_max_length, without_target)


def segments(example: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    """One tokenized row (`input_ids`, `labels`; packed: `seq_lengths`), parted where the loss begins or ends.

    The first token of a sample is never trained on: nothing comes before it to predict it from.
    """
    starts, position = set(), 0
    for length in example.get("seq_lengths", [len(example["input_ids"])]):
        starts.add(position)
        position += length
    trained = [label != -100 and place not in starts for place, label in enumerate(example["labels"])]
    pairs = zip(trained, example["input_ids"], strict=True)
    runs = ((state, [token for _, token in run]) for state, run in groupby(pairs, key=lambda pair: pair[0]))
    return [Segment(tokenizer.decode(ids), state, len(ids)) for state, ids in runs]


# ---------------------------------------------------------------------------------------------- chat templates


def _training_template(tokenizer: "PreTrainedTokenizerBase") -> tuple[str | None, bool]:
    """The template TRL renders training chats with (None: the tokenizer's own), and whether to label turn by turn.

    TRL's own masks need marks in the template and the tokens' offsets in the text. Some of its variants mark a token
    of the prompt as well, which labelling by turns does not.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return None, not tokenizer.is_fast
    try:
        template = get_training_chat_template(tokenizer)
    except ValueError:
        return None, True
    return template, not tokenizer.is_fast or _keeps_turns(tokenizer, template)


def _keeps_turns(tokenizer: "PreTrainedTokenizerBase", template: str | None) -> bool:
    """Whether a longer chat begins as the shorter one does, so that answers can be labelled turn by turn."""
    chat = [{"role": role, "content": f"some {role} text"} for role in ("user", "assistant", "user", "assistant")]
    try:
        _answer_labels({"messages": chat, "source": "a trial chat"}, tokenizer, template)
    except DataError:
        return False
    return True


def _role_sequences(dataset: "Dataset") -> dict[tuple[str, ...], str]:
    """Every sequence of roles in the data, with the source of its first row."""
    found: dict[tuple[str, ...], str] = {}
    for row in dataset:
        messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        found.setdefault(tuple(message["role"] for message in messages), row["source"])
    return found


def _try_roles(
    roles: tuple[str, ...], source: str, tokenizer: "PreTrainedTokenizerBase", template: str | None, masked: bool
) -> None:
    """Render a chat of these roles; where TRL masks by the template, see that it masks all but the answers."""
    words = [f"word{number}word" for number in range(len(roles))]
    messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    rendered = _render(messages, source, tokenizer, chat_template=template, return_assistant_tokens_mask=masked)
    mask = rendered["assistant_masks"] if masked else [1] * len(rendered["input_ids"])
    pairs = list(zip(rendered["input_ids"], mask, strict=True))
    trained = tokenizer.decode([token for token, bit in pairs if bit])
    for role, word in zip(roles, words, strict=True):
        if (word in trained) != (not masked or role == "assistant"):
            raise DataError(
                f"{source}: the chat template {'drops' if role == 'assistant' or not masked else 'trains on'} a "
                f"{role!r} message of the roles {', '.join(roles)}. Set model.chat_template to one that has "
                "{% generation %} around every answer and nothing else."
            )


def _answer_labels(example: Record, tokenizer: "PreTrainedTokenizerBase", template: str | None) -> Record:
    """`input_ids` and `labels` of one chat: an answer is what the template adds to the prompt before it."""
    messages, source = example["messages"], example["source"]
    if messages[0]["role"] == "assistant":
        raise DataError(
            f"{source}: the chat begins with an answer, which this chat template cannot mask. Put a user message "
            "before it, or set model.chat_template to one with {% generation %} around the answers."
        )
    render = partial(_render, source=source, tokenizer=tokenizer, chat_template=template)
    ids = render(messages)["input_ids"]
    labels = [-100] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(messages[:place], add_generation_prompt=True)["input_ids"]
            answered = render(messages[: place + 1])["input_ids"]
            if ids[: len(answered)] != answered or answered[: len(prompt)] != prompt:
                raise DataError(
                    f"{source}: the chat template rewrites earlier turns (message {place + 1}), so its answers cannot "
                    "be told apart exactly. Set model.chat_template to one with {% generation %} around the answers, "
                    "or data.answer_only to false."
                )
            labels[len(prompt) : len(answered)] = answered[len(prompt) :]
    return {"input_ids": ids, "labels": labels}


def _render(
    messages: list[Record], source: str, tokenizer: "PreTrainedTokenizerBase", **options: Any
) -> Mapping[str, list[int]]:
    from jinja2 import TemplateError

    try:
        rendered: Mapping[str, list[int]] = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **options
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{source}: the chat template refuses the roles {roles} ({error}). Change the data, or set "
            "model.chat_template to one that takes them."
        ) from error
    return rendered


def _is_chat(dataset: "Dataset") -> bool:
    return "messages" in dataset.column_names or not isinstance(dataset[0].get("prompt", ""), str)


def _columns(dataset: "Dataset") -> list[str]:
    return [name for name in dataset.column_names if name != "source"]


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"data.{name} is {value!r}; it must be a whole number of at least {least}.")
