"""Tests how trainers replace tied embeddings and check embeddings of packed samples."""

import pytest
import torch
import transformers as hf

from lowmem.errors import UnsupportedError
from lowmem.hf import layers
from lowmem.hf.packing import check_borders
from lowmem.layers.tied import TiedEmbedding
from lowmem.options import LayersConfig

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    ("tied", "computed", "changed"), [(True, "auto", True), (False, "auto", False), (True, False, False)]
)
def test_a_tied_embedding_shares_the_gradient_of_a_head_in_tiles(tied, computed, changed):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=20, tie_word_embeddings=tied, **SIZES))
    layers.apply(model, LayersConfig(computed_gradients=computed))
    assert isinstance(model.model.embed_tokens, TiedEmbedding) == changed


class Unnamed(hf.LlamaForCausalLM):
    def get_input_embeddings(self):
        raise NotImplementedError


def test_packing_needs_an_embedding_to_be_checked():
    model = Unnamed(hf.LlamaConfig(vocab_size=20, **SIZES))
    with pytest.raises(UnsupportedError, match=r"Unnamed does not implement get_input_embeddings\(\)"):
        check_borders(model, lambda rows: {"input_ids": torch.tensor([rows[0]["input_ids"] * 2])},
                      torch.device("cpu"))  # fmt: skip
