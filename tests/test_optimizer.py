"""Tests the fused optimizer's groups, options and supported parameters."""

import dataclasses
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import lowmem
from lowmem.errors import ConfigError, UnsupportedError

# -- groups and schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("rule", ["lomo", "adalomo", "torch.optim.AdamW"])
def test_a_learning_rate_of_zero_changes_no_weight(rule, rounding, give_gradients):
    param = torch.nn.Parameter(torch.randn(6, 5).bfloat16())
    start, grad = param.detach().clone(), torch.randn(6, 5).bfloat16()
    opt = lowmem.FusedOptimizer([param], rule=rule, lr=0.1, weight_decay=0.1, rounding=rounding)
    scheduler = LambdaLR(opt, lambda step: float(step == 1))
    give_gradients(opt, (param, grad))
    assert torch.equal(param, start)
    scheduler.step()
    give_gradients(opt, (param, grad))
    assert not torch.equal(param, start)
    moved = param.detach().clone()
    opt.load_state_dict(opt.state_dict())
    scheduler.step()
    give_gradients(opt, (param, grad))
    assert torch.equal(param, moved)


def test_a_group_that_cannot_be_added_changes_nothing(give_gradients):
    one, two = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    two.grad = torch.ones(3)
    opt = lowmem.FusedOptimizer([("one", one)], rule="lomo", lr=0.1)
    for fault in ({"params": [("two", two)]}, {"params": [("two", two)], "lr": -1.0}, {"params": [("one", one)]}):
        with pytest.raises((lowmem.LowmemError, ValueError)):
            opt.add_param_group(fault)
        assert len(opt.param_groups) == 1
    two.sum().backward()  # no hook remains on it
    assert two.grad.eq(2.0).all()
    opt.zero_grad()
    two.grad = None
    opt.add_param_group({"params": [("two", two)]})
    give_gradients(opt, (one, torch.ones(3)), (two, torch.ones(3)))
    assert opt.last_step.names == ("one", "two")


def test_frozen_parameters_may_be_anything(give_gradients):
    """Frozen parameters, such as quantized base weights, are not checked until they are unfrozen."""
    one, base = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3).double(), requires_grad=False)
    codes = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    opt = lowmem.FusedOptimizer([("one", one), ("base", base), ("codes", codes)])
    give_gradients(opt, (one, torch.ones(3)))
    base.requires_grad_()
    with pytest.raises(lowmem.LowmemError, match=r"'base' of shape \[3\] is torch.float64"):
        give_gradients(opt, (one, torch.ones(3)))


def test_parameter_without_elements(give_gradients):
    one, none = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0, 4))
    opt = lowmem.FusedOptimizer([("one", one), ("none", none)])
    for _ in range(2):
        give_gradients(opt, (one, torch.ones(3)), (none, torch.ones(0, 4)))
    assert opt.last_step.names == ("one",)


