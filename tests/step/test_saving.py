"""A state of weights in another dtype is refused when it is loaded, not a step later; what fits is loaded as it is."""

import json

import pytest
import torch
from torch import nn

import lowmem
from lowmem.errors import CheckpointError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MOMENTUM = {"momentum": 0.9}


class InFloat32(torch.optim.Optimizer):
    """Its state is float32, whatever the weights are."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param, dtype=torch.float32)
                state["mean"].mul_(0.9).add_(param.grad.float())
                param.add_(state["mean"].to(param.dtype), alpha=-group["lr"])


def make(dtype, rule, **options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(dtype)
    return net, lowmem.FusedOptimizer(net.named_parameters(), rule=rule, lr=1e-3, **options)


def step(net, opt):
    opt.backward(net(torch.ones(2, 3, dtype=net.weight.dtype)).float().square().mean())


def saved_from(dtype, rule, **options):
    net, opt = make(dtype, rule, **options)
    step(net, opt)
    return opt


REFUSED = {
    "AdamW to float32": (BF16, F32, torch.optim.AdamW, {"rounding": "nearest"}, "exp_avg"),
    "AdamW to bfloat16": (F32, BF16, torch.optim.AdamW, {"rounding": "nearest"}, "exp_avg"),
    "AdamW between 16 bits": (F16, BF16, torch.optim.AdamW, {"rounding": "nearest"}, "exp_avg"),
    "AdamW to float64": (F32, F64, torch.optim.AdamW, {}, "exp_avg"),
    "SGD, which would go on": (BF16, F32, torch.optim.SGD, {"rounding": "nearest", **MOMENTUM}, "momentum_buffer"),
    "a residual of a class": (BF16, F32, torch.optim.AdamW, {"rounding": "compensated"}, "residual"),
    "a master copy of a class": (BF16, F32, InFloat32, {"rounding": "master"}, "weight32"),
    "a residual": (BF16, F32, "adamw", {"rounding": "compensated"}, "residual"),
    "a residual between 16 bits": (F16, BF16, "lomo", {"rounding": "compensated"}, "residual"),
    "a residual in 8 bits": (BF16, F32, "adamw", {"rounding": "compensated8"}, "residual"),
    "the master copy of LANS": (BF16, F32, "lans", {"multi_precision": True}, "weight32"),
}


@pytest.mark.parametrize(("was", "now", "rule", "options", "state"), REFUSED.values(), ids=REFUSED)
@pytest.mark.troubleshooting("the saved state ... belongs")
def test_a_state_that_depends_on_the_dtype(was, now, rule, options, state, tmp_path):
    saved = saved_from(was, rule, **options)
    net, opt = make(now, rule, **options)
    before = [param.detach().clone() for param in net.parameters()]
    message = rf"state '{state}' belongs to the weight 'weight' in {was}, but .* is {now}\. .* model\.to\({was}\)"
    with pytest.raises(CheckpointError, match=message):
        opt.load_state_dict(saved.state_dict())
    save_optimizer(saved, tmp_path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(opt, tmp_path / "optimizer.safetensors")
    assert not len(opt.state) and opt.last_step is None
    assert all(map(torch.equal, net.parameters(), before))
    step(net, opt)


FITS = {
    "a class with float32 states": (BF16, F32, InFloat32, {"rounding": "nearest"}),
    "a class that stepped on a float32 copy": (BF16, F32, torch.optim.AdamW, {"rounding": "stochastic"}),
    "a class that will step on a float32 copy": (F32, BF16, torch.optim.AdamW, {"rounding": "stochastic"}),
    "a rule with float32 states": (BF16, F32, "adamw", {}),
    "a rule with float32 states, to 16 bits": (F32, BF16, "adamw", {}),
    "states that are held in 16 bits": (BF16, F32, "adamw", {"state_storage": "bfloat16"}),
    "states that would be held in 8 bits": (BF16, F32, "adamw", {"state_storage": "8bit"}),
    "a class without states": (BF16, F32, torch.optim.SGD, {"rounding": "nearest"}),
    "the same dtype": (BF16, BF16, torch.optim.AdamW, {"rounding": "nearest"}),
    "the same dtype and residual": (BF16, BF16, torch.optim.AdamW, {"rounding": "compensated"}),
    "the same dtype and residual in 8 bits": (BF16, BF16, "adamw", {"rounding": "compensated8"}),
}


@pytest.mark.parametrize(("was", "now", "rule", "options"), FITS.values(), ids=FITS)
def test_a_state_that_fits(was, now, rule, options):
    saved = saved_from(was, rule, **options).named_state_dict()
    net, opt = make(now, rule, **options)
    opt.load_named_state_dict(saved)
    for name, value in saved["state"].get("weight", {}).items():
        held = opt.named_state_dict()["state"]["weight"][name]
        assert held.dtype == value.dtype and torch.equal(held, value)
    step(net, opt)
    assert opt.last_step.step == 2


def test_states_that_do_not_say_of_what_they_are():
    """Those of torch's own AdamW, and of before the dtype of the weights was saved."""
    saved = saved_from(F32, torch.optim.AdamW).named_state_dict()
    del saved["weights"]
    net, opt = make(F32, torch.optim.AdamW)
    opt.load_named_state_dict(saved)
    step(net, opt)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).to(BF16)
    torchs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain(torch.ones(2, 3, dtype=BF16)).float().square().mean().backward()
    torchs.step()
    net, opt = make(F32, "adamw")
    opt.load_state_dict(torchs.state_dict())
    step(net, opt)
    assert opt.last_step.step == 2


