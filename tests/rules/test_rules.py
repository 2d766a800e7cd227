"""Tests the guarantees of every rule, invalid hyperparameters, and the table of rules."""

import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.nets import assert_same, states
from support.products import pairwise

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.rules.rule import TABLE
from lowmem.run.memory import state_bytes
from lowmem.tiles.layout import View
from lowmem.tiles.tile import Sums

# Options that enable all states and code paths of each rule.
FULL = {
    "lomo": {"weight_decay": 0.1},
    "adalomo": {"weight_decay": 0.1},
    "adafactor": {"beta1": 0.9, "min_dim_size_to_factor": 2, "weight_decay_rate": 0.1},
    "adafactor_t2t": {"beta1": 0.9},
    "scaled_adam": {"size_update_period": 2},
    "lans": {"wd": 0.1},
    "adamw": {"weight_decay": 0.1},
    "lion": {"weight_decay": 0.1},
}
VARIANTS = {
    **{rule: (rule, options) for rule, options in FULL.items()},
    "op_by_op": ("adafactor", {"variant": "op_by_op", "beta1": 0.9, "dtype_momentum": "bfloat16"}),
    "multi_precision": ("lans", {"variant": "step", "wd": 0.1, "multi_precision": True}),
    "scaled_adam bfloat16": ("scaled_adam", {"size_update_period": 2, "state_storage": "bfloat16"}),
    "adamw float16": ("adamw", {"state_storage": "float16"}),
    "adamw 8bit": ("adamw", {"state_storage": "8bit"}),
    "lion 8bit_64": ("lion", {"state_storage": "8bit_64"}),
}


def test_every_rule_is_here():
    assert FULL.keys() == TABLE.keys()


def make_optimizer(rule, start, **options):
    """Returns parameters named w0, w1, ... with these values, and their optimizer."""
    params = [torch.nn.Parameter(value.clone()) for value in start]
    named = [(f"w{i}", param) for i, param in enumerate(params)]
    return params, lowmem.FusedOptimizer(named, rule=rule, **{"lr": 0.1, **options})


def everything(params, opt):
    """Returns weights and states by name."""
    return {f"w{i}": param.detach().clone() for i, param in enumerate(params)} | states(opt)


# -- what every rule does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "shape", "rounding", "batching", "bad"),
    pairwise(
        [*VARIANTS, "quantized"],
        [(3,), (4, 5), (2, 3, 64)],
        ["float32", "nearest", "stochastic", "compensated", "compensated8", "master"],
        [True, False],
        [math.nan, math.inf, -math.inf],
    ),
)
def test_a_non_finite_gradient_leaves_its_parameter_unchanged(give_gradients, variant, shape, rounding, batching, bad):
    """Its weight, states and step count stay as they are, while stacked neighbors are updated. Later steps are the same
    as if it had had no gradient."""
    rule, options = VARIANTS.get(variant, ("adafactor_t2t", {"simulated_quantize_bits": 8}))
    if rounding == "float32" or variant in ("quantized", "multi_precision"):
        dtype, rounded = torch.float32, {}
    else:
        dtype, rounded = torch.bfloat16, {"rounding": rounding}
    start = [torch.randn(shape).to(dtype) for _ in range(3)]
    (params, opt), (others, without) = (
        make_optimizer(rule, start, **options, **rounded, batching=batching) for _ in range(2)
    )
    for step in range(3):
        grads = [torch.randn(shape).to(dtype) for _ in start]
        if step == 1:
            before = everything(params, opt)
            grads[1].view(-1)[-1] = bad
        give_gradients(opt, *zip(params, grads, strict=True))
        if step == 1:
            assert opt.last_step.nonfinite == ["w1"]
            now = everything(params, opt)
            assert_same(*({k: v for k, v in state.items() if k.startswith("w1")} for state in (before, now)))
            assert not torch.equal(now["w0"], before["w0"])
            assert not torch.equal(now["w2"], before["w2"])
        if rule != "scaled_adam":  # it also updates parameters without a gradient
            pairs = list(zip(others, grads, strict=True))
            give_gradients(without, *(pairs[::2] if step == 1 else pairs))
    if rule != "scaled_adam":
        assert_same(everything(params, opt), everything(others, without))


