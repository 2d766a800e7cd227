"""Stacked small parameters bitwise equal individual ones, in any order. Also tests the default rounding."""

import itertools
import re

import pytest
import torch
from support.devices import seeded
from support.nets import states
from support.products import in_turn

import lowmem
from benchmarks.engine import without_computing
from lowmem.kernels import Kernels
from lowmem.rules.rule import TABLE
from lowmem.step import program, updates

SHAPES = [(), (1,), (7,), (64,), (5, 3), (48, 33), (33, 48), (1, 9), (9, 1), (1, 1), (2, 5, 4), (3, 1, 8), (2, 3, 2, 2)]
SHAPES += [(64,), (3, 32), (2, 2, 64)]  # consist of complete groups
ROLES = [("4d", ["COLUMN", "NONE", "ROW", "BATCH"]), (".*", "HEURISTIC")]
MIXED = {"adafactor": {"min_dim_size_to_factor": 3, "factor_map": ROLES}}
OPTIONS = [
    *((rule, MIXED.get(rule, {})) for rule in sorted(TABLE)),
    ("adafactor", {"factored": False, "beta1": 0.9, "dtype_momentum": "bfloat16", "skip_nan_updates": True}),
    ("adafactor_t2t", {"beta1": 0.9, "lr": 0.01}),
    ("scaled_adam", {"size_update_period": 2, "state_storage": "bfloat16"}),
    ("lans", {"variant": "step", "wd": 0.1, "multi_precision": True, "aggregate_num": 2}),
    ("adamw", {"state_storage": "bfloat16"}),
    ("adamw", {"state_storage": "8bit"}),
    ("lion", {"state_storage": "8bit_64"}),
    ("lans", {"state_storage": "8bit_nearest"}),
]


def run(rule, options, *, batching, dtype, rounding):
    """Trains three parameters of each shape. Some have no gradient in some steps, and some get NaN once. Returns
    parameters and states by name."""
    source = seeded(0)
    params = {
        f"{len(shape)}d.{i}.{copy}": torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype))
        for (i, shape), copy in itertools.product(enumerate(SHAPES), range(3))
    }
    opt = lowmem.FusedOptimizer(params.items(), rule=rule, rounding=rounding, batching=batching, **options)
    for step in range(4):
        loss = 0.0
        for n, param in enumerate(params.values()):
            grad = torch.randn(param.shape, generator=source).to(dtype)
            if step == 2 and n % 7 == 0:
                grad.view(-1)[-1] = torch.nan
            if (n + step) % 4:
                loss = loss + (param * grad).sum().float()
        opt.param_groups[0]["lr"] = 0.01 / (step + 1)
        opt.backward(loss)
    return params, states(opt)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0))]


ROUNDED = itertools.product(
    (torch.bfloat16, torch.float16), ("nearest", "stochastic", "compensated", "compensated8", "master")
)


@pytest.mark.by_tiles("updates that are compiled are in no stack")
@pytest.mark.parametrize(
    ("case", "rounded"), in_turn(OPTIONS, [(torch.float32, "auto"), (torch.bfloat16, "auto"), *ROUNDED]), ids=str
)
def test_a_stack_is_its_members(case, rounded):
    """Random bits depend only on the parameter and the element, and each residual stays with its weight."""
    (rule, options), (dtype, rounding) = case, rounded
    stacked, alone = (
        run(rule, options, batching=batching, dtype=dtype, rounding=rounding) for batching in (True, False)
    )
    assert_same_bits(stacked[0], alone[0])
    assert_same_bits(stacked[1], alone[1])
    if rounding != "auto":
        assert ("1d.2.0/residual" in alone[1]) == rounding.startswith("compensated")


COUNT = 6
EVERY = tuple(range(COUNT))
# The parameters that get a gradient in each step, in the order of the forward.
ORDERS = {
    "same": [EVERY] * 4,
    "permuted": [EVERY, EVERY[::-1], EVERY[::-1], (3, 0, 5, 1, 2, 4)],
    "some at first": [(0, 1, 2), EVERY, EVERY, (2, 3)],
    "some later": [EVERY, (1, 2, 3), (3, 4), EVERY],
    "exchanged": [(0, 1, 2), (3, 4, 5), (0, 1, 3), (2, 4, 5), EVERY],
}


@pytest.mark.parametrize("reloads", [False, True])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_stacks_do_not_depend_on_the_order_of_gradients(orders, reloads):
    """Results equal `torch.optim.AdamW` bit for bit, even if states are reloaded between steps. Saved states do not
    share the memory of their stack, or a file would contain the states of other parameters."""
    params, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 8) + n) for n in EVERY] for _ in range(2))
    opt, plain = lowmem.FusedOptimizer(params, "adamw", lr=0.01), torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    for seed, order in enumerate(orders):
        source = seeded(seed)
        grads = [torch.randn(8, generator=source) for _ in params]
        opt.backward(sum((params[n] * grads[n]).sum() for n in order))
        for n, (param, grad) in enumerate(zip(theirs, grads, strict=True)):
            param.grad = grad if n in order else None
        plain.step()
        saved = opt.state_dict()
        assert all(
            t.untyped_storage().nbytes() == t.nbytes for state in saved["state"].values() for t in state.values()
        )
        if reloads:
            opt.load_state_dict(saved)
        for param, their in zip(params, theirs, strict=True):
            assert torch.equal(param, their)
            for name, state in plain.state.get(their, {}).items():
                assert torch.equal(opt.state[param][name], state)


