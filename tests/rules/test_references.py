"""Every rule with every option matches its float64 transcription."""

import copy
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from golden.replay import ordered
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from reference.adafactor import Adafactor
from reference.adafactor_t2t import AdafactorT2T
from reference.adalomo import AdaLomo
from reference.adamw import AdamW
from reference.lans import Lans
from reference.lion import Lion
from reference.lomo import Lomo
from reference.scaled_adam import ScaledAdam
from support.devices import seeded
from support.products import FULL

import lowmem
from lowmem.errors import ConfigError, StepError
from lowmem.rules.rule import TABLE
from lowmem.tiles.stored import CPU_TILE

REFERENCES = {
    "lomo": Lomo,
    "adalomo": AdaLomo,
    "adafactor": Adafactor,
    "adafactor_t2t": AdafactorT2T,
    "scaled_adam": ScaledAdam,
    "lans": Lans,
    "adamw": AdamW,
    "lion": Lion,
}
LRS = st.sampled_from([0.0, 1e-3, 0.03, 0.1])
DECAYS = st.sampled_from([0.01, 0.5])
BETAS = st.sampled_from([(0.0, 0.5), (0.8, 0.0), (0.9, 0.99), (0.5, 0.05)])
FLAG = st.booleans()


def one_of(*values):
    return st.sampled_from(values)


OPTIONS = {
    "lomo": {"weight_decay": DECAYS},
    "adalomo": {
        "eps": one_of((1e-12, 2.0), (0.05, 0.0)),
        "clip_threshold": one_of(0.1, 3.0),
        "decay_rate": one_of(-0.5, -1.0),
        "weight_decay": DECAYS,
    },
    "adafactor": {
        "multiply_by_parameter_scale": one_of(False, [("w", True)], [("v", True), (".*", False)]),
        "beta1": one_of(0.0, 0.9),
        "decay_rate": one_of(0.5, 1.0),
        "step_offset": one_of(1, 5),
        "clipping_threshold": one_of(None, 0.1, 3.0),
        "weight_decay_rate": DECAYS,
        "epsilon1": one_of(0.0, 0.05),
        "epsilon2": one_of(0.0, 2.0),
        "weight_decay_rate_lr_exponent": one_of(0.5, 2),
        "global_norm_clip_threshold": one_of(0, 0.0),
        "max_parameter_scale": one_of(0.1, 1.0),
        "skip_nan_updates": FLAG,
        "variant": one_of("jit", "op_by_op"),
    },
    "adafactor_t2t": {
        "multiply_by_parameter_scale": FLAG,
        "decay_type": one_of("pow", "adam"),
        "memory_exponent": one_of(0.3, 1.0),
        "beta2": one_of(0.5, 0.99),
        "decay_rate": one_of(0.0, 0.9),
        "beta1": one_of(0.0, 0.9),
        "clipping_threshold": one_of(None, 0.1, 3.0),
        "factored": FLAG,
        "factor_stacks": FLAG,
        "simulated_quantize_bits": one_of(2, 8, 22),
        "dtype_momentum": st.just("float32"),
    },
    "scaled_adam": {
        "betas": BETAS,
        "scalar_lr_scale": one_of(0.0, 1.0),
        "eps": one_of(0.0, 0.1),
        "param_min_rms": one_of(0.0, 2.0),
        "param_max_rms": one_of(0.5, 1.0),
        "scalar_max": one_of(0.5, 1.0),
        "size_update_period": one_of(1, 2, 3),
        # no effect, since clipping_scale is not set here
        "clipping_update_period": one_of(2),
        "clip_update": FLAG,
    },
    "lans": {
        "beta1": one_of(0.0, 0.5),
        "beta2": one_of(0.0, 0.9),
        "epsilon": one_of(0.1),
        "wd": DECAYS,
        "lower_bound": one_of(0.0, 5.0),
        "upper_bound": one_of(0.0, 0.5),
        "clip_gradient": one_of(0.0, 0.1),
        "rescale_grad": one_of(0.25, 0.0, -3.0),
        "lr_mult": one_of({}, {"w": 0.5}),
        "wd_mult": one_of({}, {"w": 0.0}),
        "begin_num_update": one_of(0, 7),
        "multi_precision": FLAG,
        "aggregate_num": one_of(1, 45),
        "variant": one_of("step", "fused"),
    },
    "adamw": {"betas": BETAS, "eps": one_of(0.0, 0.1), "weight_decay": one_of(0.0, 0.5)},
    "lion": {"betas": BETAS, "weight_decay": DECAYS},
}
# Options without a transcription: factored dimensions are drawn below, clipping_scale is not supported here, and
# show_dominant_parameters changes only the log. States in 16 bits: test_moments.py.
ELSEWHERE = {
    "adafactor": {"factored", "min_dim_size_to_factor", "factor_map", "dtype_momentum"},
    "scaled_adam": {"clipping_scale", "show_dominant_parameters"},
}
SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@dataclass(frozen=True)
class Case:
    """options, theirs: arguments of the rule and of its transcription. warning: the expected warning."""

    rule: str
    shape: tuple
    options: dict
    theirs: dict
    lrs: list
    seed: int
    warning: str | None = None


