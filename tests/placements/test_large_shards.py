"""Large parameters, which are not stacked, give the same results on several ranks as on one device."""

import math

import pytest
import torch
import torch.distributed as dist
from support.nets import Chain, Memory, full_weights
from support.products import FULL, in_turn
from support.shards import SHARDS

import lowmem
from lowmem.step.updates import SMALL


class Large(torch.nn.Module):
    """Each matrix has more than SMALL elements. With three ranks, FSDP2 leaves the last one no row of `wide`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(130, 150), torch.nn.Linear(150, 130)
        self.wide, self.odd = (torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in ((2, 9000), (17001,)))
        self.unused = torch.nn.Linear(130, 150)

    def forward(self, x, spoiled=1.0):
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        wide = torch.nn.functional.linear(out.repeat(1, 70)[:, :9000], self.wide)
        return (out.square().mean() + wide.square().mean() + self.odd.square().mean() * spoiled * x.mean()) * 10


STEPS = 4


def train(net, rows_of, settings, spoil):
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    norms, skipped = [], []
    for step in range(STEPS):
        x = rows_of(torch.linspace(0.5, 1.5, 6 * 130).view(6, 130) + step / 10)
        opt.backward(net(x, spoil if step == 2 else 1.0))
        norms.append(opt.last_step.norms.clone())
        skipped.append(opt.last_step.skipped_params)
    return full_weights(net), torch.stack(norms), skipped


def shared(rank, kind, settings, spoil):
    net = SHARDS[kind](rank, Large)
    return train(net, lambda x: x.tensor_split(dist.get_world_size())[rank], settings, 1.0 if rank else spoil)


SETTINGS = {
    "adamw": {"rule": "adamw"},
    "lion": {"rule": "lion", "lr": 1e-4},
    "a torch class": {"rule": "torch.optim.AdamW"},
    "compiled": {"rule": "adamw", "compile": True},
    "clamped": {"rule": "adamw", "clip_value": 1e-3},
    "clipped": {"rule": "adamw", "policy": "deferred", "clip_norm": 0.1},
    "adalomo": {"rule": "adalomo"},
}


@pytest.mark.parametrize(("kind", "case", "spoil"), in_turn(SHARDS, SETTINGS, [math.inf, 1.0, 1e25]), ids=str)
def test_large_parameters_as_on_one_device(ranks_of, kind, case, spoil):
    """One rank multiplies a gradient by `spoil`, which makes it infinite or its square overflow float32."""
    # a larger rate saturates tanh, whose gradient is then a difference that depends on the order of sums
    settings = {"lr": 1e-3, **SETTINGS[case]}
    assert all(param.numel() > SMALL for name, param in Large().named_parameters() if "bias" not in name)
    third_party = settings["rule"] == "torch.optim.AdamW"  # it applies non-finite gradients
    spoil = math.inf if third_party and spoil > 1 else spoil
    alone, norms, skipped = train(Large(), lambda x: x, settings, spoil)
    assert any(skipped) is (spoil > 1 and not third_party)
    for weights, shared_norms, shared_skipped in ranks_of(3).run(shared, kind, settings, spoil):
        assert shared_skipped == skipped
        torch.testing.assert_close(shared_norms, norms, rtol=1e-4, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5, equal_nan=True)


def make_block():
    """Returns a matrix and a norm, whose gradients FSDP2 packs into one tensor."""
    return torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.RMSNorm(512))


def above_what_stays(rank, kind, depth, rule):
    options = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 0}
    options = {**options, "stage3_max_reuse_distance": 0} if kind == "zero3" else {}
    net = SHARDS[kind](rank, lambda: Chain(*(make_block() for _ in range(depth))), **options)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, lr=1e-3, rule=rule, compile=False)
    x = torch.ones(1, 512)

    def step():
        opt.backward(net(x))

    step()
    peaks = []
    for _ in range(2):  # a gloo thread may hold one more shard for a moment, so the lowest peak counts
        with Memory(net, opt, *(getattr(param, "ds_tensor", param) for param in net.parameters())) as memory:
            step()
        peaks.append(memory.above)
    return min(peaks)


@pytest.mark.by_tiles("vectors are updated in stacks, of which none is compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "rule"), [("fsdp2", "adamw"), *([("zero3", "adalomo")] if FULL else [])])
def test_memory_does_not_grow_with_depth(two, kind, rule):
    """Gradients of norms wait to be stacked and must not keep gradients of matrices alive (512 KiB per shard)."""
    # FSDP2 gathers two layers at a time and frees the first few blocks late
    shallow, deep = (max(two.run(above_what_stays, kind, depth, rule)) for depth in (8, 12))
    assert deep <= shallow + 4 * 3 * 512 * 4 + (256 << 10)
