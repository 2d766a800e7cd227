"""8-bit states and residuals on one device: the same codes for every policy, store and size of tiles."""

import pytest
import torch
from support.attack import DYNAMIC, Settings, compare
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


def states(opt):
    saved = opt.named_state_dict()["state"]
    return {f"{owner}/{name}": value.clone() for owner, kept in saved.items() for name, value in kept.items()}


def weights_and_states(net, opt):
    """Weights and states by name."""
    return {name: param.detach().clone() for name, param in net.named_parameters()} | states(opt)


def train(settings):
    torch.manual_seed(0)
    net = Net().to(BF16)
    opt = lowmem.FusedOptimizer(net.named_parameters(), model=net, **settings)
    for n in range(4):
        opt.backward(net(torch.arange(24) * (n + 3) % 96))
    return net, opt


# -- policies ----------------------------------------------------------------------------------------------------------

POLICIES = {
    "two passes": {"policy": "two_pass"},
    "on the host": {"policy": "deferred", "store": "host"},
    "on the device": {"policy": "deferred", "store": "device"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_policy_gives_the_same_codes(name):
    alone = weights_and_states(*train({**FORMATS[name], "policy": "immediate"}))
    assert {torch.int8, torch.float32} <= {value.dtype for value in alone.values()}
    for options in POLICIES.values():
        assert_same(weights_and_states(*train({**FORMATS[name], **options})), alone)


# -- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["8bit", "stochastic", "to nearest", "lion"])
def test_written_tiles_do_not_change_a_bit(name, monkeypatch):
    """Tiles that are only written follow the free memory of a GPU."""
    expected = weights_and_states(*train(FORMATS[name]))
    monkeypatch.setattr(stored, "CPU_TILE", 1024)
    for tile in (2048, 1 << 20):
        monkeypatch.setattr(stored, "written_tile", lambda device, tile=tile: tile)
        assert_same(weights_and_states(*train(FORMATS[name])), expected)


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


# -- loops -------------------------------------------------------------------------------------------------------------

LOOPS = {
    "frozen and trained again": {"events": ((1, "freeze"), (3, "thaw"))},
    "resumed": {"events": ((2, "save"),)},
    "a group that joins": {"late": True, "events": ((1, "add group"),)},
    "clipped": {"dtype": torch.float32, "clip_norm": 0.5, "policy": "two_pass"},
    "clipped and accumulated": {"dtype": torch.float32, "clip_norm": 0.5, "accumulation": 2},
    "an overflow": {"dtype": torch.float32, "policy": "deferred", "loss_scale": DYNAMIC, "events": ((1, "overflow"),)},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", FORMATS)
def test_loops_have_the_codes_of_finished_gradients(name, loop):
    """As in plain PyTorch, whose gradients are given to the rule one by one: also of a tied weight."""
    formats = {key: FORMATS[name][key] for key in ("rule", "state_storage", "rounding")}
    compare(Settings(**{"dtype": BF16, "hidden": 192, "blocks": 2, "tied": True, "steps": 4, **formats, **LOOPS[loop]}))


def test_groups_have_separate_formats(give_gradients):
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