@pytest.mark.parametrize("rule", [rule for rule, cls in TABLE.items() if cls.decay in cls.defaults])
def test_without_decay_nothing_decays(give_gradients, rule):
    """Trainers use these options for norms and biases. With a gradient of zeros, weights do not change."""
    decayed, undecayed = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    cls = TABLE[rule]
    options = {cls.decay: 0.1, **({"weight_decay_rate_lr_exponent": 0.5} if rule == "adafactor" else {})}
    groups = [{"params": [decayed]}, {"params": [undecayed], **cls().without_decay()}]
    opt = lowmem.FusedOptimizer(groups, rule=rule, lr=0.1, **options)
    give_gradients(opt, (decayed, torch.zeros(4, 4)), (undecayed, torch.zeros(4, 4)))
    assert (decayed < 1).all()
    assert (undecayed == 1).all()


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(
    ("rule", "option"), [("adafactor", "global_norm_clip_threshold"), ("scaled_adam", "clipping_scale")]
)
def test_clipping_by_norm_with_policy_immediate_raises(rule, option, in_group):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))], **({option: 0.5} if in_group else {})}]
    options = {"rule": rule} if in_group else {"rule": rule, option: 0.5}
    with pytest.raises(UnsupportedError, match=rf"{option}=0\.5.*'two_pass', 'deferred' or 'auto', or omit the option"):
        lowmem.FusedOptimizer(groups, policy="immediate", **options)
    assert lowmem.FusedOptimizer(groups, **options).policy != "immediate"


# Options by name, and the equivalent options of four parameters with an optimizer each.
SCALED = [{"multiply_by_parameter_scale": i % 2 == 1} for i in range(4)]
BY_NAME = [
    ("adafactor", {"multiply_by_parameter_scale": [("[02]$", False), (".*", True)]}, SCALED),
    ("adafactor", {"multiply_by_parameter_scale": {"w1|w3": True, "w": False}}, SCALED),
    (
        "lans",
        {"wd": 0.2, "lr_mult": {"w1": 0.5, "w3": 0.0}, "wd_mult": {"w1": 2.0, "w2": 0.0}},
        [{"wd": 0.2}, {"lr": 0.05, "wd": 0.4}, {"wd": 0.0}, {"lr": 0.0}],
    ),
]


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize(("rule", "options", "alone"), BY_NAME)
def test_options_by_name(give_gradients, rule, options, alone, batching):
    """All parameters have one shape, so they would be stacked if their options were equal."""
    start = [torch.randn(4, 4) * 10.0 for _ in range(4)]
    params, opt = make_optimizer(rule, start, **options, batching=batching)
    others = [make_optimizer(rule, [value], **own) for value, own in zip(start, alone, strict=True)]
    for _ in range(3):
        grads = [torch.randn(4, 4) for _ in start]
        give_gradients(opt, *zip(params, grads, strict=True))
        for ((param,), other), grad in zip(others, grads, strict=True):
            give_gradients(other, (param, grad))
    assert all(torch.equal(param, other) for param, ((other,), _) in zip(params, others, strict=True))


MOMENTUM = [*product(["adafactor", "adafactor_t2t"], ["float32", "bfloat16", "float16"]), ("adafactor_t2t", None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "requested"), MOMENTUM)
def test_dtype_of_the_momentum(give_gradients, rule, requested, dtype):
    """The momentum is rounded to nearest. The default of adafactor_t2t is the weight's dtype."""
    options = {"lr": 0.3, "beta1": 0.9, "dtype_momentum": requested, "state_storage": "float32"}
    (param,), opt = make_optimizer(rule, [torch.ones(4, dtype=dtype)], **options)
    give_gradients(opt, (param, torch.ones(4, dtype=dtype)))
    momentum = opt.state[param]["m"]
    assert momentum.dtype == (dtype if requested is None else getattr(torch, requested))
    torch.testing.assert_close(momentum, torch.full((4,), 0.03).to(momentum.dtype), rtol=1e-6, atol=0)
    assert opt.state[param]["v"].dtype == torch.float32


