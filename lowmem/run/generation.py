"""The answer of a trained model to a prompt."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from lowmem.errors import CheckpointError, ConfigError
from lowmem.hf import adapters, checkpoint
from lowmem.run.build import first_line
from lowmem.run.terminal import warn


def generate(
    folder: Path, prompt: str, *, system: str | None, max_new_tokens: int, temperature: float, seed: int
) -> None:
    """Prints the answer of a checkpoint, or of the newest complete one in a run folder.

    Raises:
        CheckpointError: there is no complete checkpoint, or its model cannot be loaded.
        ConfigError: an argument is out of range, or the prompt is too long for the model.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: an answer has at least 1 token")
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"--temperature {temperature}: must be 0 (greedy) or a positive number")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed}: must be a number from 0 to {2**32 - 1}")
    model, tokenizer = _load(_model_folder(folder))
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    tokens, context = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", math.inf)
    if not 0 < tokens < context:
        raise ConfigError(f"the prompt has {tokens:,} tokens; the model takes from 1 to {context - 1:,}")
    if tokens + max_new_tokens > context:
        warn(f"the answer ends after {context - tokens:,} tokens, where the model's context of {context:,} is full")
    sampled = temperature > 0
    set_seed(seed)
    model.generate(
        **inputs.to(model.device),
        max_new_tokens=min(max_new_tokens, context - tokens),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=sampled,
        **({"temperature": temperature} if sampled else {}),
    )


def _model_folder(folder: Path) -> Path:
    """The folder itself if it has a model, else its newest complete checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Name a run folder, or a checkpoint in it.")
    if (folder / "config.json").exists() or adapters.files(folder):
        checkpoint.check_model(folder)
    else:
        folder, damaged = checkpoint.find_last(folder, checkpoint.check_model)
        for reason in damaged:
            warn(f"skipped a damaged checkpoint: {reason}")
        if damaged:
            warn(f"answering with {folder}")
    if adapters.files(folder):
        raise CheckpointError(
            f"{folder} has PEFT adapters without their base model. Merge them first, in Python: "
            f'peft.PeftModel.from_pretrained(model, "{folder}").merge_and_unload().save_pretrained("merged"), and '
            'tokenizer.save_pretrained("merged"); then lowmem generate merged "..."'
        )
    return folder


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except Exception as error:  # transformers does not say which there can be
        raise CheckpointError(f"{folder}: its model or tokenizer cannot be loaded: {first_line(error)}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
