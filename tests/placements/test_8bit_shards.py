"""8-bit states and residuals where parameters are replicated or sharded: codes are those of one device, bit for bit."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.nets import assert_same
from support.shards import SHARDS
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import lowmem
from lowmem import placements
from lowmem.errors import UnsupportedError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer
from lowmem.step.compiled import has_compiler

EIGHT_BITS = {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit", "rounding": "compensated8"}
SETTINGS = {
    "adamw": EIGHT_BITS,
    "to nearest": {**EIGHT_BITS, "state_storage": "8bit_nearest"},
    "lion": {**EIGHT_BITS, "rule": "lion", "lr": 1e-3, "state_storage": "8bit_64"},
    "stochastic": {**EIGHT_BITS, "rounding": "stochastic"},
    "deferred": {**EIGHT_BITS, "policy": "deferred", "store": "host"},
    "not batched": {**EIGHT_BITS, "batching": False},
    "several rules": {
        **EIGHT_BITS,
        "groups": (
            {"match": "two", "rule": "lion", "lr": 1e-3, "state_storage": "8bit_64"},
            {"match": "experts", "rule": "adamw", "lr": 1e-2, "state_storage": "float32", "rounding": "stochastic"},
        ),
    },
}


class Net(torch.nn.Module):
    """Matrices, experts and a vector whose rows and shards are complete groups, and a small matrix without them."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(96, 64))
        self.one = torch.nn.Linear(64, 128)
        self.two = torch.nn.Linear(128, 64, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(4, 64, 64) * 0.1)
        self.small = torch.nn.Parameter(torch.randn(64, 7) * 0.1)

    def forward(self, ids):
        x = self.embed[ids]
        x = x + self.two(torch.tanh(self.one(x)))
        x = torch.einsum("rd,edo->ro", x, self.experts) + (x @ self.small).sum(-1, keepdim=True)
        return torch.nn.functional.cross_entropy((x @ self.embed.T).float(), ids)


def make():
    torch.manual_seed(0)
    return Net().bfloat16()


def make_float32():
    torch.manual_seed(0)
    return Net()


def local(rank, make, **options):
    return make()


KINDS = {"replicated": local, **SHARDS}
PLACES = {
    "replicated": ("replicated", {}),
    "fsdp2": ("fsdp2", {}),
    "zero3": ("zero3", {"built_whole": True}),
    "zero3, on the host": ("zero3", {"built_whole": True, "offload_param": {"device": "cpu"}}),
    "zero3, nothing kept": ("zero3", {"built_whole": True, "stage3_param_persistence_threshold": 0}),
}


def optimizer(net, settings):
    return lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)


def steps(net, opt, numbers):
    """Every rank has the same rows, so that the mean of gradients is what one device has, to the last bit."""
    for n in numbers:
        opt.backward(net(torch.arange(24) * (n + 3) % 96))


def weights(net):
    return {name: placements.full_tensor(param).clone() for name, param in net.named_parameters()}


def states(opt):
    saved = opt.named_state_dict()["state"]
    return {f"{owner}/{name}": value for owner, kept in saved.items() for name, value in kept.items()}


def trained(rank, place, settings, make=make):
    kind, options = PLACES[place] if place else (None, {})
    net = make() if kind is None else KINDS[kind](rank, make, **options)
    opt = optimizer(net, settings)
    steps(net, opt, range(4))
    assert kind is None or opt.placement == kind
    return weights(net), states(opt)


COMPILED = {**EIGHT_BITS, "batching": False, "compile": True}
CASES = [pytest.param(place, SETTINGS[name], id=f"{name}-{place}") for name in SETTINGS for place in PLACES]
if has_compiler("cpu"):  # which takes half a minute
    CASES.append(pytest.param("fsdp2", COMPILED, id="compiled-fsdp2"))


@pytest.mark.parametrize(("place", "settings"), CASES)
def test_codes_are_those_of_one_device(two, place, settings):
    alone = trained(0, None, settings)
    for found in two.run(trained, place, settings):
        for one, other in zip(found, alone, strict=True):
            assert_same(one, other)
    dtypes = {name: value.dtype for name, value in alone[1].items()}
    assert dtypes["one.weight/exp_avg"] == torch.int8 and dtypes["one.weight/exp_avg.scale"] == torch.bfloat16
    assert dtypes["small/exp_avg"] == torch.float32
    if "stochastic" not in settings.values():
        assert dtypes["small/residual"] == dtypes["one.weight/residual"] == torch.int8


# -- gradients that are summed in another order ------------------------------------------------------------------------

NOT_EQUAL = {
    "own rows": {},
    "clipped": {"clip_norm": 0.5, "policy": "deferred"},
    "scaled": {"loss_scale": "dynamic", "policy": "deferred"},
    "accumulated": {"policy": "deferred"},
}


