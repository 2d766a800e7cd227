"""Generates the answer of a trained model to a prompt."""

import math
from collections.abc import Sequence
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
from lowmem.run.boundary import blaming
from lowmem.run.terminal import warn


def generate(
    folder: Path,
    prompt: str,
    *,
    system: str | None,
    image: Sequence[Path] | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    """Prints the answer of a checkpoint, or of the newest complete checkpoint in a run folder.

    Raises:
        CheckpointError: no complete checkpoint was found, or its model cannot be loaded.
        ConfigError: an argument is out of range, or the prompt is too long for the model.
    """
    require.number(">= 1", whole=True)("--max-new-tokens", max_new_tokens)
    require.number(">= 0")("--temperature", temperature)
    require.number(">= 0", f"< {2**32}", whole=True)("--seed", seed)
    folder = _model_folder(folder)
    with blaming(f"{folder}: its model or tokenizer cannot be loaded", CheckpointError):
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        base = folder
        if (folder / ADAPTER_CONFIG_NAME).exists():
            base = read_json(folder / ADAPTER_CONFIG_NAME)["base_model_name_or_path"]
        kind = build.model_class(AutoConfig.from_pretrained(base, trust_remote_code=False))
        model = kind.from_pretrained(  # adapters are loaded with their base model
            folder, trust_remote_code=False, dtype="auto", use_safetensors=True
        )
    if not model.can_generate():
        raise CheckpointError(f"{folder}: its model, {type(model).__name__}, does not generate text")
    takes_images = isinstance(processor, ProcessorMixin)
    tokenizer = getattr(processor, "tokenizer", processor)
    if image and not (takes_images and processor.chat_template):
        raise ConfigError(f"--image: the model of {folder} has no chat template with images. Omit --image")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with blaming("--image"):
        images = [{"type": "image", "image": load_image(str(path))} for path in image or ()]

    def content(text: str, *before: Any) -> Any:
        return [*before, {"type": "text", "text": text}] if takes_images else text

    messages = [] if system is None else [{"role": "system", "content": content(system)}]
    messages.append({"role": "user", "content": content(prompt, *images)})
    with blaming(f"{folder}: its chat template does not accept the prompt", CheckpointError):
        if processor.chat_template is None:
            if system is not None:
                raise ConfigError(f"--system: the tokenizer of {folder} has no chat template. Omit --system")
            inputs = processor(text=prompt, return_tensors="pt")
        else:
            options = {"add_generation_prompt": True, "tokenize": True, "return_tensors": "pt", "return_dict": True}
            inputs = processor.apply_chat_template(messages, **options)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    tokens = inputs["input_ids"].shape[1]
    if not 0 < tokens < context:
        raise ConfigError(f"the prompt has {tokens:,} tokens, but the model accepts 1 to {context - 1:,}")
    if tokens + max_new_tokens > context:
        warn(f"the answer is limited to {context - tokens:,} tokens, because the model's context has {context:,}")
    set_seed(seed)
    with blaming(f"{folder}: generation failed. Correct or delete generation_config.json there", CheckpointError):
        model.generate(
            **inputs.to(model.device),
            max_new_tokens=min(max_new_tokens, context - tokens),
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            trust_remote_code=False,
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
