"""Tests the number of operations and the memory of tiled MLPs."""

import pytest
import torch
from support.mlps import GROUPS, MLP, Net, build, gradients, step
from support.nets import Memory
from torch.utils.flop_counter import FlopCounterMode

from lowmem.layers.mlp import tile_mlps


@pytest.mark.parametrize("frozen", [(), ("gate",), ("gate", "up", "down")])
@pytest.mark.parametrize("needed", [True, False])
def test_frozen_weights_and_an_input_without_gradient_cost_nothing(frozen, needed):
    """The cost is two forwards, and one matrix product for each required gradient."""
    net = Net(MLP())
    tile_mlps(net, 4)
    for name in frozen:
        getattr(net.mlp, name).requires_grad_(False)
    x = torch.randn(16, 32, requires_grad=needed)
    net(x)  # the first one also checks
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward() if needed or len(frozen) < 3 else net(x)
    product = 2 * 16 * 32 * 64
    trained = 3 - len(frozen)
    inputs = 1 if needed or {"gate", "up"} - set(frozen) else 0  # the input of down
    inputs += 2 if needed else 0
    forwards = 2 if needed or trained else 1
    assert counter.get_total_flops() == product * (3 * forwards + trained + inputs)
    assert gradients(net).keys() == {name for name, param in net.named_parameters() if param.requires_grad}


def test_activation_checkpointing_does_not_compute_tiles_once_more(token_batches):
    """Only the last product of each layer is recomputed, since untiled MLPs save their last tensor before it."""
    model = build("Llama", GROUPS, checkpointing=True)
    (batch,) = token_batches(1)
    flops = []
    for _ in range(2):
        model(**batch)  # the first one also checks
        with FlopCounterMode(display=False) as counter:
            step(model, batch)
        flops.append(counter.get_total_flops())
        tile_mlps(model, 8)
    assert flops[1] == flops[0] + 2 * 2 * 32 * 32 * 64


def peak(net, x):
    """Returns the peak bytes of a forward and a backward, beyond the input and parameters."""
    net(x)  # the first one also checks
    before = sum(tensor.nbytes for tensor in (x, *net.parameters()))
    with Memory(net, x) as memory:
        net(x).sum().backward()
    gradients(net)
    x.grad = None
    return memory.most - before


@pytest.mark.filterwarnings("ignore:Expected a tensor")
@pytest.mark.parametrize("tokens", [256, 64])
def test_activations_of_one_tile_exist_at_a_time(tokens):
    """The rest is the layer's input and output, their gradients, and weight gradients in total and of one tile."""
    net = Net(MLP(hidden=32, wide=512))
    x = torch.randn(1, 2048, 32, requires_grad=True)
    whole = peak(net, x)
    activation = 2048 * 512 * 4
    assert whole >= 4 * activation  # gate, up, the activation and the product
    tile_mlps(net, tokens)
    rest = 6 * x.nbytes + 2 * sum(param.nbytes for param in net.parameters())
    tiled = peak(net, x)
    assert tiled <= whole * tokens / 2048 + rest
