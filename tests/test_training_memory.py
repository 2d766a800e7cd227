"""The promise about memory, counted tensor by tensor: above weights and states, one gradient and next to nothing, or,
under `deferred`, the stored gradients.

The model's embedding is 16 MiB, a third of it, and the last to get its gradient; the head is as large and the first.
"""

from contextlib import nullcontext

import pytest
import torch
from support.nets import Memory

import lowmem
from lowmem.step import policies
from lowmem.step.offload import GradientStore

MIB = 1 << 20
VOCABULARY = 16384
pytestmark = pytest.mark.filterwarnings("ignore:Expected a tensor")


@pytest.fixture
def model(tiny_llama):
    def make(checkpointing=True, vocab_size=VOCABULARY, layers=1):
        sizes = {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": layers}
        return tiny_llama(checkpointing=checkpointing, vocab_size=vocab_size, **sizes)

    return make


@pytest.fixture
def batch(token_batches):
    """A short one: few activations."""
    return token_batches(1, size=(1, 8), vocab_size=VOCABULARY)[0]


def fused(model, **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-3, **options)
    return opt, lambda batch: opt.backward(model(**batch).loss)


def peak_above_weights_and_states(model, opt, step, batch):
    """Bytes at the peak of the second step, by kind, weights and optimizer states (there since the first) left out."""
    step(batch)
    with Memory(model, opt) as memory:
        step(batch)
    return memory.above


def sizes(model):
    return [param.numel() * param.element_size() for param in model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [{"rule": "adalomo"}, {"rule": "lomo", "clip_value": 1.0}], ids=lambda o: o["rule"])
def test_fused_needs_one_gradient(options, checkpointing, model, batch):
    """The largest gradient, and 8 MiB for activations, tiles and small sums."""
    net = model(checkpointing)
    largest = max(sizes(net))
    assert largest == 16 * MIB
    assert largest <= peak_above_weights_and_states(net, *fused(net, **options), batch) <= largest + 8 * MIB


def test_bfloat16_needs_no_float32_copy(model, batch):
    """A bfloat16 gradient of 8 MiB; a float32 copy of it, of its weight, its moment or the update would be 16 more."""
    net = model().bfloat16()
    assert 8 * MIB <= peak_above_weights_and_states(net, *fused(net, rounding="compensated"), batch) <= (8 + 8) * MIB


def test_adamw_in_8_bits_is_weights_states_and_one_gradient(model, batch):
    """Bytes per element between two steps: 2 of the weight, 1 of the residual, 1 of each moment, and a bfloat16 scale
    for 32 elements of each. In a step there are one gradient and 8 MiB more."""
    net = model().bfloat16()
    opt, step = fused(net, rule="adamw", rounding="compensated8", state_storage="8bit")
    each = 5.125
    step(batch)
    extra = [tensor for record in opt._records.values() for tensor in record.extra.values()]
    tensors = [*net.parameters(), *(t for state in opt.state.values() for t in state.values()), *extra]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    small = sum(param.numel() for param in net.parameters() if param.ndim == 1)  # their moments are float32
    count = sum(param.numel() for param in net.parameters()) - small
    assert held == pytest.approx(each * count + (each - 2.125 + 8) * small, rel=1e-5)  # and a count for each parameter
    del tensors
    with Memory(net, opt, *extra) as memory:
        step(batch)
    assert held <= memory.total("current") <= held + 1 * MIB
    assert memory.most <= held + max(sizes(net)) + 8 * MIB


def peak_of_policy(net, batch, micro_batches=1, **options):
    """Bytes above what stays between steps (weights, states, and the file that is mapped), in the third step.

    The tracker looks at everything alive after every operation, so the rule is one of few operations.
    """
    opt = lowmem.FusedOptimizer(net.named_parameters(), "lomo", lr=1e-3, clip_norm=1.0, **options)
    memory = Memory()

    def step():
        for n in range(1, micro_batches + 1):
            memory.reset_mod_stats()  # it cannot track a module's second forward otherwise
            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(net(**batch).loss)

    step()
    step()
    memory.track_external(net, opt)
    with memory:
        step()
    return memory.above


# The gradients of a policy at its peak: how many of the largest, and how often all of them, in their dtype.
PLANS = {
    "two_pass": ({"policy": "two_pass"}, 1, torch.float32, 1, 0),
    "in memory": ({"policy": "deferred"}, 1, torch.float32, 0, 1),
    "in memory, 3": ({"policy": "deferred"}, 3, torch.float32, 1, 1),
    "on the host": ({"policy": "deferred", "store": "host"}, 1, torch.float32, 1, 0),
    # two gradients leave while the next one comes and is added to
    "on the host, 3": ({"policy": "deferred", "store": "host"}, 3, torch.float32, 2, 0),
    # float32 sums of bfloat16 gradients are twice as large; the second micro-batch makes them, beside both gradients
    "float32 sums, 3": ({"policy": "deferred"}, 3, torch.bfloat16, 2, 2),
    "float32 sums on the host, 3": ({"policy": "deferred", "store": "host"}, 3, torch.bfloat16, 4, 0),
}


@pytest.mark.parametrize(("options", "micro_batches", "dtype", "largest", "all_of_them"), PLANS.values(), ids=PLANS)
def test_the_memory_of_a_policy_equals_its_plan(
    options, micro_batches, dtype, largest, all_of_them, model, batch, monkeypatch
):
    if options.get("store") == "host":  # as for a GPU: the memory to which gradients are offloaded stays
        monkeypatch.setattr(policies, "GradientStore", lambda budget: GradientStore(0))
    net = model().to(dtype)
    peak = peak_of_policy(net, batch, micro_batches, **options)
    plan = largest * max(sizes(net)) + all_of_them * sum(sizes(net))
    assert plan - 1 * MIB <= peak <= plan + 8 * MIB
