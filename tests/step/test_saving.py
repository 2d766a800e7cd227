"""Saved states load exactly. A state that does not match raises when it is loaded, and nothing changes."""

import copy
import functools
import math
import operator

import numpy as np
import pytest
import torch
from support.nets import assert_same, give_gradients, plain_step, states, through_file
from support.troubleshooting import explained
from torch import nn

import lowmem
from lowmem.errors import CheckpointError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer
from lowmem.step.saving import TensorSource

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
SHAPES = {"a": (64, 64), "b": (2,)}  # the first one consists of complete quantization groups


def make_optimizer(rule="adamw", dtype=BF16, shapes=SHAPES, steps=1, **options):
    """Returns an optimizer after some steps."""
    values = {name: torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype) for name, shape in shapes.items()}
    params = [(name, nn.Parameter(value)) for name, value in values.items()]
    opt = lowmem.FusedOptimizer(params, rule, **{"lr": 1e-3, "compile": False, **options})
    for _ in range(steps):
        train(opt)
    return opt


def params_of(opt):
    return [param for group in opt.param_groups for param in group["params"]]


def train(opt):
    opt.backward(sum(param.float().square().sum() for param in params_of(opt)))


def everything(opt):
    """Returns weights and states by name."""
    return {f"param{n}": param.detach().clone() for n, param in enumerate(params_of(opt))} | states(opt)


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_loading_the_initial_state_is_exact(rounding):
    """Loading an earlier state replaces everything that later steps stored, including residuals."""
    opt, results = make_optimizer(steps=0, rounding=rounding), []
    beginning, weights = through_file(opt.state_dict()), [param.detach().clone() for param in params_of(opt)]
    for _ in range(2):
        opt.load_state_dict(beginning)
        for param, value in zip(params_of(opt), weights, strict=True):
            param.data.copy_(value)
        for _ in range(3):
            train(opt)
        results.append(everything(opt))
    assert_same(*results)


def test_an_optimizer_that_has_stepped_continues_another():
    """The seed, the loss scale and the residuals are loaded too, even if the weights were loaded first."""
    scale = lowmem.DynamicScale(init_scale=8.0, growth_interval=2)
    options = {"rounding": "compensated8", "loss_scale": scale, "policy": "deferred"}
    one, other = make_optimizer(steps=3, seed=1, **options), make_optimizer(steps=1, seed=2, **options)
    one.param_groups[0] |= {"lr": torch.tensor(0.5), "weight_decay": np.float32(0.25)}  # as a loop may set them
    with torch.no_grad():
        torch._foreach_copy_(params_of(other), params_of(one))
    other.load_state_dict(through_file(one.state_dict()))
    for opt in (one, other):
        train(opt)
        assert opt.loss_scale == 32.0
    assert_same(everything(one), everything(other))


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_torch_state_dict_shows_states_before_the_first_update(rounding):
    def new():
        params = {name: nn.Parameter(torch.ones(2).bfloat16()) for name in ("used", "frozen", "unused")}
        params["frozen"].requires_grad_(False)
        return params, lowmem.FusedOptimizer(params.items(), rule="adamw", rounding=rounding)

    params, opt = new()
    plain = ADAMW(params.items())
    for name in ("used", "unused"):
        params[name].grad = torch.zeros(2).bfloat16()
    plain.step()
    plain.zero_grad()
    theirs = plain.state_dict()
    for step in range(2):
        saved = opt.state_dict()
        assert saved.keys() == theirs.keys() and saved["state"].keys() == theirs["state"].keys() == {0, 2}
        residual = {"residual", "residual_low"}
        assert all(saved["state"][n].keys() - residual == theirs["state"][n].keys() for n in (0, 2))
        for key in ("params", "param_names"):
            assert saved["param_groups"][0][key] == theirs["param_groups"][0][key]
        assert opt.state.keys() == ({params["used"]} if step else set())
        others, other = new()
        other.load_state_dict(through_file(saved))
        assert other.state.keys() == ({others["used"]} if step else set())
        with pytest.raises(CheckpointError, match=r"no step, .* with opt\.load_named_state_dict"):
            other.load_state_dict(opt.named_state_dict())
        give_gradients(opt, (params["used"], torch.ones(2).bfloat16()))