@pytest.mark.parametrize("damage", ["float31", 3, ["float32"]])
def test_a_damaged_dtype(damage):
    saved = saved_from(F32, torch.optim.AdamW).named_state_dict()
    json.dumps(saved["weights"])  # as a file has it
    saved["weights"]["weight"] = damage
    _, opt = make(F32, torch.optim.AdamW)
    with pytest.raises(CheckpointError, match="the saved optimizer is damaged"):
        opt.load_named_state_dict(saved)


# -- formats -----------------------------------------------------------------------------------------------------------

EIGHT_BITS = {"rounding": "compensated8", "state_storage": "8bit"}


def in_format(rule="adamw", **options):
    param = nn.Parameter(torch.linspace(-1, 1, 64 * 64).view(64, 64).bfloat16())
    opt = lowmem.FusedOptimizer([("w", param)], rule=rule, **{**EIGHT_BITS, **options})
    opt.backward((param.float() ** 2).sum())
    return param, opt


@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("state_storage", "float32"),
        ("state_storage", "bfloat16"),
        ("state_storage", "8bit_64"),
        ("state_storage", "8bit_nearest"),
        ("rounding", "compensated"),
        ("rounding", "stochastic"),
    ],
)
def test_another_format_is_refused_with_both_names(option, other, tmp_path):
    for was, now in (({}, {option: other}), ({option: other}, {})):
        (_, saved), (param, opt) = in_format(**was), in_format(**now)
        before = param.detach().clone(), opt.named_state_dict()["state"]["w"]["exp_avg"].clone()
        names = [options.get(option, EIGHT_BITS[option]) for options in (was, now)]
        message = "the saved optimizer has {} '{}', but this one has '{}'".format(option, *names)
        with pytest.raises(CheckpointError, match=message):
            opt.load_state_dict(saved.state_dict())
        save_optimizer(saved, tmp_path / "optimizer.safetensors")
        with pytest.raises(CheckpointError, match=rf"optimizer\.safetensors: {message}"):
            load_optimizer(opt, tmp_path / "optimizer.safetensors")
        assert torch.equal(param, before[0])
        assert torch.equal(opt.named_state_dict()["state"]["w"]["exp_avg"], before[1])


def test_states_of_torchs_adamw_are_refused_where_they_are_held_in_8_bits():
    param, opt = in_format()
    plain = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    plain.step()
    with pytest.raises(
        CheckpointError, match=r"exp_avg \[64, 64\] float32.* this optimizer has .*exp_avg \[64, 64\] int8"
    ):
        opt.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("damage", ["scale", "codes", "shape"])
def test_damaged_codes(damage):
    """In another dtype or shape, or without their scales."""
    _, opt = in_format()
    saved = opt.named_state_dict()
    state = saved["state"]["w"]
    if damage == "scale":
        del state["exp_avg_sq.scale"]
    elif damage == "codes":
        state["exp_avg"] = state["exp_avg"].view(torch.uint8)
    else:
        state["exp_avg.scale"] = state["exp_avg.scale"][:, :1]
    with pytest.raises(CheckpointError, match=r"saved state of 'w' has .* but this optimizer has .*exp_avg\.scale"):
        opt.load_named_state_dict(saved)
