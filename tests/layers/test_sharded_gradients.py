"""Computed gradients under sharding: ZeRO-3 reduces them block by block, FSDP2 and replicated ranks have tensors."""

import pytest
import torch
import torch.distributed as dist
from support.devices import seeded
from support.nets import full_weights
from support.shards import KINDS, whole_first
from test_linear_cross_entropy import Largest

import lowmem
from lowmem.layers.embedding import ComputedEmbedding
from lowmem.layers.head import linear_cross_entropy
from lowmem.layers.head_tiles import HeadGradient
from lowmem.placements import zero3
from lowmem.placements.zero3 import _ReduceScatter
from lowmem.step.hooks import Hooks

VOCABULARY, SIZE, MEMORY = 1201, 32, 100_000  # an odd number of rows, in about 12 blocks
TOKENS = (20, 31, 17)  # of each rank


class Head(torch.nn.Linear):
    def forward(self, hidden, labels):
        return linear_cross_entropy(hidden, self.weight, labels, memory=MEMORY)


class Net(torch.nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = ComputedEmbedding(VOCABULARY, SIZE)
        self.embed.memory = MEMORY
        self.layer = torch.nn.Linear(SIZE, SIZE)
        self.head = Head(SIZE, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.embed(ids[:-1]))), ids[1:])


def make(tied):
    torch.manual_seed(0)
    net = Net(tied)
    for param in net.parameters():
        torch.nn.init.normal_(param, std=0.5)
    return net


def batches(rank, step):
    source = seeded(100 * step + rank)
    return torch.randint(VOCABULARY, (TOKENS[rank],), generator=source)


def trained(rank, kind, tied, settings):
    """Full weights after three steps, what the optimizer took, and the largest tensor that a reduction made."""
    taken, largest = set(), [0]
    offer, reduce = Hooks._offer, _ReduceScatter._reduce_blocks

    def offered(self, record, contribution):
        takes = offer(self, record, contribution)
        taken.add((type(contribution).__name__, takes))
        return takes

    def reduced(self, record, grad, *args):
        gathered = [part.weight for part in grad.contributions if isinstance(part, HeadGradient)]
        with Largest(gathered) as seen:
            shard = reduce(self, record, grad, *args)
        largest[0] = max(largest[0], seen.nbytes)
        return shard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hooks, "_offer", offered)
        patch.setattr(_ReduceScatter, "_reduce_blocks", reduced)
        patch.setattr(zero3, "_BLOCK", 5000)
        net = {**KINDS, "zero3": whole_first}[kind](rank, lambda: make(tied))
        opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-2, compile=False, **settings)
        for step in range(3):
            opt.backward(lambda step=step: net(batches(rank, step)))
    return full_weights(net), taken, largest[0], dist.get_world_size()


def alone(ranks, tied, settings):
    """One device, on the mean of the losses."""
    net = make(tied)
    opt = lowmem.FusedOptimizer(net.named_parameters(), lr=1e-2, compile=False, **settings)
    for step in range(3):
        opt.backward(lambda step=step: sum(net(batches(rank, step)) for rank in range(ranks)) / ranks)
    return full_weights(net)


CASES = [
    ("zero3", False, {"rule": "adalomo"}),
    ("zero3", True, {"rule": "lomo", "clip_norm": 0.1, "policy": "deferred"}),
    ("zero3", True, {"rule": "adamw", "clip_norm": 0.1, "policy": "deferred"}),
    ("zero3", False, {"rule": torch.optim.AdamW}),
    ("fsdp2", False, {"rule": "lomo"}),
    ("replicated", True, {"rule": "lomo"}),
]


@pytest.mark.parametrize(("kind", "tied", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_ranks_get_the_weights_of_one_device(kind, tied, settings, ranks):
    """Sums over ranks and blocks are added in another order; AdamW and AdaLomo divide by numbers as small as 1e-3."""
    expected = None
    for weights, taken, largest, count in ranks.run(trained, kind, tied, settings):
        expected = expected or alone(count, tied, settings)
        assert {takes for _, takes in taken} <= {kind == "zero3"}
        assert bool(taken) or kind == "fsdp2"  # whose modules have other parameters than the optimizer
        if kind == "zero3":
            assert {name for name, _ in taken} == {"HeadGradient", "EmbeddingGradient"}
            assert largest <= -(-VOCABULARY // count) * SIZE * 4
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