def test_hooks_of_torch_around_saving_and_loading():
    """Hooks run in the same order and with the same arguments as in `torch.optim.Optimizer`."""
    seen = []

    def watched(opt):
        log = []
        opt.register_state_dict_pre_hook(lambda o: log.append(("pre save", o is opt)))
        opt.register_state_dict_post_hook(lambda o, saved: log.append(("post save", o is opt, "state" in saved)))
        opt.register_state_dict_post_hook(lambda o, saved: {**saved, "mine": 1})
        opt.register_load_state_dict_pre_hook(lambda o, saved: log.append(("pre load", saved.pop("mine"))))
        opt.register_load_state_dict_pre_hook(
            lambda o, saved: {**saved, "param_groups": [{**group, "lr": 0.25} for group in saved["param_groups"]]}
        )
        opt.register_load_state_dict_post_hook(lambda o: log.append(("post load", o is opt, o.param_groups[0]["lr"])))
        saved = opt.state_dict()
        assert saved["mine"] == 1
        opt.load_state_dict(saved)
        assert saved["mine"] == 1  # hooks get a shallow copy
        seen.append(log)

    watched(make_optimizer())
    watched(ADAMW([nn.Parameter(torch.ones(3))]))
    assert seen[0] == seen[1]


# -- states that fit ---------------------------------------------------------------------------------------------------

FITS = {
    "a class that stepped on a float32 copy": (BF16, F32, ADAMW, {"rounding": "stochastic"}),
    "a rule with float32 states": (BF16, F32, "adamw", {}),
    "states that are held in 16 bits": (BF16, F32, "adamw", {"state_storage": "bfloat16"}),
    "states that would be held in 8 bits": (BF16, F32, "adamw", {"state_storage": "8bit"}),
    "a class without states": (BF16, F32, SGD, {"rounding": "nearest"}),
    "the same dtype and residual": (BF16, BF16, ADAMW, {"rounding": "compensated"}),
    "the same dtype and residual in 8 bits": (BF16, BF16, "adamw", {"rounding": "compensated8"}),
}


@pytest.mark.parametrize(("was", "now", "rule", "options"), FITS.values(), ids=FITS)
def test_a_state_that_fits(was, now, rule, options):
    saved = make_optimizer(rule, was, **options).named_state_dict()
    opt = make_optimizer(rule, now, steps=0, **options)
    opt.load_named_state_dict(saved)
    for name, value in saved["state"].get("a", {}).items():
        loaded = opt.named_state_dict()["state"]["a"][name]
        assert loaded.dtype == value.dtype and torch.equal(loaded, value)
    train(opt)
    assert opt.last_step.step == 2


@pytest.mark.parametrize(("cls", "named", "seldom"), [(ADAMW, True, True), (ADAMW, False, False), (ADAM, False, True)])
def test_a_torch_state_is_loaded(cls, named, seldom):
    """Three steps with torch, a file, and three steps with lowmem equal six steps with torch bit for bit."""
    decay = {"weight_decay": 0.1 if cls is ADAMW else 0.0}

    def groups(net):
        layers = [list(layer.named_parameters(prefix=str(n))) for n, layer in enumerate(net)]
        if not named:
            layers = [[param for _, param in layer] for layer in layers]
        return [{"params": layers[0]}, {"params": layers[1] + layers[2], "lr": 3e-3}]

    def loss(net, step):
        x = torch.linspace(-1, 1, 12).view(4, 3) + step
        return (net[:2] if seldom and step < 4 else net)(x).square().mean()  # late gradients for the last layer

    def new():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

    plain, net = new(), new()
    theirs = cls(groups(plain), lr=0.01, betas=(0.8, 0.95), foreach=False, **decay)
    for step in range(6):
        if step == 3:
            saved, weights_then = through_file([theirs.state_dict(), plain.state_dict()])
        plain_step(theirs, loss(plain, step))
    opt = lowmem.FusedOptimizer(groups(net), rule="adamw", lr=0.5, seed=7)
    net.load_state_dict(weights_then)
    opt.load_state_dict(saved)
    assert [group["lr"] for group in opt.param_groups] == [0.01, 3e-3]
    for step in range(3, 6):
        opt.backward(loss(net, step))
    assert_same(net.state_dict(), plain.state_dict())
    assert (opt.named_state_dict()["step"], opt.named_state_dict()["seed"]) == (6, 7)
    again = lowmem.FusedOptimizer(groups(new()), rule="adamw", lr=0.5)
    again.load_state_dict(through_file(opt.state_dict()))  # the loaded state can be saved again


