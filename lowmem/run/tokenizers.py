"""Trains a small tokenizer, byte-level BPE with a chat template, for models that start from random weights."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
    {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer for Transformers. It decodes every text that it encodes to the same text.

    Args:
        texts: the same texts give the same tokenizer.
        vocab_size: at least `SMALLEST_VOCABULARY`; too little text gives a smaller vocabulary.
        chat_template: Jinja; None uses `CHAT_TEMPLATE`.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    begin = [(BEGIN, bpe.token_to_id(BEGIN))]
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=begin)
    tokens = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD, "extra_special_tokens": [*ROLE_TOKENS]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=chat_template or CHAT_TEMPLATE, **tokens)
