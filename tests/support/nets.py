"""Models that several tests train, data for them, and what tests ask of any model: its weights, and its memory."""

import torch
from support.devices import seeded
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

STEPS = 10
ROWS = 6  # a step, over all ranks: 6, 3 or 2 each
LAYERS = 8


class Net(torch.nn.Module):
    """Odd shapes from 0-D to 4-D, experts [E, in, out], a tied weight, a frozen one, a branch that some data skips."""

    def __init__(self, scalar=()):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(7, 5))
        self.convolution = torch.nn.Conv2d(1, 3, (2, 3))
        self.experts = torch.nn.Parameter(torch.randn(3, 12, 5) * 0.3)
        self.gain = torch.nn.Parameter(torch.full(scalar, 1.3))
        self.one = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.seldom = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, ids):
        x = self.embed[ids]  # [rows, 5, 5]
        spread = self.convolution(x.unsqueeze(1)).flatten(2).mean(1)  # [rows, 12]
        mixed = torch.einsum("ri,eio->ro", spread, self.experts) * self.gain + self.one + self.frozen
        odd = ids[:, 0] % 2 == 1
        if odd.any():
            mixed = mixed + odd[:, None] * self.seldom(mixed)
        logits = mixed @ self.embed.T  # tied
        return torch.nn.functional.cross_entropy(logits, ids[:, -1])


class Layers(torch.nn.Module):
    """Layers of one shape that are taken in any order, or not at all."""

    def __init__(self, size=4, checkpointed=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(LAYERS))
        self.size, self.checkpointed = size, checkpointed

    def forward(self, path):
        x = torch.ones(1, self.size, requires_grad=self.checkpointed)
        for n in path:
            x = checkpoint(self.layers[n], x, use_reentrant=True) if self.checkpointed else self.layers[n](x)
        return x.square().sum()


def data():
    """Ten batches for all ranks together."""
    source = seeded(5)
    for step in range(STEPS):
        ids = torch.randint(7, (ROWS, 5), generator=source)
        if step % 3 == 1:
            ids[1:, 0] = 2 * (ids[1:, 0] // 2)  # only the first rank, if any, has odd rows
        yield ids


def give_gradients(opt, *pairs):
    """`opt.backward` of a float32 loss whose gradients are just those given, as (parameter, gradient) pairs."""
    return opt.backward(torch.stack([(param * grad).sum().float() for param, grad in pairs]).sum())


def weights(*nets):
    return [param.detach().clone() for net in nets for param in net.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name].to(one[name].device)), name


class Memory(MemTracker):
    """Bytes on the default device while it is entered, of tensors in `held` too; `above` is what does not stay."""

    def __init__(self, *held):
        super().__init__()
        self.track_external(*held)

    def total(self, when):
        return self.get_tracker_snapshot(when)[torch.empty(0).device]["Total"]

    @property
    def most(self):
        return self.total("peak")

    @property
    def above(self):
        return self.most - self.total("current")
