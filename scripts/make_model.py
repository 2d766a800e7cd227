"""Writes the model for the quickstart: a small model with random weights, and a tokenizer trained on a file of chats.

    python scripts/make_model.py --data data/docstrings.jsonl --out models/quickstart

The same data and sizes give the same files. Each line of the data contains strings or lists of messages with `content`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BEGIN, END, PAD, *ROLE_TOKENS)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# A message starts with the token of its role. Answers, including their end tokens, are marked for the loss.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer for Transformers. Decoding restores every encoded text exactly.

    Args:
        texts: the training data. The same texts give the same tokenizer.
        vocab_size: at least `SMALLEST_VOCABULARY`. The vocabulary is smaller if there is not enough text.
        chat_template: a Jinja template; None uses `CHAT_TEMPLATE`.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    begin = [(BEGIN, bpe.token_to_id(BEGIN))]
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=begin)
    tokens = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD, "additional_special_tokens": [*ROLE_TOKENS]}
    tokens |= {"model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=chat_template or CHAT_TEMPLATE, **tokens)


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **sizes: Any) -> None:
    """Writes a Llama with random float32 weights and its tokenizer as a model directory of transformers.

    Args:
        sizes: arguments of `LlamaConfig`. `vocab_size` may be larger than the tokenizer's, which is the default.
    """
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    set_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer), **ids, **sizes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(path: Path) -> Iterator[str]:
    """Yields every string in a JSONL file of texts and chats."""
    for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
        for value in json.loads(line).values():
            yield from [value] if isinstance(value, str) else (message["content"] for message in value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the JSONL file to train the tokenizer on")
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (2048)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    arguments = parser.parse_args()
    hidden = arguments.hidden_size
    make_model(
        arguments.out, train_tokenizer(texts(arguments.data), arguments.vocab_size), arguments.seed,
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=arguments.layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    print(f"{arguments.out}: a Llama of {arguments.layers} layers and its tokenizer")


if __name__ == "__main__":
    main()