# -- states that do not fit --------------------------------------------------------------------------------------------


def assert_refuses(opt, message, *loads):
    before = everything(opt)
    for load in loads:
        with pytest.raises(CheckpointError, match=message):
            load()
        assert_same(everything(opt), before)
    train(opt)


OTHERS = [
    ({"rule": "lomo"}, {"rule": "adalomo"}, "rule 'lomo', but this one has 'adalomo'"),
    ({}, {"rounding": "nearest"}, "rounding 'auto', but this one has 'nearest'"),
    ({"shapes": {"a": (64, 64), "c": (2,)}}, {}, r"differ in \['b', 'c'\]"),
    ({"shapes": {"a": (64, 64)}}, {}, "of 1 parameters, but this one has 1 of 2"),
    ({"shapes": {"b": (2,), "a": (64, 64)}}, {}, "in another order"),
    ({"shapes": {"a": (64, 64), "b": (4,)}}, {}, "state of 'b' has "),
    (
        {"shapes": {"a": (64, 64), "b": (4,)}, "rule": "lomo", "rounding": "compensated"},
        {"rule": "lomo", "rounding": "compensated"},
        "state of 'b' has ",
    ),
]
BOTH = "the saved optimizer has {} '{}', but this one has '{}'"
for option, one, others in (
    ("state_storage", "8bit", ("float32", "8bit_64")),
    ("rounding", "compensated8", ("compensated",)),
):
    advice = r"\. convert_states=True converts it" if option == "state_storage" else ""
    for pair in (pair for other in others for pair in ((one, other), (other, one))):
        OTHERS.append((*({option: value} for value in pair), BOTH.format(option, *pair) + advice))
DTYPES = {
    "AdamW to float32": (BF16, F32, ADAMW, {"rounding": "nearest"}, "exp_avg"),
    "AdamW to bfloat16": (F32, BF16, ADAMW, {"rounding": "nearest"}, "exp_avg"),
    "AdamW between 16 bits": (F16, BF16, ADAMW, {"rounding": "nearest"}, "exp_avg"),
    "SGD, which would go on": (BF16, F32, SGD, {"rounding": "nearest", "momentum": 0.9}, "momentum_buffer"),
    "a residual": (BF16, F32, "adamw", {"rounding": "compensated"}, "residual"),
    "a residual in 8 bits": (BF16, F32, "adamw", {"rounding": "compensated8"}, "residual"),
    "the master copy of LANS": (BF16, F32, "lans", {"multi_precision": True}, "weight32"),
}
for was, now, rule, options, state in DTYPES.values():
    message = rf"state '{state}' belongs to the weight 'a' in {was}, but .* is {now}\. .* model\.to\({was}\)"
    case = {"rule": rule, "dtype": was, **options}, {"rule": rule, "dtype": now, **options}, message
    OTHERS.append(explained("the saved state ... belongs", *case))


@pytest.mark.parametrize(("saved", "loading", "message"), OTHERS, ids=str)
def test_loading_the_state_of_a_different_optimizer_raises(saved, loading, message, tmp_path):
    other, opt, file = make_optimizer(**saved), make_optimizer(**loading), tmp_path / "optimizer.safetensors"
    save_optimizer(other, file)
    assert_refuses(opt, message, lambda: opt.load_state_dict(other.state_dict()), lambda: load_optimizer(opt, file))


