"""A tied embedding adds its gradient to the head's gradient. The sum is bitwise exact, and only one is in memory."""

import copy
import pickle
from functools import partial

import pytest
import torch
from support.devices import seeded
from support.nets import full_weights, through_file
from support.shards import replicated, whole_first
from test_linear_cross_entropy import Largest
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem.layers import tied
from lowmem.layers.head import linear_cross_entropy
from lowmem.layers.tied import TiedEmbedding, share_gradient

VOCABULARY, SIZE, MEMORY = 1201, 32, 100_000  # an odd number of rows, in about 12 blocks


class Scaled(torch.nn.Embedding):
    """An embedding that scales its output, as in Gemma."""

    def forward(self, ids):
        return super().forward(ids) * 3


class Net(torch.nn.Module):
    def __init__(self, cls=torch.nn.Embedding, heads=1, padding=None):
        super().__init__()
        self.embed, self.layer = cls(VOCABULARY, SIZE, padding_idx=padding), torch.nn.Linear(SIZE, SIZE)
        self.head = torch.nn.Linear(SIZE, VOCABULARY, bias=False)
        self.head.weight, self.heads = self.embed.weight, heads

    def forward(self, ids):
        hidden = torch.tanh(self.layer(self.embed(ids[:-1])))
        losses = (self.head(n * hidden, ids[1:]) for n in range(1, self.heads + 1))
        return sum(losses)


class TiledHead(torch.nn.Linear):
    def forward(self, hidden, labels):
        return linear_cross_entropy(hidden, self.weight, labels, memory=MEMORY)


def make(shares=True, dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = Net(**options).to(dtype)
    net.head.__class__ = TiledHead
    for param in net.parameters():
        torch.nn.init.normal_(param, std=0.5)
    if shares:
        assert share_gradient(net.embed)
    return net


def ids_of(step, tokens=40):
    ids = torch.randint(VOCABULARY, (tokens,), generator=seeded(step))
    ids[:5] = 7  # repeated words
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"cls": Scaled}, {"heads": 2}, {"padding": 7}], ids=str)
def test_the_sum_of_both_gradients(options, dtype):
    nets = [make(shares, dtype, **options) for shares in (True, False)]
    for net in nets:
        net(ids_of(0)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_one_gradient_exists(monkeypatch):
    """The embedding adds to the head's gradient without allocating another one, and autograd makes no copy."""
    net, waiting, addresses = make(), tied.waiting, []

    def noted(weight):
        grad = waiting(weight)
        addresses.append(None if grad is None else grad.data_ptr())
        return grad

    monkeypatch.setattr(tied, "waiting", noted)
    loss = net(ids_of(0))
    with Largest(net.parameters()) as largest:
        loss.backward()
    assert addresses == [None, net.embed.weight.grad.data_ptr()]
    assert largest.nbytes == net.embed.weight.nbytes


def test_a_gradient_of_another_backward_is_left_alone():
    """The other backward is inside a reentrant checkpoint, or has already ended."""
    nets = [make(shares) for shares in (True, False)]
    for net in nets:
        grads = []
        net.head.weight.register_hook(lambda grad, grads=grads: grads.append(grad))
        net(ids_of(0)).backward()
        before = grads[0].clone()
        net.embed(ids_of(1)).sum().backward()
        assert torch.equal(grads[0], before)
        outside = net.embed(ids_of(2)[:-1])
        more = partial(lambda net, ids, x: (x + net.embed(ids)).tanh(), net, ids_of(3)[:-1])
        inside = checkpoint(more, outside, use_reentrant=True)
        net.head(inside, ids_of(2)[1:]).backward()
    assert torch.allclose(*(net.embed.weight.grad for net in nets), rtol=1e-6)


def through_another_process(module):
    """Unpickles as in a process that has not created the embedding's class yet."""
    pickled = pickle.dumps(module)
    tied._tied.cache_clear()
    return pickle.loads(pickled)


@pytest.mark.parametrize(
    "duplicate", [through_another_process, copy.deepcopy, lambda module: through_file(module, weights_only=False)]
)
@pytest.mark.parametrize("cls", [torch.nn.Embedding, Scaled])
def test_a_model_can_still_be_copied_and_pickled(cls, duplicate):
    module = torch.nn.Sequential(cls(10, 4, padding_idx=3))
    assert share_gradient(module[0]) and share_gradient(module[0])
    (other,) = duplicate(module)
    assert isinstance(other, cls) and isinstance(other, TiedEmbedding)
    assert (type(other).__name__, other.padding_idx) == (type(module[0]).__name__, 3)
    assert torch.equal(other(torch.arange(10)), module(torch.arange(10)))


# -- several ranks -----------------------------------------------------------------------------------------------------


def in_one_unit(rank, make):
    """FSDP2 requires this for tied weights."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(make())


def trained(rank, kind, settings):
    """Returns full weights after three steps, and how often the embedding added to a gradient of the head."""
    added, waiting = [], tied.waiting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tied, "waiting", lambda weight: added.append(waiting(weight) is not None) or waiting(weight))
        net = {"zero3": whole_first, "fsdp2": in_one_unit, "replicated": replicated}[kind](rank, make)
        opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-2, compile=False, **settings)
        for step in range(3):
            opt.backward(lambda step=step: net(ids_of(10 * step + rank)))
    return full_weights(net), sum(added)


@pytest.mark.parametrize("kind", ["zero3", "fsdp2", "replicated"])
@pytest.mark.parametrize("settings", [{"rule": "lomo"}, {"rule": "lomo", "clip_norm": 0.1, "policy": "deferred"}])
def test_ranks_get_the_weights_of_one_device(kind, settings, two):
    net = make(shares=False)
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2, compile=False, **settings)
    for step in range(3):
        opt.backward(lambda step=step: sum(net(ids_of(10 * step + rank)) for rank in range(2)) / 2)
    for weights, added in two.run(trained, kind, settings):
        assert added == 3
        torch.testing.assert_close(weights, full_weights(net), rtol=1e-4, atol=1e-5)
