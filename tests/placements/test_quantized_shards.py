"""Weights held in codes where parameters are replicated or sharded: codes are those of one device, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.nets import assert_same
from support.shards import SHARDS, engine
from torch.utils.checkpoint import checkpoint

import lowmem
from lowmem import placements
from lowmem.errors import UnsupportedError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer
from lowmem.layers.quantize import quantize_
from lowmem.step.compiled import has_compiler
from lowmem.tiles.quantized import QuantizedWeight

ADAMW = {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit"}
SETTINGS = {
    "int8": ("int8", ADAMW),
    "int10": ("int10", ADAMW),
    "int12": ("int12", ADAMW),
    "float32 states": ("int10", {**ADAMW, "state_storage": "float32"}),
    "no states": ("int8", {"rule": "lomo", "lr": 0.1}),
    "clipped by value": ("int10", {**ADAMW, "clip_value": 1e-3}),
    "accumulated": ("int12", {**ADAMW, "policy": "deferred"}),
    "deferred": ("int8", {"rule": "lion", "lr": 1e-3, "policy": "deferred"}),
    "checkpointed": ("int10", ADAMW),
}

# Sums of squares are taken in another order where parameters are sharded, and few values are rounded to another code.
SUMMED = {
    "adalomo": ("int8", {"rule": "adalomo", "lr": 1e-2}),
    "clipped": ("int10", {**ADAMW, "clip_norm": 0.5, "policy": "deferred"}),
    "clipped, 12 bits": ("int12", {**ADAMW, "clip_norm": 0.5, "policy": "deferred"}),
}
COMPILED = {"compiled": ("int10", {**ADAMW, "batching": False, "compile": True})} if has_compiler("cpu") else {}


class Experts(torch.nn.Module):
    """A stack that transformers would have: the second of three experts gets no token."""

    num_experts = 3

    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x):
        ends = torch.tensor([8, 8, len(x)], dtype=torch.int32)
        grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has the second
        return grouped_mm(x, self.up_proj.transpose(-2, -1), offs=ends)


class Net(torch.nn.Module):
    """Two ranks cannot share the rows of the tied matrix and of `one` or the experts evenly, and one of them has no row
    of `few`.
    """

    def __init__(self, checkpoints=False):
        super().__init__()
        self.embed = torch.nn.Embedding(97, 64)
        self.one = torch.nn.Linear(64, 67)
        self.two = torch.nn.Linear(64, 64, bias=False)
        self.few = torch.nn.Linear(4096, 1)
        self.experts = Experts()
        self.head = torch.nn.Linear(64, 97, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def block(self, x):
        x = x + self.two(torch.tanh(self.one(x)[:, :64]))
        return x + self.few(x.repeat(1, 64)) + self.experts(x)

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return torch.nn.functional.cross_entropy(self.head(x).float(), ids)


def make(name="int10", checkpoints=False):
    torch.manual_seed(0)
    return quantize_(Net(checkpoints).bfloat16(), name)


def placed(place, *args):
    """`fully_shard` on each layer; the two that share a matrix are part of the whole."""
    net = make(*args)
    if place == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in (net.one, net.two, net.few, net.experts, net):
            fully_shard(layer)
    return net


def optimizer(net, settings, place=None):
    chosen = {"placement": "replicated"} if place == "replicated" else {}
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, **chosen, **settings)


def steps(net, opt, numbers, micro_batches=1):
    """Every rank has the same rows, so that the mean of gradients is what one device has, to the last bit."""
    for n in numbers:
        for i in range(micro_batches):
            ids = torch.arange(24) * (n + 3 + 5 * i) % 97
            with opt.accumulate() if i + 1 < micro_batches else nullcontext():
                opt.backward(net(ids))


def weights(net):
    return {name: placements.full_tensor(param).clone() for name, param in net.named_parameters()}


def states(opt):
    saved = opt.named_state_dict()["state"]
    return {f"{owner}/{name}": value.clone() for owner, kept in saved.items() for name, value in kept.items()}


def trained(rank, place, case):
    name, settings = {**SETTINGS, **SUMMED, **COMPILED}[case]
    net = placed(place, name, case == "checkpointed")
    opt = optimizer(net, settings, place)
    steps(net, opt, range(4), 2 if case == "accumulated" else 1)
    assert place in (None, opt.placement)
    return weights(net), states(opt)


CASES = [(place, case) for place in ("replicated", "fsdp2") for case in SETTINGS]
CASES += [*(("replicated", case) for case in SUMMED), *(("fsdp2", case) for case in COMPILED)]


@pytest.mark.parametrize(("place", "case"), CASES)
def test_codes_are_those_of_one_device(two, place, case):
    alone = trained(0, None, case)
    for found in two.run(trained, place, case):
        for one, other in zip(found, alone, strict=True):
            assert_same(one, other)
    assert alone[1]["embed.weight/codes"].shape == (97, 64)
    start = weights(make("int12"))
    assert all(
        (start[name] != alone[0][name]).any()
        for name in ("embed.weight", "one.weight", "two.weight", "experts.up_proj")
    )


@pytest.mark.parametrize("case", SUMMED)
def test_sums_over_shards(two, case):
    alone, _ = trained(0, None, case)
    for found, _ in two.run(trained, "fsdp2", case):
        for name, weight in alone.items():
            assert (weight != found[name]).float().mean() < 0.02, name
            torch.testing.assert_close(found[name], weight, rtol=0.02, atol=0.02, msg=name)


# -- what is gathered --------------------------------------------------------------------------------------------------


def gathered(rank):
    """Bytes in collectives, and the weights that layers see."""
    seen, sent, net = [], 0, placed("fsdp2", "int8")
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counted(output, *args, **kwargs):
        nonlocal sent
        sent += output.nbytes
        return gather(output, *args, **kwargs)

    net.two.register_forward_pre_hook(lambda layer, *_: seen.append((type(layer.weight), tuple(layer.weight.shape))))
    setattr(dist, name, counted)
    try:
        net(torch.arange(24))
    finally:
        setattr(dist, name, gather)
    net.reshard()
    local = net.one.weight.to_local()
    return seen, sent, tuple(local.shape), type(local)


def test_codes_are_gathered_and_no_matrices(two):
    for rank, (seen, sent, shape, kind) in enumerate(two.run(gathered)):
        assert seen == [(QuantizedWeight, (64, 64))]
        rows = {"embed": 98, "one": 68, "two": 64}  # with padding
        codes = sum(count * (64 + 2) for count in rows.values()) + 2 * (4096 + 2 * 64) + 4 * 64 * (64 + 2)
        assert sent == codes + 2 * (68 + 2)  # biases
        assert kind is QuantizedWeight and shape == ((34, 33)[rank], 64)


# -- saved in one place, resumed in another ----------------------------------------------------------------------------


def resumed(rank, place, folder, numbers):
    """Goes on with what is in `folder`, if anything is, and saves there: a file of lowmem and one of weights."""
    net = placed(place)
    opt = optimizer(net, ADAMW, place)
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
    found = weights(net), states(opt)
    if rank == 0:
        torch.save(found[0], folder / "weights.pt")
    return found


@pytest.mark.parametrize("place", ["replicated", "fsdp2"])
def test_from_one_process_to_two_and_back(two, place, tmp_path):
    resumed(0, None, tmp_path, range(2))
    two.run(resumed, place, tmp_path, range(2, 4))
    end = resumed(0, None, tmp_path, range(4, 6))
    net = make()
    opt = optimizer(net, ADAMW)
    steps(net, opt, range(6))
    assert_same(end[0], weights(net))
    assert_same(end[1], states(opt))


def filled(rank, place):
    """Other weights in all of a model, before its first step and between two."""
    net, other = placed(place), Net().bfloat16()
    opt = optimizer(net, ADAMW, place)
    for n in range(2):
        for param, value in zip(net.parameters(), other.parameters(), strict=True):
            placements.fill(param, value.detach() * (n + 1))
        net.load_state_dict(net.state_dict())  # FSDP2 makes tensors anew where it pads them
        steps(net, opt, [n])
    return weights(net), states(opt)


def test_weights_that_are_filled(two):
    torch.manual_seed(1)
    alone = filled(0, None)
    for found in two.run(filled_on_rank):
        for one, other in zip(found, alone, strict=True):
            assert_same(one, other)


def filled_on_rank(rank):
    torch.manual_seed(1)
    return filled(rank, "fsdp2")


# -- replicated --------------------------------------------------------------------------------------------------------


def other_codes(rank, how):
    """One code of the last rank differs by one."""
    net = make("int12")
    part = net.two.weight.parts[("codes", "low", "unit").index(how)]
    part[0, 0] += rank
    try:
        optimizer(net, ADAMW).remove()
        return None
    except UnsupportedError as error:
        message = str(error)
    opt = optimizer(net, ADAMW, "replicated")
    steps(net, opt, range(1))
    return message, states(opt)


@pytest.mark.parametrize("how", ["codes", "low", "unit"])
def test_ranks_whose_codes_differ(two, how):
    (message, first), (_, second) = two.run(other_codes, how)
    assert "the values of the parameters differ between rank 0 and rank 1" in message
    assert_same(first, second)


# -- refused -----------------------------------------------------------------------------------------------------------


def sharded_before(rank, kind):
    net = SHARDS[kind](rank, lambda: Net().bfloat16())
    with pytest.raises(UnsupportedError) as raised:
        quantize_(net, "int8")
    return str(raised.value)


@pytest.mark.parametrize("kind", SHARDS)
def test_a_sharded_model_is_not_quantized(two, kind):
    for message in two.run(sharded_before, kind):
        assert message.startswith("embed.weight is already sharded")
        assert (
            "before fully_shard" in message and "DeepSpeed ZeRO-3 cannot shard quantized weights: use FSDP2" in message
        )


def sharded_after(rank):
    with pytest.raises(UnsupportedError) as raised:
        lowmem.dequantize_(placed("fsdp2"))
    return str(raised.value)


def test_a_sharded_model_stays_in_codes(two):
    assert all("the model is sharded" in message for message in two.run(sharded_after))


def on_the_host(rank):
    net = placed("fsdp2")
    kind = type(net.one.weight.device_mesh)
    own = kind.device_type
    kind.device_type = "cuda"  # CPUOffloadPolicy leaves shards on the host of a GPU
    try:
        with pytest.raises(UnsupportedError) as raised:
            optimizer(net, ADAMW)
    finally:
        kind.device_type = own
    return str(raised.value)


def test_codes_on_the_host_are_refused(two):
    for message in two.run(on_the_host):
        assert "'embed.weight' is quantized, and FSDP2 cannot gather it from the host" in message


def under(rank, wrapper):
    net = make()
    try:
        torch.nn.parallel.DistributedDataParallel(net) if wrapper == "ddp" else engine(rank, net, 3)
    except UnsupportedError as error:
        return str(error)


@pytest.mark.parametrize("wrapper", ["zero3", "ddp"])
def test_other_engines_refuse_codes(two, wrapper):
    for message in two.run(under, wrapper):
        assert "quantized to int10" in message
        assert "sharded by fully_shard (FSDP2), but not with DeepSpeed or DistributedDataParallel" in message
