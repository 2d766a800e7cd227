"""The answer of a trained model to a prompt."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer, set_seed

from lowmem.errors import CheckpointError, ConfigError
from lowmem.hf import adapters, checkpoint
from lowmem.run.arguments import reason
from lowmem.run.terminal import warn

# The longest answer where nothing else is asked for, and the context has room.
_NEW_TOKENS = 256


def generate(
    folder: Path, prompt: str, *, system: str | None, max_new_tokens: int | None, temperature: float, seed: int
) -> None:
    """Prints the answer of a checkpoint, or of the newest complete one in a run folder.

    Raises:
        CheckpointError: there is no complete checkpoint, or its model cannot be loaded.
        ConfigError: an argument is out of range, or the prompt is too long for the model.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: an answer has at least 1 token")
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"--temperature {temperature}: must be 0 (greedy) or a positive number")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed}: must be a number from 0 to {2**32 - 1}")
    folder = _model_folder(folder)
    model, tokenizer = _load(folder)
    if tokenizer.chat_template is not None:
        inputs = _chat(folder, tokenizer, prompt, system)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    tokens, context = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", math.inf)
    if not 0 < tokens < context:
        raise ConfigError(f"the prompt has {tokens:,} tokens; the model takes from 1 to {context - 1:,}")
    if max_new_tokens is not None and tokens + max_new_tokens > context:
        warn(f"the answer ends after {context - tokens:,} tokens, where the model's context of {context:,} is full")
    sampled = temperature > 0
    set_seed(seed)
    options = {"do_sample": sampled, "trust_remote_code": False, **({"temperature": temperature} if sampled else {})}
    try:
        model.generate(
            **inputs.to(model.device),
            max_new_tokens=min(max_new_tokens or _NEW_TOKENS, context - tokens),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **options,
        )
    except (ValueError, TypeError) as error:  # with which transformers refuses generation_config.json
        raise CheckpointError(
            f"{folder}: no answer can be generated ({reason(error)}). Correct or delete generation_config.json there"
        ) from error


def _chat(folder: Path, tokenizer: Any, prompt: str, system: str | None) -> Any:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template computes with what it is given, and may fail in any way
        roles = "a system message and a prompt" if system else "a prompt"
        raise CheckpointError(f"{folder}: its chat template refuses {roles} ({reason(error)})") from error


def _model_folder(folder: Path) -> Path:
    """The folder itself if it has a complete model, else its newest complete checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Name a run folder, or a checkpoint in it.")
    damaged = []
    try:
        if has_model := (folder / "config.json").exists() or bool(adapters.files(folder)):
            checkpoint.check_model(folder)
    except CheckpointError as error:
        if not checkpoint.candidates(folder):
            raise
        has_model, damaged = False, [str(error)]
    if not has_model:
        folder, others = checkpoint.find_last(folder, checkpoint.check_model)
        damaged += others
    for damage in damaged:
        warn(f"skipped a damaged checkpoint: {damage}")
    if damaged:
        warn(f"answering with {folder}")
    if (folder / adapters.OTHERS_FILE).exists():
        raise CheckpointError(
            f"{folder}: {adapters.OTHERS_FILE} has parameters beside the adapters, which PEFT does not load. In "
            "Python, create the model with its adapters as before training, and call "
            f'lowmem.hf.weights.load_weights(model, "{folder}")'
        )
    return folder


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if adapters.files(folder):
            from peft import AutoPeftModelForCausalLM as AutoModel  # which loads the base model that they name
        else:
            from transformers import AutoModelForCausalLM as AutoModel
        model = AutoModel.from_pretrained(
            folder, trust_remote_code=False, dtype="auto", attn_implementation="sdpa", use_safetensors=True
        )
    except Exception as error:  # transformers does not say which there can be
        raise CheckpointError(f"{folder}: its model or tokenizer cannot be loaded: {reason(error)}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
