"""The embeddings of any model, and what a trainer changes of models that have none or several."""

import pytest
import torch
import transformers as hf
from torch import nn

from lowmem.errors import UnsupportedError
from lowmem.hf import layers
from lowmem.hf.packing import check_borders
from lowmem.layers.tied import TiedEmbedding
from lowmem.options import LayersConfig

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


class Several(nn.Module):
    """Embeddings, none of which a method names."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(30, 4), nn.Embedding(20, 4)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=20, **SIZES))


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=4, patch_size=2))


# A model, its input embedding and its output embedding.
MODELS = [
    (llama, nn.Embedding, nn.Linear),
    (vit, nn.Module, None),
    (Several, None, None),
]


@pytest.mark.parametrize(("make", "source", "target"), MODELS)
def test_embeddings_are_found_by_get_input_embeddings(make, source, target):
    model = make()
    for side, kind in (("input", source), ("output", target)):
        module = layers.embedding(model, side)
        assert module is None if kind is None else isinstance(module, kind)


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
