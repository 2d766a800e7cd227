"""Trains a small tokenizer, byte-level BPE with a chat template, for models that start from random weights."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowmem.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BEGIN, END, PAD, *ROLE_TOKENS)
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# A message begins with the token of its role. The answers, with their end token, are marked for the loss.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, chat_template: str | None = None
) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer for Transformers. It decodes every text that it encodes to the same text.

    Args:
        texts: the same texts give the same tokenizer.
        vocab_size: size of the vocabulary with the 256 bytes and the special tokens. It is smaller if there is too
            little text.
        chat_template: Jinja; None uses `CHAT_TEMPLATE`.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size}; it must be at least {SMALLEST_VOCABULARY} "
            f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens)."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(ROLE_TOKENS),
        chat_template=chat_template or CHAT_TEMPLATE,
    )