def with_own_rows(rank, place, case):
    kind, options = PLACES[place] if place else (None, {})
    net = make_float32() if kind is None else KINDS[kind](rank, make_float32, **options)
    opt = optimizer(net, {**EIGHT_BITS, **NOT_EQUAL[case]})
    count, losses = (1, []) if kind is None else (dist.get_world_size(), [])
    micro_batches = 2 if case == "accumulated" else 1
    for n in range(4):
        parts = (torch.arange(24) * (n + 3) % 96).tensor_split(micro_batches)
        for i, part in enumerate(parts, start=1):
            rows = part.tensor_split(count)[rank]
            with opt.accumulate() if i < micro_batches else nullcontext():
                loss = opt.backward(lambda rows=rows: net(rows) / micro_batches)
            losses.append(float(loss))
    return losses, states(opt)


@pytest.mark.parametrize("case", NOT_EQUAL)
@pytest.mark.parametrize("place", ["replicated", "fsdp2", "zero3"])
def test_ranks_with_their_own_rows(two, place, case):
    """Gradients differ in their last bits, by which few values are rounded to the next code; later steps may double
    that."""
    losses, alone = with_own_rows(0, None, case)
    found = two.run(with_own_rows, place, case)
    means = [sum(both) / 2 for both in zip(*(own for own, _ in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-3)  # a code is at most 1/127 of a moment, and one in hundreds differs
    for _, kept in found:
        assert kept.keys() == alone.keys()
        for name, codes in alone.items():
            if codes.dtype in (torch.int8, torch.uint8):
                off = (codes.short() - kept[name].short()).abs()
                assert off.max() <= 2 and (off > 0).float().mean() < 0.01, name


# -- shards that groups do not divide ----------------------------------------------------------------------------------


class Uneven(torch.nn.Module):
    """A vector of 4,128 elements is 129 groups of 32, which two ranks cannot share; a small one may be."""

    def __init__(self, count):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(count))

    def forward(self, x):
        return (self.gain * x).square().mean()


def refused(rank, kind):
    net = KINDS[kind](rank, functools.partial(Uneven, 4128))
    with pytest.raises(UnsupportedError) as raised:
        optimizer(net, EIGHT_BITS)
    return str(raised.value)


@pytest.mark.parametrize("kind", SHARDS)
def test_a_large_parameter_whose_shards_do_not_divide_is_refused_by_name(two, kind):
    for message in two.run(refused, kind):
        assert message.startswith("parameter 'gain' of shape [4128] cannot be stored in groups of 32 elements per row")
        assert "another rounding or state_storage" in message
    optimizer(Uneven(4128), EIGHT_BITS).remove()  # on one device it can


def with_small_shards(rank, kind):
    net = KINDS[kind](rank, functools.partial(Uneven, 96))
    opt = optimizer(net, EIGHT_BITS)
    opt.backward(net(torch.ones(96)))
    return states(opt)["gain/exp_avg"].dtype


@pytest.mark.parametrize("kind", SHARDS)
def test_a_small_parameter_whose_shards_do_not_divide_has_float32_states(two, kind):
    assert two.run(with_small_shards, kind) == [torch.float32] * 2


# -- saved in one place, resumed in another ----------------------------------------------------------------------------


def resumed(rank, place, settings, folder, numbers):
    """Goes on with what is in `folder`, if anything is, and saves there: a file of lowmem and one of weights."""
    kind, options = PLACES[place] if place else (None, {})
    net = make() if kind is None else KINDS[kind](rank, make, **options)
    opt = optimizer(net, settings)
    file = folder / "optimizer.safetensors"
    if file.exists():
        for name, value in torch.load(folder / "weights.pt").items():
            placements.fill(dict(net.named_parameters())[name], value)
        load_optimizer(opt, file)
        assert_same(states(opt), load_file(file))
    steps(net, opt, numbers)
    if kind is not None:
        dist.barrier()
    save_optimizer(opt, file, write=rank == 0)
    found = weights(net), states(opt)
    if rank == 0:
        torch.save(found[0], folder / "weights.pt")
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("settings", ["adamw", "lion", "stochastic", "several rules"])
def test_from_one_process_to_two_and_back(two, place, settings, tmp_path):
    """Codes are moved as they are: the end is that of a run that was not interrupted, bit for bit."""
    settings = SETTINGS[settings]
    resumed(0, None, settings, tmp_path, range(2))
    two.run(resumed, place, settings, tmp_path, range(2, 4))
    end = resumed(0, None, settings, tmp_path, range(4, 6))
    net = make()
    opt = optimizer(net, settings)
    steps(net, opt, range(6))
    assert_same(end[0], weights(net))
    assert_same(end[1], states(opt))


def through_dcp(rank, kind, settings, folder):
    net = KINDS[kind](rank, make)
    opt = optimizer(net, settings)
    steps(net, opt, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(net, opt)}, checkpoint_id=folder)
    return states(opt)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["replicated", "fsdp2"])
@pytest.mark.parametrize("settings", ["adamw", "lion", "several rules"])
def test_distributed_checkpoints(two, kind, settings, tmp_path):
    settings = SETTINGS[settings]
    saved, _ = two.run(through_dcp, kind, settings, tmp_path / "saved")
    net = make()
    opt = optimizer(net, settings)
    template = {"optimizer": get_optimizer_state_dict(net, opt)}
    dcp.load(template, checkpoint_id=tmp_path / "saved")
    set_optimizer_state_dict(net, opt, template["optimizer"])
    assert_same(states(opt), saved)
