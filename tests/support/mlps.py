"""Small models with MLPs, and functions for their gradients."""

import torch
import transformers
from torch import nn

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "use_cache": False}  # fmt: skip
GROUPS = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# Name → name of the transformers class, configuration, and path to the layers
MODELS = {
    "Llama": ("Llama", GROUPS, "model.layers"),
    "Qwen2": ("Qwen2", GROUPS, "model.layers"),
    "Qwen3": ("Qwen3", GROUPS | {"head_dim": 8}, "model.layers"),
    "Gemma2": ("Gemma2", GROUPS | {"head_dim": 8}, "model.layers"),
    "Gemma3": ("Gemma3", GROUPS | {"head_dim": 8}, "model.layers"),
    "Mistral": ("Mistral", GROUPS | {"head_dim": 8}, "model.layers"),
    "Phi": ("Phi", GROUPS | NO_DROPOUT, "model.layers"),
    "Phi3": ("Phi3", GROUPS | NO_DROPOUT, "model.layers"),
    "GPT-2": ("GPT2", GPT2 | NO_DROPOUT, "transformer.h"),
    "GPT-NeoX": ("GPTNeoX", SIZES, "gpt_neox.layers"),
}


def build(kind, sizes, checkpointing=False):
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(kind, kind) + "Config")(**sizes)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, kind + "ForCausalLM"))(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def gradients(model):
    """Returns the gradients by name and clears them in the model."""
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return grads


def step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_close(tiled, whole, tolerance=1e-6):
    assert tiled.keys() == whole.keys()
    for name, grad in whole.items():
        assert tiled[name].dtype == grad.dtype
        assert (tiled[name] - grad).norm() <= tolerance * grad.norm(), name


class MLP(nn.Module):
    """A gated MLP, as in Llama."""

    def __init__(self, hidden=32, wide=64, drop=0.0):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, wide), nn.Linear(hidden, wide)
        self.down, self.act, self.dropout = nn.Linear(wide, hidden), nn.SiLU(), nn.Dropout(drop)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.gate(x)) * self.up(x)))


class Net(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)
