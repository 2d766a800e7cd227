"""Generates the answer of a trained model to a prompt."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, ProcessorMixin, TextStreamer, set_seed
from transformers.image_utils import load_image
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from lowmem.errors import CheckpointError, ConfigError
from lowmem.files import SafetensorsFile, read_json
from lowmem.hf import adapters, checkpoint, checksums
from lowmem.hf.weights import weight_files
from lowmem.rules import require
from lowmem.run import build
from lowmem.run.boundary import convert_errors
from lowmem.run.terminal import warn


def generate(options: argparse.Namespace) -> None:
    """Prints the answer of a checkpoint, or of the newest complete checkpoint in a run folder.

    Args:
        options: the arguments of `lowmem generate`.

    Raises:
        CheckpointError: no complete checkpoint was found, or its model cannot be loaded.
        ConfigError: an argument is out of range, or the prompt is too long for the model.
    """
    require.number(">= 1", whole=True)("--max-new-tokens", options.max_new_tokens)
    require.number(">= 0")("--temperature", options.temperature)
    require.number(">= 0", f"< {2**32}", whole=True)("--seed", options.seed)
    folder = _model_folder(options.run_dir)
    processor, model = _load(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    inputs = _tokenize(options, processor, folder)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    tokens, new_tokens = inputs["input_ids"].shape[1], options.max_new_tokens
    if not 0 < tokens < context:
        raise ConfigError(f"the prompt has {tokens:,} tokens, but the model accepts 1 to {context - 1:,}")
    if tokens + new_tokens > context:
        warn(f"the answer is limited to {context - tokens:,} tokens, because the model's context has {context:,}")
    tokenizer = getattr(processor, "tokenizer", processor)
    set_seed(options.seed)
    with convert_errors(
        f"{folder}: generation failed. Correct or delete generation_config.json there", CheckpointError
    ):
        model.generate(
            **inputs.to(model.device),
            max_new_tokens=min(new_tokens, context - tokens),
            do_sample=options.temperature > 0,
            temperature=options.temperature or 1.0,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            trust_remote_code=False,
        )


def _load(folder: Path) -> tuple[Any, Any]:
    """Loads the processor or tokenizer, and the model with its adapters."""
    with convert_errors(f"{folder}: its model or tokenizer cannot be loaded", CheckpointError):
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        base = folder
        if (folder / ADAPTER_CONFIG_NAME).exists():
            base = read_json(folder / ADAPTER_CONFIG_NAME)["base_model_name_or_path"]
        kind = build.model_class(AutoConfig.from_pretrained(base, trust_remote_code=False))
        model = kind.from_pretrained(folder, trust_remote_code=False, dtype="auto", use_safetensors=True)
    if not model.can_generate():
        raise CheckpointError(f"{folder}: its model, {type(model).__name__}, does not generate text")
    return processor, model


def _tokenize(options: argparse.Namespace, processor: Any, folder: Path) -> Any:
    """Returns the inputs of the model: the prompt in the chat template, if there is one."""
    takes_images, template = isinstance(processor, ProcessorMixin), processor.chat_template
    if options.image and not (takes_images and template):
        raise ConfigError(f"--image: the model of {folder} has no chat template with images. Omit --image")
    if options.system is not None and not template:
        raise ConfigError(f"--system: the tokenizer of {folder} has no chat template. Omit --system")
    messages: list[Any] = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    if takes_images:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        with convert_errors("--image"):
            images = [{"type": "image", "image": load_image(str(path))} for path in options.image or ()]
        messages[-1]["content"][:0] = images
    with convert_errors(f"{folder}: its chat template does not accept the prompt", CheckpointError):
        if not template:
            return processor(text=options.prompt, return_tensors="pt")
        return processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True
        )


def _model_folder(folder: Path) -> Path:
    """Returns the folder itself if it has a model, which must be complete, or its newest complete checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} was not found. Name a run folder, or a checkpoint in it.")
    if (folder / CONFIG_NAME).exists() or adapters.files(folder):
        check_model(folder)
    else:
        folder, damaged = checkpoint.find_last(folder, check_model)
        warn("; ".join([*damaged, f"answering with {folder}"]))
    return folder


def check_model(folder: Path) -> None:
    """Raises `CheckpointError` if weights in `folder` are missing or damaged, or if its configuration is not valid. It
    does not read the optimizer's file.
    """
    if (folder / checksums.FILE).exists():
        checksums.check(folder, unread=(checkpoint.OPTIMIZER_FILE,))
        return
    if (folder / CONFIG_NAME).exists():
        read_json(folder / CONFIG_NAME)
    for path in weight_files(folder):
        SafetensorsFile(path)
