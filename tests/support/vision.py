"""Small vision-language models, their processors, and rows with images. They do not require torchvision."""

import random
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from support import runs
from transformers import AutoConfig, AutoModelForImageTextToText

from scripts.make_model import train_tokenizer

KINDS = ("llava", "idefics3")
TEMPLATE = """\
{%- for m in messages -%}{{ '<|' + m.role + '|>' }}{%- for part in m.content -%}
{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
         "patch_size": 8}  # fmt: skip


def save(folder: Path, kind: str = "llava", **text: Any) -> Path:
    """Saves a model and its processor in a directory. The processor scales (llava) or splits images (idefics3)."""
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer = train_tokenizer([*runs.SENTENCES, "where who 0123456789"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": special})

    def images(name: str, **options: Any) -> Any:
        without_torchvision = f"{name}ImageProcessorPil"  # in transformers 5 and later
        kind = getattr(transformers, without_torchvision, None) or getattr(transformers, f"{name}ImageProcessor")
        return kind(**options)

    options: dict[str, Any] = {"chat_template": TEMPLATE}
    config: dict[str, Any] = {"image_token_id": tokenizer.convert_tokens_to_ids(special[0])}
    if kind == "llava":
        sized = images("CLIP", size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        options |= {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor = transformers.LlavaProcessor(sized, tokenizer, **options)
        config |= {"vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER}}
    else:
        sized = images("Idefics3", size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        processor = transformers.Idefics3Processor(sized, tokenizer, image_seq_len=4, **options)
        config |= {"scale_factor": 2, "vision_config": TOWER}
    text = {"model_type": "llama", "pad_token_id": tokenizer.pad_token_id, **text}
    config |= {"text_config": {**TEXT, "vocab_size": len(tokenizer), **text}}
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **config)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def rows(folder: Path, count: int = 8, command: str = "sft") -> list[dict[str, Any]]:
    """Returns training rows of a command. Each has an image of a different size, which is saved in `folder`."""
    source, examples = random.Random(0), []
    for number in range(count):
        size, path = (32 + 8 * number, 40), folder / f"{number}.png"
        Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1])).save(path)
        question, answer = runs.user(f"where {number}"), runs.assistant(runs.SENTENCES[number])
        row = {"prompt": question, "chosen": answer, "rejected": runs.assistant("who")}
        examples.append({"images": [str(path)], **(row if command == "dpo" else {"messages": question + answer})})
    return examples
