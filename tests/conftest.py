"""What the tests share: one thread, a fixed seed, a small Llama, and a loss with just the gradients asked for."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Tests run side by side, and their tensors are too small to be worth a second thread.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama():
    """A factory: the same small Llama for the same arguments."""

    def make(dtype=torch.float32, checkpointing=False, **config):
        sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "use_cache": False, **config})).to(dtype)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.train()

    return make


@pytest.fixture(scope="session")
def token_batches():
    """A factory: `count` batches of random token ids as keyword arguments of a language model."""

    def make(count, size=(2, 16), vocab_size=97):
        source = torch.Generator().manual_seed(1)
        drawn = [torch.randint(vocab_size, size, generator=source) for _ in range(count)]
        return [{"input_ids": ids, "labels": ids} for ids in drawn]

    return make


@pytest.fixture(scope="session")
def give_gradients():
    """A function: `opt.backward` of a loss whose gradients are just those given, as (parameter, gradient) pairs."""

    def give(opt, *pairs):
        return opt.backward(torch.stack([(param * grad).sum().float() for param, grad in pairs]).sum())

    return give
