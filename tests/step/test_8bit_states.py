"""8-bit states and residuals on one device: the same codes whatever the policy, the store, the tile and the stack."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from support.nets import assert_same

import lowmem
from lowmem.tiles import stored

BF16 = torch.bfloat16
EIGHT_BITS = {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit", "rounding": "compensated8"}
FORMATS = {
    "8bit": EIGHT_BITS,
    "stochastic": {**EIGHT_BITS, "rounding": "stochastic"},
    "to nearest": {**EIGHT_BITS, "state_storage": "8bit_nearest"},
    "lion": {**EIGHT_BITS, "rule": "lion", "lr": 1e-3, "state_storage": "8bit_64"},
    "scaled_adam": {**EIGHT_BITS, "rule": "scaled_adam", "size_update_period": 2},
    "lans": {**EIGHT_BITS, "rule": "lans"},
}
ADAMW = [name for name, settings in FORMATS.items() if settings["rule"] == "adamw"]


class Net(torch.nn.Module):
    """A tied embedding, experts, many vectors of one shape, and a matrix whose rows are not complete groups."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(96, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.experts = torch.nn.Parameter(torch.randn(4, 64, 64) * 0.1)
        self.small = torch.nn.Parameter(torch.randn(64, 7) * 0.1)
        self.head = torch.nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.einsum("rd,edo->ro", x, self.experts) + (x @ self.small).sum(-1, keepdim=True)
        return torch.nn.functional.cross_entropy(self.head(x).float(), ids)


def make():
    torch.manual_seed(0)
    return Net().to(BF16)


def rows(n):
    return torch.arange(24) * (n + 3) % 96


def states(opt):
    saved = opt.named_state_dict()["state"]
    return {f"{owner}/{name}": value.clone() for owner, kept in saved.items() for name, value in kept.items()}


def held(net, opt):
    """Weights and states by name."""
    return {name: param.detach().clone() for name, param in net.named_parameters()} | states(opt)


def train(settings, numbers=range(4), micro_batches=1):
    net = make()
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    for n in numbers:
        for i, part in enumerate(rows(n).tensor_split(micro_batches), start=1):

            def loss(part=part):
                return net(part) / micro_batches

            with opt.accumulate() if i < micro_batches else nullcontext():
                opt.backward(loss())
    return net, opt


# -- policies ----------------------------------------------------------------------------------------------------------

