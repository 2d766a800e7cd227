"""In addition to weights and states, a step needs little more memory than one gradient. All tensors are counted.

The policy `deferred` also stores gradients. The model's embedding takes 16 MiB, a third of the model, and is the last
to get its gradient. The head has the same size and is the first.
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
    """Returns a short batch, so that activations are small."""
    return token_batches(1, size=(1, 8), vocab_size=VOCABULARY)[0]


def fused(model, **options):
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-3, **options)
    return opt, lambda batch: opt.backward(model(**batch).loss)


def peak_above_weights_and_states(model, opt, step, batch):
    """Returns bytes by kind at the peak of the second step, without weights and optimizer states."""
    step(batch)
    with Memory(model, opt) as memory:
        step(batch)
    return memory.above


def sizes(model):
    return [param.numel() * param.element_size() for param in model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [{"rule": "adalomo"}, {"rule": "lomo", "clip_value": 1.0}], ids=lambda o: o["rule"])
def test_fused_needs_one_gradient(options, checkpointing, model, batch):
    """The limit is the largest gradient plus 8 MiB for activations, tiles and small sums."""
    net = model(checkpointing)
    largest = max(sizes(net))
    assert largest == 16 * MIB
    assert largest <= peak_above_weights_and_states(net, *fused(net, **options), batch) <= largest + 8 * MIB


def test_bfloat16_needs_no_float32_copy(model, batch):
    """A bfloat16 gradient takes 8 MiB. A float32 copy of it, its weight, its moment or the update would add 16 MiB."""
    net = model().bfloat16()
    assert 8 * MIB <= peak_above_weights_and_states(net, *fused(net, rounding="compensated"), batch) <= (8 + 8) * MIB


def test_adamw_in_8_bits_is_weights_states_and_one_gradient(model, batch):
    """Between steps an element takes 2 bytes for the weight, 1 for the residual and 1 for each moment. Moments have a
    bfloat16 scale per 32 elements. A step adds one gradient and 8 MiB.
    """
    net = model().bfloat16()
    opt, step = fused(net, rule="adamw", rounding="compensated8", state_storage="8bit")
    bytes_per_element = 5.125
    step(batch)
    extra = [tensor for record in opt._records.values() for tensor in record.extra.values()]
    tensors = [*net.parameters(), *(t for state in opt.state.values() for t in state.values()), *extra]
    persistent = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    small = sum(param.numel() for param in net.parameters() if param.ndim == 1)  # their moments are float32
    count = sum(param.numel() for param in net.parameters()) - small
    expected = bytes_per_element * count + (bytes_per_element - 2.125 + 8) * small
    assert persistent == pytest.approx(expected, rel=1e-5)  # plus a count for each parameter
    del tensors
    with Memory(net, opt, *extra) as memory:
        step(batch)
    assert persistent <= memory.total("current") <= persistent + 1 * MIB
    assert memory.most <= persistent + max(sizes(net)) + 8 * MIB


def peak_of_policy(net, batch, micro_batches=1, **options):
    """Returns bytes at the peak of the third step beyond weights, states and the mapped file.

    The tracker examines all live tensors after every operation, so the test uses a rule with few operations.
    """
    opt = lowmem.FusedOptimizer(net.named_parameters(), "lomo", lr=1e-3, clip_norm=1.0, **options)
    memory = Memory()

    def step():
        for n in range(1, micro_batches + 1):
            memory.reset_mod_stats()  # otherwise the tracker fails in a module's second forward
            with opt.accumulate() if n < micro_batches else nullcontext():
                opt.backward(net(**batch).loss)

    step()
    step()
    memory.track_external(net, opt)
    with memory:
        step()
    return memory.above


# Gradients at the peak of a policy: how many of the largest one, how many copies of all gradients, and their dtype.
PLANS = {
    "two_pass": ({"policy": "two_pass"}, 1, torch.float32, 1, 0),
    "in memory": ({"policy": "deferred"}, 1, torch.float32, 0, 1),
    "in memory, 3": ({"policy": "deferred"}, 3, torch.float32, 1, 1),
    "on the host": ({"policy": "deferred", "store": "host"}, 1, torch.float32, 1, 0),
    # two gradients are offloaded while the next one is computed and accumulated
    "on the host, 3": ({"policy": "deferred", "store": "host"}, 3, torch.float32, 2, 0),
    # float32 sums of bfloat16 gradients are twice as large. The second micro-batch adds them next to both gradients.
    "float32 sums, 3": ({"policy": "deferred"}, 3, torch.bfloat16, 2, 2),
    "float32 sums on the host, 3": ({"policy": "deferred", "store": "host"}, 3, torch.bfloat16, 4, 0),
}


@pytest.mark.parametrize(("options", "micro_batches", "dtype", "largest", "all_of_them"), PLANS.values(), ids=PLANS)
def test_the_memory_of_a_policy_equals_its_plan(
    options, micro_batches, dtype, largest, all_of_them, model, batch, monkeypatch
):
    if options.get("store") == "host":  # as on a GPU, the memory for offloaded gradients stays allocated
        monkeypatch.setattr(policies, "GradientStore", lambda budget: GradientStore(0))
    net = model().to(dtype)
    peak = peak_of_policy(net, batch, micro_batches, **options)
    plan = largest * max(sizes(net)) + all_of_them * sum(sizes(net))
    assert plan - 1 * MIB <= peak <= plan + 8 * MIB