ROLES = ["ROW", "COLUMN", "BATCH", "NONE"]


def resolved(shape, rule, by_size):
    """Returns the reference's options for a factor rule. Vectors, and matrices without BATCH, follow the heuristic,
    with a warning if the rule differs."""
    if len(rule) > 2 or "BATCH" in rule:
        return {"rule": rule}, None
    return by_size, None if Adafactor(shape, lr=0.0, **by_size).rule == rule else "the heuristic is used"


@st.composite
def factoring(draw, shape):
    """Draws options that choose adafactor's factored dimensions, the reference's options, and a warning."""
    ndim, by_size = len(shape), {"min_dim_size_to_factor": draw(st.integers(0, 4))}
    way = draw(one_of("never", "unfactored", "rule", "rule", *(["heuristic", "named"] if ndim < 4 else [])))
    if way == "never":
        return {**by_size, "factored": False}, {"factored": False}, None
    if way == "unfactored":
        return {**by_size, "factor_map": [("w", None)]}, {"rule": ("NONE",) * ndim}, None
    if way == "heuristic":
        return by_size, by_size, None
    if way == "named":
        return {**by_size, "factor_map": {"v": None, "^w$": "HEURISTIC"}}, by_size, None
    rule = tuple(draw(st.lists(st.sampled_from(ROLES), min_size=ndim, max_size=ndim)))
    return {**by_size, "factor_map": [("v", None), ("w", rule), (".*", None)]}, *resolved(shape, rule, by_size)


@st.composite
def cases(draw, rule, dtype):
    shape, warning = draw(SHAPES), None
    options = draw(st.fixed_dictionaries({}, optional={**OPTIONS[rule], "clip_value": one_of(0.3, 2.0)}))
    lrs = draw(st.lists(LRS, min_size=4, max_size=4))
    if rule == "adafactor":
        ours, theirs, warning = draw(factoring(shape))
        options.update(ours)
        theirs = {**options, **theirs}
        for name in ("factor_map", "global_norm_clip_threshold"):
            theirs.pop(name, None)
        if isinstance(options.get("multiply_by_parameter_scale"), list):
            theirs["multiply_by_parameter_scale"] = options["multiply_by_parameter_scale"][0] == ("w", True)
        if dtype != torch.float32:
            options["variant"] = "jit"  # "op_by_op" rounds intermediate results
        theirs.pop("variant", None)
    elif rule == "adafactor_t2t":
        if dtype != torch.float32:
            options.pop("simulated_quantize_bits", None)
            # the other options round intermediate results
            options |= {"multiply_by_parameter_scale": False, "dtype_momentum": "float32"}
        theirs = {key: value for key, value in options.items() if key != "dtype_momentum"}
        lrs = draw(one_of(lrs, [None] * 4))  # None: its own schedule
    elif rule == "lans":
        theirs = {key: value.get("w", 1.0) if isinstance(value, dict) else value for key, value in options.items()}
        theirs["multi_precision"] = options.get("multi_precision", False) and dtype != torch.float32
        theirs.pop("aggregate_num", None)
    else:
        theirs = {key: value for key, value in options.items() if key not in ("clip_update", "clipping_update_period")}
    return Case(rule, shape, options, theirs, lrs, draw(st.integers(0, 2**32 - 1)), warning)