# -- hyperparameters ---------------------------------------------------------------------------------------------------

POSITIVE, RATE, NOT_NEGATIVE = "a number > 0", "a number >= 0 and < 1", "a number >= 0"
COUNT, PERIOD, FLAG = "a whole number >= 0", "a whole number >= 1", "True or False"
OR_NONE = ", or None"

# Allowed values as error messages state them. Invalid values are derived from these, or listed next to them.
ALLOWED = {
    "lomo": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
    "adalomo": {
        "lr": NOT_NEGATIVE, "decay_rate": "a number < 0", "clip_threshold": POSITIVE, "weight_decay": NOT_NEGATIVE,
        "eps": ("a number >", [(0.0, 1e-3), (1e-30, -1e-3)]),
    },
    "adafactor": {
        "lr": NOT_NEGATIVE, "factored": FLAG, "beta1": RATE + OR_NONE, "decay_rate": POSITIVE, "step_offset": COUNT,
        "clipping_threshold": POSITIVE + OR_NONE, "weight_decay_rate": NOT_NEGATIVE + OR_NONE, "skip_nan_updates": FLAG,
        "min_dim_size_to_factor": COUNT, "epsilon1": NOT_NEGATIVE, "epsilon2": NOT_NEGATIVE,
        "weight_decay_rate_lr_exponent": NOT_NEGATIVE + OR_NONE, "max_parameter_scale": POSITIVE + OR_NONE,
        "global_norm_clip_threshold": NOT_NEGATIVE + OR_NONE,
        "multiply_by_parameter_scale": ("a list of (regular expression, value)", [None, 1.0, "yes"]),
        "dtype_momentum": ("or None for state_storage", ["int8", torch.float64, ["float32"]]),
        "variant": ("jit, op_by_op", ["eager", None]),
    },
    "adafactor_t2t": {
        "lr": NOT_NEGATIVE + OR_NONE, "multiply_by_parameter_scale": FLAG, "factored": FLAG, "factor_stacks": FLAG,
        "memory_exponent": "a number > 0 and <= 1", "beta2": "a number > 0 and < 1", "decay_rate": RATE + OR_NONE,
        "beta1": RATE, "clipping_threshold": POSITIVE + OR_NONE,
        "simulated_quantize_bits": "a whole number >= 2 and <= 22" + OR_NONE,
        "decay_type": ("Choose from pow, adam", ["Adam", None]),
        "dtype_momentum": ("or None for the weight's dtype", ["float8", 16]),
    },
    "scaled_adam": {
        "lr": NOT_NEGATIVE, "clipping_scale": POSITIVE + OR_NONE, "scalar_lr_scale": NOT_NEGATIVE, "eps": NOT_NEGATIVE,
        "param_min_rms": NOT_NEGATIVE, "param_max_rms": POSITIVE, "scalar_max": POSITIVE, "size_update_period": PERIOD,
        "clipping_update_period": PERIOD, "clip_update": FLAG, "show_dominant_parameters": FLAG,
        "betas": ("two numbers", [0.9, (0.9,), None]),
    },
    "lans": {
        "lr": NOT_NEGATIVE, "beta1": RATE, "beta2": RATE, "epsilon": NOT_NEGATIVE, "wd": NOT_NEGATIVE,
        "lower_bound": NOT_NEGATIVE + OR_NONE, "upper_bound": NOT_NEGATIVE + OR_NONE, "rescale_grad": "a number",
        "clip_gradient": NOT_NEGATIVE + OR_NONE, "begin_num_update": COUNT, "multi_precision": FLAG,
        "aggregate_num": "a whole number >= 1 and <= 45" + OR_NONE,
        "lr_mult": ("parameter name → a number", [2.0, [("w", 2.0)]]),
        "wd_mult": (NOT_NEGATIVE, [{"param0": -1.0}, {"param0": None}]),
        "variant": ("fused, step", ["jit"]),
    },
    "adamw": {
        "lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE,
        "betas": (RATE, [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, None)]),
    },
    "lion": {"lr": NOT_NEGATIVE, "betas": (RATE, [(1.0, 0.9), (0.9, 1.0)]), "weight_decay": NOT_NEGATIVE},
}  # fmt: skip
# Their valid values depend on names and shapes: tests/rules/test_factor_rules.py.
ELSEWHERE = {"adafactor": {"factor_map"}}


