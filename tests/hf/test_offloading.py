"""Training with activations that Hugging Face's libraries offload to the host gives bitwise the same weights."""

import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from support import language_models
from support.nets import same
from support.products import FULL
from transformers import LlamaForCausalLM

import lowmem

pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor")

if not hasattr(LlamaForCausalLM, "activation_checkpointing_enable"):
    pytest.skip("this transformers has no offload", allow_module_level=True)


def llama(offload=False, **config):
    """Returns a small Llama with checkpointed layers. With `offload`, transformers moves their inputs to the host."""
    model = language_models.make(**config)
    model.gradient_checkpointing_enable(offload=offload)
    return model


NO_CONTEXT = nullcontext()


@mock.patch.object(torch.cpu, "is_available", lambda: False)  # save_on_cpu would pin memory, which needs a GPU
def train(model, context=NO_CONTEXT, micro_batches=1, **options):
    """Trains on batches of different lengths."""
    opt = lowmem.FusedOptimizer(model.named_parameters(), model=model, lr=1e-2, **options)
    torch.manual_seed(1)
    for step in range(2):
        for n in range(1, micro_batches + 1):

            def loss(n=n, step=step):
                source = torch.Generator().manual_seed(step * micro_batches + n)
                ids = torch.randint(97, (4, 160 - 8 * step), generator=source)
                return model(input_ids=ids, labels=ids).loss / micro_batches

            with context, opt.accumulate() if n < micro_batches else nullcontext():
                value = loss()
                offloaded = getattr(context, "tracker", {0: (0, True)}).values()
                assert any(on_host for _, on_host, *_ in offloaded)
                opt.backward(value)


POLICIES = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass", "clip_norm": 0.5},
    "deferred": {"policy": "deferred", "clip_norm": 0.5, "micro_batches": 2},
}


@contextmanager
def trl_offload(model):
    """Returns TRL's context that offloads all activations, with the CPU as the accelerator."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    cpu = mock.patch.object(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    others = {name: module for name, module in sys.modules.items() if name != "bitsandbytes"}  # or it empties a cache
    with cpu, mock.patch.dict(sys.modules, others, clear=True):
        yield get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=1)


WHERE = [("host", "two_pass"), ("trl", "immediate"), ("trl", "deferred")]
WHERE += [("host", "immediate"), ("host", "deferred")] if FULL else []


@pytest.mark.parametrize(("where", "policy"), WHERE)
def test_offloading_does_not_change_a_bit(where, policy):
    """Weights may be tied or frozen. The recomputation must draw the same dropout mask."""
    nets = [llama(offload, tie_word_embeddings=True, attention_dropout=0.1) for offload in (False, where == "host")]
    for net in nets:
        net.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        with trl_offload(net) if (where, net) == ("trl", nets[1]) else nullcontext(NO_CONTEXT) as context:
            train(net, context, **POLICIES[policy])
    assert same(*(net.parameters() for net in nets))
