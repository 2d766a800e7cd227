"""Rows with images, which trainers tokenize during training: their tokens, and the largest row for a plan."""

import copy
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from datasets import Dataset
from transformers import AutoProcessor
from transformers.image_utils import load_image

from lowmem.errors import DataError
from lowmem.run.boundary import convert_errors
from lowmem.run.recipe import Recipe


def is_multimodal(config: Any) -> bool:
    """Returns whether a model may accept inputs other than text."""
    return config.get_text_config() is not config


def largest(recipe: Recipe, rows: Iterable[Any]) -> tuple[Dataset, Any] | None:
    """Returns two copies of the row with the largest images, and the processor, or None if no row has images."""
    row: Any = max(rows, key=lambda row: sum(width * height for width, height in _sizes(row)))
    if not _sizes(row):
        return None
    with convert_errors("model_name_or_path: a plan with images needs the processor"):
        processor = AutoProcessor.from_pretrained(recipe.model.model_name_or_path, **recipe.loading_options)
    return Dataset.from_list([row] * 2), processor


def described(row: dict[str, Any]) -> str:
    """Describes the images of a row."""
    sizes = ", ".join(f"{width} x {height}" for width, height in _sizes(row))
    return f", with images of {sizes} pixels" if sizes else ", without images"


def _sizes(row: dict[str, Any]) -> list[tuple[int, int]]:
    images = row.get("images") or ([row["image"]] if row.get("image") else [])
    return [load_image(image).size for image in images]


def tokenized(trainer: Any, rows: Iterable[Any]) -> Dataset:
    """Returns the tokens and labels of rows with images, cut off at `max_length`. Raises `DataError` if a row cannot be
    tokenized, or if tokens of its images would be cut off.
    """
    collator, limit, sequences = copy.copy(trainer.data_collator), trainer.args.max_length, []
    collator.max_length = None
    for number, row in enumerate(rows, start=1):
        with convert_errors(f"row {number} of the data cannot be tokenized", DataError):
            batch = collator([row])
            labels = batch.get("labels")
            labels = batch["input_ids"].where(batch["completion_mask"] == 1, -100) if labels is None else labels
        for ids, of_loss, mask in zip(batch["input_ids"], labels, batch["attention_mask"].bool(), strict=True):
            sequences.append({"input_ids": ids[mask][:limit].tolist(), "labels": of_loss[mask][:limit].tolist()})
            if limit and getattr(trainer.processing_class, "image_token_id", None) in ids[mask].tolist()[limit:]:
                raise DataError(
                    f"row {number} of the data: max_length={limit} cuts off tokens of its images. Increase it, or set "
                    "max_length: null"
                )
    return Dataset.from_list(sequences)


def decoded(processor: Any, tokens: Sequence[int]) -> str:
    """Decodes tokens to text. Consecutive image tokens are replaced by one image token and their count."""
    tokenizer, image = getattr(processor, "tokenizer", processor), getattr(processor, "image_token_id", None)
    runs = [[*run] for _, run in groupby(tokens, lambda token: token == image)]
    texts = (f"{tokenizer.decode(image)} x {len(run)} " if run[0] == image else tokenizer.decode(run) for run in runs)
    return "".join(texts)