def test_hyperparameters_stand_next_to_options():
    """Hyperparameters are accepted next to options, as in FusedOptimizer(...). A loop's default rule is AdaLomo."""
    config = lowmem.FusedConfig(rule="adamw", weight_decay=0.1, seed=3)
    assert config == lowmem.FusedConfig("adamw", hyper={"weight_decay": 0.1}, seed=3)
    assert dataclasses.replace(config, betas=(0.8, 0.9)).hyper == {"weight_decay": 0.1, "betas": (0.8, 0.9)}
    assert pickle.loads(pickle.dumps(config)) == config
    for typed, meant in (("wieght_decay", "weight_decay"), ("roundin", "rounding"), ("clip_nrom", "clip_norm")):
        with pytest.raises(ConfigError, match=f"has no hyperparameter '{typed}'. Did you mean '{meant}'"):
            lowmem.FusedConfig(rule="adamw", **{typed: 0.1})
    params = [torch.nn.Parameter(torch.zeros(2))]
    opt = lowmem.FusedOptimizer.from_config(params, lowmem.FusedConfig(clip_threshold=2.0))
    assert (opt.config.rule, opt.param_groups[0]["clip_threshold"]) == ("adalomo", 2.0)
    with pytest.raises(ConfigError, match="rule 'adalomo' has no hyperparameter 'betas'"):
        lowmem.FusedOptimizer.from_config(params, lowmem.FusedConfig(betas=(0.9, 0.99)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lrr": 0.1}, ConfigError, "'adalomo' has no hyperparameter 'lrr'. Did you mean 'lr'"),
        ({"clip_value": 0}, ConfigError, "clip_value=0"),
        ({"clip_norm": 1.0, "policy": "immediate"}, UnsupportedError, "clip_norm=1.0.*clip_value"),
        ({"policy": "two-pass"}, ConfigError, "policy 'two-pass' is unknown. Did you mean 'two_pass'"),
        ({"store": "host", "policy": "two_pass"}, ConfigError, "store .* only to policy 'deferred', not to 'two_pass'"),
        ({"clip_norm": "1"}, ConfigError, "clip_norm='1'.*a number > 0"),
        ({"max_nonfinite_steps": 0}, ConfigError, "max_nonfinite_steps=0 .* a whole number >= 1, or None"),
        ({"compile": 0}, ConfigError, "compile=0.*True, False or 'auto'"),
    ],
)
def test_an_invalid_option_raises(options, error, message):
    with pytest.raises(error, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize("named", [False, True])
def test_groups_in_the_format_of_torch(named, give_gradients):
    """A generator and a single tensor are accepted, with or without names."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    single = torch.nn.Parameter(torch.ones(2))
    if named:
        groups = [{"params": model.named_parameters(), "lr": 0.1}, {"params": [("single", single)]}]
    else:
        groups = [{"params": model.parameters(), "lr": 0.1}, {"params": single}]
    opt = lowmem.FusedOptimizer(groups, rule="lomo", lr=0.2)
    give_gradients(opt, *[(param, torch.ones_like(param)) for param in [*model.parameters(), single]])
    numbered = [f"param{i}" for i in range(5)]
    assert list(opt.last_step.names) == ([*dict(model.named_parameters()), "single"] if named else numbered)
    torch.testing.assert_close(single.detach(), torch.full((2,), 0.8))


class OnMps(torch.nn.Parameter):
    device = torch.device("mps")


def named(*params):
    return [("w", torch.nn.Parameter(param)) for param in params]


BUFFER = torch.zeros(6, 2)
UNUSABLE = {
    "none": ([], ConfigError, "no parameters"),
    "one name twice": (named(torch.zeros(2), torch.zeros(2)), ConfigError, "'w' is given twice"),
    "a layout that no rule reads": (
        named(torch.zeros(4, 3, 3, 3).to(memory_format=torch.channels_last)),
        UnsupportedError,
        r"'w' of shape \[4, 3, 3, 3\].*Make it contiguous",
    ),
    "the same memory": (
        [(name, torch.nn.Parameter(BUFFER[rows])) for name, rows in (("a", slice(4)), ("b", slice(3, 6)))],
        UnsupportedError,
        "'a' and 'b' are two parameters with the same memory",
    ),
    "float64": (named(torch.ones(3).double()), UnsupportedError, r"'w'.*float64.*torch\.optim class"),
    "without float64": ([("w", OnMps(torch.ones(3)))], UnsupportedError, "'w' is on 'mps', which does not support flo"),
}


@pytest.mark.parametrize(("params", "error", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_parameters_that_cannot_be_trained(params, error, message):
    with pytest.raises(error, match=message):
        lowmem.FusedOptimizer(params)


def test_a_torch_class_steps_in_float64():
    """The update is computed in the dtype of the parameter."""
    ours, theirs = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    opt = lowmem.FusedOptimizer([ours], rule="torch.optim.AdamW", foreach=False)
    opt.backward((ours**3).sum())
    plain = torch.optim.AdamW([theirs], foreach=False)
    (theirs**3).sum().backward()
    plain.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("requested", "compiler", "large", "compiled"),
    [
        (True, True, False, True),
        (False, True, True, False),
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        (True, False, False, ConfigError),
    ],
)
def test_compile_setting(requested, compiler, large, compiled, monkeypatch):
    """`auto` compiles large models if a compiler is available. `True` raises if none is."""
    monkeypatch.setattr(lowmem.step.compiled, "has_compiler", lambda device: compiler)
    monkeypatch.setattr(lowmem.step.compiled, "try_compiler", {"cpu": 1}.get if compiler else {}.__getitem__)
    monkeypatch.setattr(lowmem.step.compiled, "COMPILE_FROM", 10 if large else 1000)
    param = torch.nn.Parameter(torch.zeros(100))
    if compiled is ConfigError:
        with pytest.raises(ConfigError, match=r"compile=True, but compiling for 'cpu' fails: 'cpu'\. Use 'auto'"):
            lowmem.FusedOptimizer([param], compile=requested)
    else:
        assert lowmem.FusedOptimizer([param], compile=requested).compiled is compiled