def out_of_range(allowed):
    """Returns values beyond each bound and values of other types."""
    if allowed == FLAG:
        return [None, 0, 1, "no"]
    values = [math.nan, math.inf, True, "1"] + ([0.5] if "whole" in allowed else [])
    for sign, bound in re.findall(r"([<>]=?) (\d+)", allowed):
        values.append(int(bound) + (0 if "=" not in sign else 1 if sign == "<=" else -1))
    return values if "None" in allowed else [*values, None]


def cases():
    for rule, options in ALLOWED.items():
        for option, valid in {**options, "state_storage": ("bfloat16", ["half", "fp8", "int8", None])}.items():
            allowed, values = valid if isinstance(valid, tuple) else (valid, out_of_range(valid))
            for value in values:
                if (option, value) != ("lr", None):  # lr=None selects the default
                    yield pytest.param(rule, option, value, allowed, id=f"{rule}-{option}-{value}")


@pytest.mark.parametrize(("rule", "option", "value", "allowed"), cases())
def test_hyperparameter_out_of_range(rule, option, value, allowed):
    """The value is an argument of the optimizer or of a parameter group."""
    param = torch.nn.Parameter(torch.zeros(3))
    for groups, options in (([param], {option: value}), ([{"params": [param], option: value}], {})):
        with pytest.raises(ConfigError, match=option) as error:
            lowmem.FusedOptimizer(groups, rule=rule, **options)
        assert allowed in str(error.value)


def test_every_hyperparameter_has_a_range():
    for rule, options in ALLOWED.items():
        assert options.keys() | ELSEWHERE.get(rule, set()) == TABLE[rule].defaults.keys()
    assert ALLOWED.keys() == TABLE.keys()


# -- the table ---------------------------------------------------------------------------------------------------------


def test_table():
    rows = {row.name: row for row in lowmem.rules.table()}
    assert list(rows) == sorted(TABLE)
    assert all(row.exactness != lowmem.rules.UpdateRule.exactness for row in rows.values())


def test_table_counts_every_kind_of_state():
    """For bfloat16: a full state in the weight's dtype, a full one in the default storage of 16 bits, and a row."""

    @lowmem.rules.register("keeper")
    class Keeper(lowmem.rules.Lomo):
        def spec(self, name, shape, hyper):
            spec = lowmem.rules.StateSpec
            states = {"stored": spec("full", "weight"), "float": spec("full"), "row": spec("row", extra=(2,))}
            return lowmem.rules.ParamSpec(View.matrix(len(shape)), states)

    assert state_bytes("keeper", size=256) == 2 + 2 + 2 * 4 / 256


def test_a_rule_that_takes_arguments(give_gradients):
    """Only an instance can be used, and the table lists the other rules."""

    @lowmem.rules.register("argued")
    class Argued(lowmem.rules.Lomo):
        def __init__(self, argument):
            self.argument = argument

    assert {row.name for row in lowmem.rules.table()} == TABLE.keys() - {"argued"}
    param = torch.nn.Parameter(torch.ones(2))
    for rule in ("argued", Argued):
        with pytest.raises(ConfigError, match=r"Argued needs arguments: .*'argument'.*Pass an instance"):
            lowmem.FusedOptimizer([param], rule=rule)
    give_gradients(lowmem.FusedOptimizer([param], rule=Argued(3), lr=0.5), (param, torch.ones(2)))
    assert (param == 0.5).all()