@pytest.mark.parametrize(
    ("cls", "options", "ours", "message"),
    [
        (ADAMW, {"amsgrad": True}, {}, "group 0 of the saved torch optimizer has amsgrad"),
        (ADAM, {"weight_decay": 0.1}, {}, "has coupled weight_decay"),
        (ADAMW, {}, {"rule": "adalomo"}, "rule 'adamw', but this one has 'adalomo'"),
        (ADAMW, {}, {"shapes": dict.fromkeys("ba", (64, 64))}, "has other parameters or a different order"),
        (ADAMW, {}, {"shapes": dict.fromkeys("abc", (64, 64))}, r"of \[2\] parameters, but .* groups of \[3\]"),
        (ADAMW, {}, {"state_storage": "8bit"}, "state_storage 'float32', .* '8bit'. convert_states=True"),
        (SGD, {}, {}, "has no step, seed and loss scale"),
    ],
)
def test_unsupported_torch_states_raise(cls, options, ours, message):
    theirs = [(name, nn.Parameter(torch.ones(64, 64))) for name in "ab"]
    plain = cls(theirs, **options)
    for _, param in theirs:
        param.grad = torch.ones(64, 64)
    plain.step()
    opt = make_optimizer(**{"shapes": dict.fromkeys("ab", (64, 64)), "dtype": F32, **ours})
    assert_refuses(opt, message, lambda: opt.load_state_dict(plain.state_dict()))


def changed(saved, path, value):
    """Returns a copy of a saved state with the value at a path replaced, or removed if `value` is `del_`."""
    saved = copy.deepcopy(saved)
    *way, last = path
    place = functools.reduce(operator.getitem, way, saved)
    if value is del_:
        del place[last]
    else:
        place[last] = value
    return saved


del_ = object()
CODES = r"saved state of 'a' has .* but this optimizer has .*exp_avg\.scale"
DAMAGED = {
    "a negative step": (["step"], -5, "step=-5"),
    "a step of text": (["step"], "3", "step='3'"),
    "no step": (["step"], del_, "'step'"),
    "no seed": (["seed"], del_, "seed"),
    "no state": (["state"], del_, "state"),
    "a group of text": (["param_groups", 0], "x", "damaged"),
    "no parameters": (["param_groups", 0, "params"], del_, "params"),
    "a learning rate of text": (["param_groups", 0, "lr"], "x", "the saved optimizer cannot be loaded: lr='x'"),
    "betas that are one": (["param_groups", 0, "betas"], [0.9], "betas"),
    "a state of text": (["state", "b"], "x", "damaged"),
    "a tensor of text": (["state", "b", "exp_avg"], "x", "state of 'b' has .*exp_avg"),
    "a tensor too few": (["state", "b", "step"], del_, "state of 'b' has "),
    "an unreadable tensor": (["state", "b", "exp_avg_sq"], TensorSource((2,), F32, lambda: int("x")), "ValueError"),
    "no scale of codes": (["state", "a", "exp_avg_sq.scale"], del_, CODES),
    "scales of another shape": (["state", "a", "exp_avg.scale"], torch.zeros(64, 1, dtype=BF16), CODES),
    "another dtype": (["state", "b", "exp_avg"], torch.zeros(2, dtype=BF16), "bfloat16, .*this optimizer has"),
    "a parameter that is not there": (["state", "c"], {}, "a state of 'c'"),
    "a group that is not there": (["state", "_group0"], {"x": torch.ones(2)}, "state of group 0"),
    "counts of text": (["nonfinite", "steps"], "x", "nonfinite=.*'steps': 'x'"),
    "a scale beyond float32": (["loss_scale", "scale"], 1e300, r"loss scale has scale=1e\+300"),
    "no patience": (["loss_scale", "patience"], del_, "loss scale has patience=None"),
}


@pytest.mark.parametrize("name", [*DAMAGED, "nothing", "None"])
def test_a_damaged_state_raises_and_changes_nothing(name):
    """Even gradients that were accumulated for the current step are unaffected."""
    options = {"state_storage": "8bit", "loss_scale": "dynamic", "policy": "deferred"}
    opt, alone = make_optimizer(**options), make_optimizer(**options)
    saved = make_optimizer(**options, lr=0.5, seed=3).named_state_dict()
    for optimizer in (opt, alone):
        with optimizer.accumulate():
            train(optimizer)
    path, value, message = DAMAGED.get(name, ([], None, "the saved optimizer is damaged"))
    instead = {"nothing": {}, "None": None}
    with pytest.raises(CheckpointError, match=message):
        opt.load_named_state_dict(instead[name] if name in instead else changed(saved, path, value))
    train(opt)
    train(alone)
    assert_same(everything(opt), everything(alone))
    assert {**opt.named_state_dict(), "state": 0} == {**alone.named_state_dict(), "state": 0}
