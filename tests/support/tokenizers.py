"""A small tokenizer, byte-level BPE with a chat template, trained on a few sentences."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts, vocab_size=270):
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [*special.values(), *ROLES], "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    begin = [(special["bos_token"], bpe.token_to_id(special["bos_token"]))]
    bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=TEMPLATE, **special, extra_special_tokens=[*ROLES]
    )