POLICIES = {
    "two passes": {"policy": "two_pass"},
    "on the host": {"policy": "deferred", "store": "host"},
    "on the device": {"policy": "deferred", "store": "device"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_policy_gives_the_same_codes(name, policy):
    alone = held(*train({**FORMATS[name], "policy": "immediate"}))
    assert_same(held(*train({**FORMATS[name], **POLICIES[policy]})), alone)
    assert {torch.int8, torch.float32} <= {value.dtype for value in alone.values()}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ADAMW)
def test_clipped_by_the_norm(name, micro_batches):
    """The coefficient is below 1, and the same in every policy and store."""
    runs = {
        policy: train({**FORMATS[name], **options, "clip_norm": 0.05}, micro_batches=micro_batches)
        for policy, options in POLICIES.items()
        if micro_batches == 1 or options["policy"] == "deferred"
    }
    (first, *others) = runs.values()
    assert first[1].last_step.clip_coef < 1
    for other in others:
        assert_same(held(*other), held(*first))


@pytest.mark.parametrize("policy", ["two_pass", "deferred"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_that_overflows_leaves_codes_as_they_are(name, policy):
    """Codes, scales, residuals and weights, bit for bit; the next step changes them again."""
    net, opt = train({**FORMATS[name], "policy": policy, "loss_scale": "dynamic"}, range(2))
    before, scale = held(net, opt), opt.loss_scale
    opt.backward(net(rows(2)) * torch.inf)
    assert opt.last_step.nonfinite and opt.loss_scale == scale / 2
    assert_same(held(net, opt), before)
    opt.backward(net(rows(2)))
    now = held(net, opt)
    changed = [
        name for name, value in before.items() if value.dtype == torch.int8 and not torch.equal(now[name], value)
    ]
    assert len(changed) >= 5


# -- tiles, stacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["8bit", "stochastic", "to nearest", "lion"])
def test_tiles_and_stacks_do_not_show(name, monkeypatch):
    whole = held(*train(FORMATS[name]))
    for tile, batching in itertools.product((1024, 2048, 1 << 20), (True, False)):
        monkeypatch.setattr(stored, "CPU_TILE", tile)
        assert_same(held(*train({**FORMATS[name], "batching": batching})), whole)


@pytest.mark.parametrize("name", ["8bit", "stochastic", "to nearest", "lion"])
def test_tiles_that_are_only_written_may_be_larger(name, monkeypatch):
    """As on a GPU, where they follow free memory: noise, groups and guards are those of any tile."""
    monkeypatch.setattr(stored, "CPU_TILE", 1024)
    whole = held(*train(FORMATS[name]))
    for tile in (2048, 1 << 20):
        monkeypatch.setattr(stored, "written_tile", lambda device, tile=tile: tile)
        assert_same(held(*train(FORMATS[name])), whole)


def test_experts_are_their_slices(give_gradients):
    """Without random numbers, which are of a parameter's name."""
    start = torch.randn(4, 64, 64).to(BF16)
    whole, parts = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(part.clone()) for part in start]
    options = {**FORMATS["to nearest"], "rounding": "compensated"}
    one = lowmem.FusedOptimizer([("w", whole)], **options)
    many = lowmem.FusedOptimizer([(f"w{n}", part) for n, part in enumerate(parts)], **options)
    for _ in range(3):
        grad = torch.randn(4, 64, 64).to(BF16)
        give_gradients(one, (whole, grad))
        give_gradients(many, *zip(parts, grad, strict=True))
    assert torch.equal(whole, torch.stack([part.detach() for part in parts]))
    together, apart = states(one), states(many)
    for key in ("exp_avg", "exp_avg.scale", "exp_avg_sq", "exp_avg_sq.scale", "residual", "residual_low"):
        assert torch.equal(together[f"w/{key}"], torch.stack([apart[f"w{n}/{key}"] for n in range(4)]))


# -- groups, frozen and tied parameters --------------------------------------------------------------------------------


def test_groups_have_formats_of_their_own(give_gradients):
    """Several rules and formats in one optimizer are the optimizers of each."""
    kinds = [
        EIGHT_BITS,
        {"rule": "lion", "lr": 1e-3, "state_storage": "8bit_64", "rounding": "compensated"},
        {"rule": "adalomo", "lr": 1e-2, "rounding": "compensated8"},
        {"rule": "adamw", "lr": 1e-2, "state_storage": "float32", "rounding": "stochastic"},
        {"rule": "adamw", "lr": 1e-2, "state_storage": "8bit_nearest", "rounding": "nearest"},
    ]
    start = [torch.randn(64, 64).to(BF16) for _ in kinds]
    together, apart = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    groups = [{"params": [(f"w{n}", p)], **kind} for n, (p, kind) in enumerate(zip(together, kinds, strict=True))]
    one = lowmem.FusedOptimizer(groups)
    many = [lowmem.FusedOptimizer([(f"w{n}", p)], **kind) for n, (p, kind) in enumerate(zip(apart, kinds, strict=True))]
    for _ in range(3):
        grads = [torch.randn(64, 64).to(BF16) for _ in kinds]
        give_gradients(one, *zip(together, grads, strict=True))
        for opt, param, grad in zip(many, apart, grads, strict=True):
            give_gradients(opt, (param, grad))
    assert all(map(torch.equal, together, apart))
    assert_same(states(one), {key: value for opt in many for key, value in states(opt).items()})
    assert states(one)["w0/exp_avg_sq"].dtype == torch.uint8 and states(one)["w3/exp_avg_sq"].dtype == torch.float32
    assert states(one)["w1/exp_avg.scale"].shape == (64, 1)


@pytest.mark.parametrize("name", ADAMW)
def test_frozen_and_trained_again(name):
    """What is frozen keeps its codes and its count; what is trained later begins with zeros."""
    net, opt = train(FORMATS[name], range(2))
    net.layers[1].requires_grad_(False)
    frozen = {key: value for key, value in held(net, opt).items() if key.startswith("layers.1.")}
    opt.backward(net(rows(2)))
    assert_same({key: value for key, value in held(net, opt).items() if key.startswith("layers.1.")}, frozen)
    net.layers[1].requires_grad_(True)
    opt.backward(net(rows(3)))
    now = states(opt)
    assert (now["layers.1.weight/step"], now["layers.0.weight/step"]) == (3, 4)
    assert not torch.equal(now["layers.1.weight/exp_avg"], frozen["layers.1.weight/exp_avg"])


@pytest.mark.parametrize("name", ADAMW)
def test_tied_weights_have_one_state(name):
    """Of the sum of both gradients."""
    _, opt = train(FORMATS[name], range(1))
    kept = {key: value for key, value in states(opt).items() if key.startswith(("embed", "head"))}
    assert {key.split("/")[0] for key in kept} == {"embed.weight"}
    plain = make()
    plain(rows(0)).backward()
    mean = 0.1 * plain.embed.weight.grad.float()  # of the first step
    scale = kept["embed.weight/exp_avg.scale"].float().repeat_interleave(32, -1)
    codes = kept["embed.weight/exp_avg"].float()
    found = codes / (254 - codes.abs()) * scale
    assert ((found - mean).abs() <= scale / 60).all()  # two codes apart are 2/127 of the largest at most


@pytest.mark.parametrize("name", FORMATS)
def test_resumed_bit_for_bit(name):
    net, opt = train(FORMATS[name], range(3))
    whole = held(*train(FORMATS[name], range(5)))
    for load in ("load_state_dict", "load_named_state_dict"):
        other = make()
        other.load_state_dict(net.state_dict())
        resumed = lowmem.FusedOptimizer(other.named_parameters(), model=other, **FORMATS[name])
        saved = opt.state_dict() if load == "load_state_dict" else opt.named_state_dict()
        getattr(resumed, load)(saved)
        assert_same(held(other, resumed), held(net, opt))
        for n in range(3, 5):
            resumed.backward(other(rows(n)))
        assert_same(held(other, resumed), whole)