@pytest.mark.parametrize("rule", FULL)
def test_table_has_the_bytes_of_states(rule, give_gradients):
    """The bytes of an n x n parameter's states are quadratic in n, so three sizes determine them."""
    sizes = [128, 160, 192]
    params = {str(n): torch.nn.Parameter(torch.randn(n, n).bfloat16()) for n in sizes}
    opt = lowmem.FusedOptimizer(params.items(), rule=rule)
    give_gradients(opt, *((param, torch.randn_like(param)) for param in params.values()))
    states = opt.named_state_dict()["state"]
    nbytes = [sum(state.nbytes for state in states.get(name, {}).values()) for name in params]
    (row,) = (row for row in lowmem.rules.table() if row.name == rule)
    assert state_bytes(rule) == pytest.approx(np.polyval(np.polyfit(sizes, nbytes, 2), 1024) / 1024**2, abs=1e-9)
    assert row.defaults == TABLE[rule].defaults


def largest_rows(t):
    return Sums(row={"size": t.grad.abs()})


def signed(t):
    momentum = t.full.momentum * t.scalar.beta + t.grad * (1.0 - t.scalar.beta)
    return {"param": t.param - t.scalar.lr * t.row.size * momentum.sign(), "momentum": momentum}


def test_rule_from_outside(give_gradients):
    """A custom rule that reduces and has a state can be passed by name, class or instance."""

    @lowmem.rules.register("row_signs")
    class RowSigns(lowmem.rules.UpdateRule):
        source, keeps, defaults = "here", "momentum", {"lr": 0.1, "beta": 0.9}

        def check(self, hyper):
            pass

        def spec(self, name, shape, hyper):
            return lowmem.rules.ParamSpec(View.matrix(len(shape)), {"momentum": lowmem.rules.StateSpec("full")})

        def scalars(self, hyper, step):
            return {k: hyper[k] for k in ("lr", "beta")}

        def update(self, sweep, spec, state):
            size = sweep.reduce(largest_rows).row["size"] / sweep.shape[2]
            sweep.apply(signed, full=dict(state), row={"size": size})

    assert "row_signs" in {row.name for row in lowmem.rules.table()}
    grad = torch.tensor([[1.0, -3.0], [0.5, 0.5]])
    for rule in ("row_signs", RowSigns, RowSigns()):
        param = torch.nn.Parameter(torch.zeros(2, 2))
        opt = lowmem.FusedOptimizer([("w", param)], rule=rule)
        give_gradients(opt, (param, grad))
        torch.testing.assert_close(param.detach(), torch.tensor([[-0.2, 0.2], [-0.05, -0.05]]))
        torch.testing.assert_close(opt.named_state_dict()["state"]["w"]["momentum"], 0.1 * grad)
        opt.remove()
    with pytest.raises(ConfigError, match="'row_signs' is already registered"):
        lowmem.rules.register("row_signs")(RowSigns)


def test_the_example_in_contributing(give_gradients, tmp_path, monkeypatch):
    """The rule is found by its import path, and by its name once it is imported."""
    text = Path("CONTRIBUTING.md").read_text().partition("`lowmem/rules/signsgd.py`:\n\n```python\n")[2]
    (tmp_path / "example_of_a_rule.py").write_text(text.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    for rule in ("example_of_a_rule.SignSGD", "signsgd"):
        param = torch.nn.Parameter(torch.ones(2))
        give_gradients(lowmem.FusedOptimizer([param], rule=rule, lr=0.5), (param, torch.tensor([3.0, -1.0])))
        assert param.tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("adalmo", "Did you mean 'adalomo'"),
        ("scaledadam", "Did you mean 'scaled_adam'"),
        ("nothing_like_it", "Choose from adafactor, adafactor_t2t, adalomo, adamw, lans, lion, lomo, scaled_adam, or"),
        (torch.nn.Linear, "neither a name"),
        (3, "neither a name"),
    ],
)
def test_unknown_rule(rule, message):
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(2))], rule=rule)