def test_every_option_is_drawn():
    assert REFERENCES.keys() == OPTIONS.keys() == TABLE.keys()
    for rule, options in OPTIONS.items():
        assert options.keys() | ELSEWHERE.get(rule, set()) == TABLE[rule].defaults.keys() - {"lr"}


@dataclass(frozen=True)
class Step:
    """One update: the weight before and after it, and the weight that the reference computes."""

    before: torch.Tensor
    after: torch.Tensor
    want: torch.Tensor
    states: dict
    reference: object

    @property
    def close(self):
        """Allowed error: a few roundings of 6e-8 relative to the largest weight, or to the terms of an update that
        cancel. The reference knows the elements that float32 rounding may move across a threshold.
        """
        size = max(self.before.abs().max(), self.want.abs().max(), 5.0 * (self.reference.lr or 0.0))
        return 5e-7 * size + torch.as_tensor(getattr(self.reference, "slack", 0.0))


def trajectory(give_gradients, case, dtype):
    rng = np.random.default_rng(case.seed)

    def draw():
        return torch.tensor(rng.normal(size=case.shape), dtype=torch.float64).to(dtype)

    reference = REFERENCES[case.rule](case.shape, lr=None, **case.theirs)
    param = torch.nn.Parameter(draw())
    silent = warnings.catch_warnings()
    with silent if case.warning is None else pytest.warns(UserWarning, match=case.warning):
        if case.warning is None:
            warnings.simplefilter("error", UserWarning)
        rounding = "auto" if case.theirs.get("multi_precision") else "nearest"
        opt = lowmem.FusedOptimizer(
            [("w", param)], rule=case.rule, rounding=rounding, state_storage="float32", **case.options
        )
        if "step_offset" in case.options:  # a resumed run
            reference.steps = case.options["step_offset"]
            opt.load_named_state_dict({**opt.named_state_dict(), "step": reference.steps})
    for lr in case.lrs:
        reference.lr = opt.param_groups[0]["lr"] = lr
        before, grad = param.detach().clone(), draw()
        give_gradients(opt, (param, grad))
        want = reference.step(before.double().cpu().numpy(), grad.double().cpu().numpy())
        states = opt.named_state_dict()["state"].get("w", {})
        yield Step(before.double(), param.detach(), torch.tensor(want), states, reference)


# Running means of signed values, and states from sums that may cancel: compared relative to their largest value.
SIGNED = {"m", "exp_avg", "mean", "delta", "scale_grads", "scale_exp_avg_sq"}