@pytest.fixture
def stacks(monkeypatch):
    """Records, for each update, the number of parameters and the size of the first one."""
    seen = []
    run = updates.Updates._run

    def noted(self, operands, decision):
        seen.append((len(operands.records), operands.records[0].param.numel()))
        run(self, operands, decision)

    monkeypatch.setattr(updates.Updates, "_run", noted)
    return seen


def quadratic(params):
    return sum((param.float() ** 2).sum() for param in params)


@pytest.mark.by_tiles("updates that are compiled are in no stack")
def test_small_equal_parameters_are_stacked(stacks):
    """They must have the same shape, dtype and group. Large ones are updated alone, as are all if batching is off."""
    small, large = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(6)], torch.nn.Parameter(torch.ones(256, 256))
    half = torch.nn.Parameter(torch.ones(8, 8).bfloat16())
    groups = [{"params": [*small[:4], half, large]}, {"params": small[4:], "lr": 0.1}]
    opt = lowmem.FusedOptimizer(groups, rule="lomo", lr=0.01)
    opt.backward(quadratic([*small, half, large]))
    assert sorted(stacks) == [(1, 64), (1, 65536), (2, 64), (4, 64)]
    opt.remove()
    stacks.clear()
    opt = lowmem.FusedOptimizer(small, rule="lomo", batching=False)
    opt.backward(quadratic(small))
    assert stacks == [(1, 64)] * 6


@pytest.mark.by_tiles("updates that are compiled are in no stack")
@pytest.mark.parametrize(
    ("rule", "options", "sizes"), [("lans", {"aggregate_num": 3}, [3, 3, 1]), (torch.optim.SGD, {}, [1] * 7)]
)
def test_stack_sizes_are_limited_by_the_rule(stacks, rule, options, sizes):
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(7)]
    lowmem.FusedOptimizer(params, rule=rule, lr=0.1, **options).backward(quadratic(params))
    assert [size for size, _ in stacks] == sizes


def one_weight(dtype, rule="adamw", **options):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
    return param, lowmem.FusedOptimizer([("w", param)], rule=rule, **{"lr": 1e-3, **options})


def trained(dtype, rule, **options):
    """Returns a weight after three steps, and the bytes of its states."""
    param, opt = one_weight(dtype, rule, **options)
    for _ in range(3):
        opt.backward((param * torch.linspace(-1, 1, 64)).float().square().sum())
    state = opt.named_state_dict()["state"].get("w", {})
    return param.detach(), sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rule", "options", "rounding"),
    [
        *((rule, {}, "stochastic") for rule in sorted(TABLE) if rule != "adafactor_t2t"),
        ("adafactor_t2t", {}, "its own"),
        ("lans", {"multi_precision": True}, "master"),
        ("torch.optim.AdamW", {"eps": 1e-3}, "nearest"),
    ],
)
def test_the_default_rounding_is_set_by_the_rule_or_stochastic(dtype, rule, options, rounding):
    by_rule = (rounding, dtype) == ("its own", torch.bfloat16)
    default, size = trained(dtype, rule, **options)
    explicit, explicit_size = trained(dtype, rule, **options, rounding=rounding.replace("its own", "stochastic"))
    assert torch.equal(default, explicit) != by_rule and size == explicit_size
    nearest, _ = trained(dtype, rule, **options, rounding="nearest")
    assert torch.equal(default, nearest) == (rounding == "nearest" or dtype == torch.float32)


@pytest.mark.parametrize(
    ("dtype", "rule", "options", "said"),
    [
        (torch.bfloat16, "adamw", {"rounding": "nearest"}, "about 0.2 % .*'stochastic', .* needs no more memory"),
        (torch.float16, "adamw", {"rounding": "nearest"}, "about 0.024 %"),
        (torch.bfloat16, "torch.optim.AdamW", {}, "unless torch.optim.adamw.AdamW itself .* float32 copy of one param"),
        (torch.bfloat16, "adafactor_t2t", {"rounding": "nearest"}, "lose every update"),
        (torch.bfloat16, "adamw", {}, None),
        (torch.bfloat16, "torch.optim.AdamW", {"rounding": "stochastic"}, None),
        (torch.float32, "adamw", {"rounding": "nearest"}, None),
        (torch.float32, "torch.optim.AdamW", {}, None),
    ],
)
def test_updates_lost_by_rounding_warn_once(dtype, rule, options, said, caplog):
    program._warn_of_lost_updates.cache_clear()
    for _ in range(2):
        one_weight(dtype, rule, **options)
    assert len(caplog.messages) == (said is not None)
    assert said is None or re.search(said, caplog.text)


def test_launches_for_the_norms_of_a_model_with_8b_parameters(monkeypatch):
    launched, params = [], [torch.nn.Parameter(torch.ones(4096)) for _ in range(65)]
    with without_computing(kernels=True):
        monkeypatch.setattr(Kernels, "launch", lambda self, launch, args: launched.append(launch.name))
        lowmem.FusedOptimizer(params, rule="adalomo", compile=True).backward(quadratic(params))
    assert len(launched) == 3


@pytest.mark.by_tiles("updates that are compiled are in no stack")
def test_a_full_stack_does_not_wait(stacks, monkeypatch):
    monkeypatch.setattr(updates, "STACK", 64 * 4)
    params = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(10)]
    lowmem.FusedOptimizer(params, rule="lomo").backward(quadratic(params))
    assert stacks == [(4, 64), (4, 64), (2, 64)]
