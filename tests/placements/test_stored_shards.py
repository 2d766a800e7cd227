"""With replicated and sharded parameters, all storage formats give bitwise the results of one device."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.nets import assert_same, full_weights, states
from support.products import FULL, in_turn
from support.shards import KINDS, SHARDS, engine
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem import placements
from lowmem.errors import UnsupportedError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer
from lowmem.layers.quantize import quantize_
from lowmem.tiles.quantized import QuantizedWeight

# The format of quantized weights, or None, and the options of the optimizer.
ADAMW = {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit"}
ROUNDED = {**ADAMW, "rounding": "compensated8"}
CASES = {
    "adamw": (None, ROUNDED),
    "compiled": (None, {**ROUNDED, "batching": False, "compile": True}),
    "to nearest, not batched": (None, {**ROUNDED, "state_storage": "8bit_nearest", "batching": False}),
    "lion": (None, {**ROUNDED, "rule": "lion", "lr": 1e-3}),
    "stochastic, deferred": (None, {**ADAMW, "rounding": "stochastic", "policy": "deferred", "store": "host"}),
    "several rules": (None, {
        **ROUNDED,
        "groups": (
            {"match": "two", "rule": "lion", "lr": 1e-3, "state_storage": "8bit_64"},
            {"match": "experts", "rule": "adamw", "lr": 1e-2, "state_storage": "float32", "rounding": "stochastic"},
        ),
    }),
    "int8, no states": ("int8", {"rule": "lomo", "lr": 0.1}),
    "int8, lion, deferred": ("int8", {"rule": "lion", "lr": 1e-3, "policy": "deferred"}),
    "int10": ("int10", ADAMW),
    "int10, float32 states, clipped by value": ("int10", {**ADAMW, "state_storage": "float32", "clip_value": 1e-3}),
    "int12, accumulated": ("int12", {**ADAMW, "policy": "deferred"}),
    "int12, checkpointed": ("int12", ADAMW),
    "stochastic, lion": (None, {"rule": "lion", "lr": 1e-3, "rounding": "stochastic"}),
    "float32 states, compensated": (None, {"rule": "adamw", "lr": 1e-2, "rounding": "compensated"}),
    "int10, compiled": ("int10", {**ADAMW, "batching": False, "compile": True}),
}  # fmt: skip
PLACES = {
    "replicated": ("replicated", {}),
    "fsdp2": ("fsdp2", {}),
    "zero3": ("zero3", {"built_whole": True}),
    "zero3, on the host": ("zero3", {"built_whole": True, "offload_param": {"device": "cpu"}}),
    "zero3, nothing kept": ("zero3", {"built_whole": True, "stage3_param_persistence_threshold": 0}),
}


class Experts(torch.nn.Module):
    """A stack of three experts. The second one gets no tokens."""

    num_experts = 3

    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x, ids):
        first = (ids % 2 == 0)[:, None]
        return torch.where(first, F.linear(x, self.up_proj[0]), F.linear(x, self.up_proj[2]))


class Net(torch.nn.Module):
    """Rows and halves of large parameters consist of complete groups, but rows of `small` do not. Two ranks cannot
    split the rows of the tied matrix, of `one` or of the experts evenly, and one rank has no row of `few`.
    """

    def __init__(self, checkpoints=False):
        super().__init__()
        self.embed = torch.nn.Embedding(97, 64)
        self.one, self.two = torch.nn.Linear(64, 67), torch.nn.Linear(64, 64, bias=False)
        self.few, self.small = torch.nn.Linear(4096, 1), torch.nn.Linear(64, 7)
        self.experts = Experts()
        self.head = torch.nn.Linear(64, 97, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def block(self, x, ids):
        x = x + self.two(torch.tanh(self.one(x)[:, :64]))
        return x + self.few(x.repeat(1, 64)) + self.small(x).sum(-1, keepdim=True) + self.experts(x, ids)

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.block, x, ids, use_reentrant=False) if self.checkpoints else self.block(x, ids)
        return F.cross_entropy(self.head(x).float(), ids)


def make(weight_format=None, checkpoints=False):
    torch.manual_seed(0)
    net = Net(checkpoints).bfloat16()
    return quantize_(net, weight_format) if weight_format else net


def by_layer(rank, make):
    """Applies `fully_shard` to each layer. The two layers with a tied matrix belong to the root module."""
    from torch.distributed.fsdp import fully_shard

    net = make()
    for layer in (net.one, net.two, net.few, net.small, net.experts, net):
        fully_shard(layer)
    return net


def placed(rank, place, settings, *args, **kwargs):
    """Returns a model, sharded as `place` says or on one device, and its optimizer."""
    kind, options = PLACES[place] if place else ("replicated", {})
    net = {**KINDS, "fsdp2": by_layer}[kind](rank, functools.partial(make, *args, **kwargs), **options)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    assert opt.placement == (kind if place else "local")
    return net, opt


def steps(net, opt, numbers, micro_batches=1):
    """Every rank has the same rows, so the mean gradient equals the gradient of one device to the last bit."""
    for n in numbers:
        for i in range(micro_batches):
            ids = torch.arange(24) * (n + 3 + 5 * i) % 97
            with opt.accumulate() if i + 1 < micro_batches else nullcontext():
                opt.backward(net(ids))


def trained(rank, place, case):
    """Runs traced updates without compiling them. They are bitwise equal to updates by tiles."""
    weight_format, settings = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowmem.tiles.graph.fused_operations", dict)
        patch.setattr("lowmem.tiles.stages.compiled", lambda graph, sizes, args: graph)
        patch.setattr("lowmem.step.compiled._TRACED", {})
        net, opt = placed(rank, place, settings, weight_format, "checkpointed" in case)
        steps(net, opt, range(4), 2 if "accumulated" in case else 1)
    assert opt.compiled == ("compiled" in case)
    return full_weights(net), states(opt)


@functools.cache
def alone(case):
    return trained(0, None, case)


# Each case runs under one placement, and each placement has a case.
EQUAL = [
    *in_turn(PLACES, [case for case, (weight_format, _) in CASES.items() if weight_format is None]),
    *in_turn(["fsdp2", "replicated"], [case for case, (weight_format, _) in CASES.items() if weight_format]),
]
EQUAL = [(place, case) for place, case in EQUAL if FULL or "compiled" not in case]


@pytest.mark.parametrize(("place", "case"), EQUAL)
def test_weights_and_states_have_the_bits_of_one_device(two, place, case):
    for results in two.run(trained, place, case):
        for one, other in zip(results, alone(case), strict=True):
            assert_same(one, other)


def edited(rank, place, rounding):
    net, opt = placed(rank, place, {"rule": "adamw", "lr": 1e-2, "rounding": rounding})
    for n in range(3):
        steps(net, opt, [n])
        if place and "zero3" in place:
            import deepspeed

            with deepspeed.zero.GatheredParameters(net.two.weight, modifier_rank=0):
                if rank == 0:
                    net.two.weight.detach().mul_(-0.7)
        else:
            weight = net.two.weight
            with torch.no_grad():  # also as a shard
                (weight if n else getattr(weight, "_local_tensor", weight)).mul_(-0.7)
    return full_weights(net), states(opt)


@pytest.mark.parametrize(
    ("place", "rounding"),
    in_turn(["replicated", "fsdp2", "zero3, nothing kept"], ["compensated", "compensated8", "master"]),
)
def test_an_edited_weight_continues_as_on_one_device(two, place, rounding):
    expected = edited(0, None, rounding)
    for results in two.run(edited, place, rounding):
        for one, other in zip(results, expected, strict=True):
            assert_same(one, other)


# -- saved in one place, resumed in another ----------------------------------------------------------------------------


def resumed(rank, place, case, folder, numbers):
    """Resumes from `folder` unless it is empty, then saves there: a file of lowmem and a file of weights."""
    weight_format, settings = CASES[case]
    net, opt = placed(rank, place, settings, weight_format)
    file = folder / "optimizer.safetensors"
    if file.exists():
        for name, value in torch.load(folder / "weights.pt").items():
            placements.fill(dict(net.named_parameters())[name], value)
        load_optimizer(opt, file)
        assert_same(states(opt), load_file(file))
    steps(net, opt, numbers)
    if place is not None:
        dist.barrier()
    save_optimizer(opt, file, write=rank == 0)
    results = full_weights(net), states(opt)
    if rank == 0:
        torch.save(results[0], folder / "weights.pt")
    return results


@pytest.mark.parametrize(
    ("place", "case"),
    [
        ("replicated", "adamw"),
        ("fsdp2", "several rules"),
        ("fsdp2", "int10"),
        ("zero3, on the host", "adamw"),
    ],
)
def test_from_one_process_to_two_and_back(two, place, case, tmp_path):
    """Quantized values are copied without requantizing, so the bits match an uninterrupted run."""
    resumed(0, None, case, tmp_path, range(1))
    two.run(resumed, place, case, tmp_path, range(1, 3))
    end = resumed(0, None, case, tmp_path, range(3, 4))
    for one, other in zip(end, alone(case), strict=True):
        assert_same(one, other)


# -- quantized weights under FSDP2 and replicated ----------------------------------------------------------------------


def gathered(rank):
    """Returns the bytes of collectives, and the weights that layers compute with."""
    seen, sent, (net, _) = [], 0, placed(rank, "fsdp2", ADAMW, "int8")
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counted(output, *args, **kwargs):
        nonlocal sent
        sent += output.nbytes
        return gather(output, *args, **kwargs)

    net.two.register_forward_pre_hook(lambda layer, *_: seen.append((type(layer.weight), tuple(layer.weight.shape))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counted)
        net(torch.arange(24))
    net.reshard()
    local = net.one.weight.to_local()
    return seen, sent, tuple(local.shape), type(local)


def test_quantized_values_are_gathered_and_not_matrices(two):
    for rank, (seen, sent, shape, kind) in enumerate(two.run(gathered)):
        assert seen == [(QuantizedWeight, (64, 64))]
        rows = {"embed": 98, "one": 68, "two": 64}  # with padding
        codes = sum(count * (64 + 2) for count in rows.values()) + 2 * (4096 + 2 * 64) + 4 * 64 * (64 + 2)
        assert sent == codes + 2 * (68 + 2) + 2 * (8 * 64 + 8)  # biases, and `small`
        assert kind is QuantizedWeight and shape == ((34, 33)[rank], 64)


def another_weight(rank, part):
    """Changes one number on the last rank."""
    net = make("int12")
    net.two.weight.parts[part][0, 0] += rank
    with pytest.raises(UnsupportedError, match="the values of the parameters differ between rank 0 and rank 1"):
        lowmem.FusedOptimizer(net.named_parameters(), model=net, **ADAMW)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, placement="replicated", **ADAMW)
    steps(net, opt, range(1))
    return states(opt)


@pytest.mark.parametrize("part", [0, 2])
def test_ranks_whose_quantized_weights_differ(two, part):
    """They raise, and placement `replicated` broadcasts the weights of rank 0."""
    assert_same(*two.run(another_weight, part))


# -- unsupported shards ------------------------------------------------------------------------------------------------


class Uneven(torch.nn.Module):
    """A vector of 4,128 elements, 129 groups of 32, which two ranks cannot split. 96 elements are not quantized."""

    def __init__(self, count):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(count))

    def forward(self, x):
        return (self.gain * x).square().mean()


def uneven(rank, kind):
    small, large = (SHARDS[kind](rank, functools.partial(Uneven, count)) for count in (96, 4128))
    opt = lowmem.FusedOptimizer(small.named_parameters(), model=small, **ROUNDED)
    opt.backward(small(torch.ones(96)))
    assert states(opt)["gain/exp_avg"].dtype == torch.float32
    message = r"^parameter 'gain' of shape \[4128\] cannot be stored in groups of 32 .*another rounding or state_s"
    with pytest.raises(UnsupportedError, match=message):
        lowmem.FusedOptimizer(large.named_parameters(), model=large, **ROUNDED)


@pytest.mark.parametrize("kind", SHARDS)
def test_shards_that_groups_do_not_divide(two, kind):
    """A large parameter raises an error, while a small one has float32 states."""
    two.run(uneven, kind)
    net = Uneven(4128)
    lowmem.FusedOptimizer(net.named_parameters(), model=net, **ROUNDED).remove()  # one device can train it


OTHER = r"quantized to int10.*sharded by fully_shard \(FSDP2\), but not with DeepSpeed or DistributedDataParallel"
SHARDED = r"^embed\.weight is already sharded.*before fully_shard.*DeepSpeed ZeRO-3 cannot shard quantized weights"
UNSUPPORTED = {
    "quantized under ZeRO-3": (lambda rank: quantize_(SHARDS["zero3"](rank, make), "int8"), SHARDED),
    "quantized under FSDP2": (lambda rank: quantize_(SHARDS["fsdp2"](rank, make), "int8"), SHARDED),
    "dequantized": (lambda rank: lowmem.dequantize_(by_layer(rank, lambda: make("int10"))), "the model is sharded"),
    "ZeRO-3": (lambda rank: engine(rank, make("int10"), 3), OTHER),
    "DistributedDataParallel": (lambda rank: torch.nn.parallel.DistributedDataParallel(make("int10")), OTHER),
}


def assert_raises(rank, name):
    action, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedError, match=message):
        action(rank)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_quantizing_unsupported_shards_raises(two, name):
    two.run(assert_raises, name)