def follows(give_gradients, case):
    """Sums, roots and quotients add a few roundings of 6e-8. In 6000 examples the largest error was 3.2e-7 for weights
    and 4.8e-7 for states. States that sum positive numbers are compared element by element."""
    largest = {}
    for count, step in enumerate(trajectory(give_gradients, case, torch.float32), start=1):
        assert ((step.after - step.want).abs() <= step.close).all()
        assert step.states.pop("step", count) == count
        want = step.reference.states()
        assert step.states.keys() == want.keys()
        for name, state in want.items():
            reach = getattr(step.reference, "reach", {}).get(name, 0.0)
            largest[name] = max(largest.get(name, 0.0), np.abs(state).max(), reach)
            assert tuple(step.states[name].shape) == state.shape
            atol = 1e-6 * largest[name] if name in SIGNED else 0.0
            np.testing.assert_allclose(step.states[name].cpu().numpy(), state, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("rule", REFERENCES)
@given(st.data())
@settings(max_examples=100 if FULL else 40)
def test_float32_follows_the_reference(give_gradients, rule, data):
    follows(give_gradients, data.draw(cases(rule, torch.float32)))


ROLES_OF_TILES = {"factor_map": [(".*", ("COLUMN", "BATCH", "ROW", "NONE"))]}


@pytest.mark.parametrize(
    ("rule", "shape", "options", "theirs"),
    [
        *((rule, (300, 500), {}, {}) for rule in REFERENCES),
        ("adafactor", (500, 300), {"beta1": 0.9}, {"beta1": 0.9}),
        ("adafactor", (3, 200, 300), {"clipping_threshold": 0.5}, {"clipping_threshold": 0.5}),
        ("adafactor", (30, 4, 60, 20), ROLES_OF_TILES, {"rule": ROLES_OF_TILES["factor_map"][0][1]}),
        ("adafactor_t2t", (3, 200, 300), {"factor_stacks": False}, {"factor_stacks": False}),
        ("adafactor_t2t", (300, 500), {"simulated_quantize_bits": 6}, {"simulated_quantize_bits": 6}),
        ("lans", (300, 500), {"variant": "step", "wd": 0.1}, {"variant": "step", "wd": 0.1}),
    ],
)
def test_several_tiles_follow_the_reference(give_gradients, rule, shape, options, theirs):
    assert np.prod(shape) > CPU_TILE
    follows(give_gradients, Case(rule, shape, options, theirs, [0.1, 0.03, 0.1], seed=0))


# adafactor_t2t has its own bfloat16 rounding, which the golden trajectories check bit for bit
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (rule, dtype)
        for rule in REFERENCES
        for dtype in (torch.bfloat16, torch.float16)
        if (rule, dtype) != ("adafactor_t2t", torch.bfloat16)
    ],
)
@given(st.data())
@settings(max_examples=100 if FULL else 25)
def test_16_bit_weights_are_the_rounded_reference(give_gradients, rule, dtype, data):
    """A float32 error may move a value past the midpoint of two neighbors, hence the tolerance of one ulp. If weight
    and update nearly cancel, that error is many ulps of their small difference."""
    for step in trajectory(give_gradients, data.draw(cases(rule, dtype)), dtype):
        least, most = (ordered(bound.to(dtype)) for bound in (step.want - step.close, step.want + step.close))
        assert (least - 1 <= ordered(step.after)).all()
        assert (ordered(step.after) <= most + 1).all()


@pytest.mark.parametrize("rule", REFERENCES)
@given(st.data())
@settings(max_examples=40)
def test_editing_an_option_takes_effect_or_raises(give_gradients, rule, data):
    """After an in-place edit, a step equals that of a new optimizer with these options and the same state, or it raises
    before the first update."""
    case = data.draw(cases(rule, torch.float32))
    edits = data.draw(st.fixed_dictionaries({"lr": LRS}, optional=OPTIONS[rule]))
    edits |= data.draw(factoring(case.shape))[0] if rule == "adafactor" else {}
    before = copy.deepcopy({key: value for key, value in case.options.items() if key != "step_offset"})
    edits.pop("step_offset", None)
    generator = seeded(case.seed)
    start, *grads = (torch.randn(case.shape, generator=generator) for _ in range(3))

    def make_optimizer(**options):
        param = torch.nn.Parameter(start.clone())
        return param, lowmem.FusedOptimizer([("w", param)], rule=rule, rounding="nearest", **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            (param, opt), (other, expected) = make_optimizer(**before), make_optimizer(**{**before, **edits})
        except ConfigError:
            reject()
        give_gradients(opt, (param, grads[0]))
        other.data.copy_(param)
        saved, group = copy.deepcopy(opt.named_state_dict()), opt.param_groups[0]
        for key, value in edits.items():
            if isinstance(group[key], dict | list) and type(group[key]) is type(value):  # edits the container in place
                group[key].clear()
                getattr(group[key], "update" if isinstance(value, dict) else "extend")(value)
            else:
                group[key] = value
        try:
            give_gradients(opt, (param, grads[1]))
        except (ConfigError, StepError) as error:
            assert any(key in str(error) for key in edits)
            assert torch.equal(param, other)
            return
        expected.load_named_state_dict({**saved, "param_groups": expected.named_state_dict()["param_groups"]})
        give_gradients(expected, (other, grads[1]))
    assert torch.equal(param, other)
