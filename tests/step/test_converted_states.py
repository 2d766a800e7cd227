"""States saved in one storage format can be loaded into another one if `state_storage` requests it."""

import pytest
import torch
from support.products import FULL, pairwise
from torch import nn

import lowmem
from lowmem.errors import CheckpointError, ConfigError
from lowmem.hf.checkpoint import load_optimizer, save_optimizer

STORAGES = ["float32", "bfloat16", "8bit", "8bit_64", "8bit_nearest"]


def make_optimizer(state_storage, rule="adamw", **options):
    """Returns a matrix that is stored in groups, a small vector that is not, and their optimizer."""
    torch.manual_seed(0)
    net = nn.Linear(128, 70)
    return net, lowmem.FusedOptimizer(
        net.named_parameters(), rule=rule, lr=1e-2, state_storage=state_storage, compile=False, **options
    )


def train(net, opt, steps=3):
    for seed in range(steps):
        torch.manual_seed(seed)
        opt.backward(net(torch.randn(16, 128)).square().mean())


def values(opt, state):
    """Returns the float32 values of a state of the matrix."""
    record = next(record for record in opt._records.values() if record.name == "weight")
    storage, parts = record.program.states[state], opt.named_state_dict()["state"]["weight"]
    return storage.decode(tuple(parts[".".join(filter(None, (state, part.name)))] for part in storage.parts))


def distance(state):
    """Returns half the largest distance between adjacent codes, relative to the largest value of a group: 2/254 for g
    and 2/256 for g². 16-bit formats are more accurate."""
    return {"exp_avg": 1 / 126, "exp_avg_sq": 1 / 255}[state]


@pytest.mark.parametrize(
    ("then", "now", "form"),
    [
        case
        for case in pairwise(STORAGES, STORAGES, ["state_dict", "named_state_dict", "files"])
        if FULL or "8bit" in case[:2]
    ],
)
def test_states_are_converted(then, now, form, tmp_path):
    net, opt = make_optimizer(then)
    train(net, opt)
    other_net, other = make_optimizer(now, convert_states=True)
    if form == "files":
        save_optimizer(opt, tmp_path / "optimizer.safetensors")
        load_optimizer(other, tmp_path / "optimizer.safetensors")
    else:
        getattr(other, f"load_{form}")(getattr(opt, form)())
    for state in ("exp_avg", "exp_avg_sq"):
        was, got = values(opt, state), values(other, state)
        if then == now:
            assert torch.equal(was, got)
        largest = was.unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(-2)
        assert ((got - was).abs() <= distance(state) * largest).all()
    bias = other.named_state_dict()["state"]["bias"]
    assert bias["exp_avg"].dtype == (torch.bfloat16 if now == "bfloat16" else torch.float32)
    other_net.load_state_dict(net.state_dict())
    train(other_net, other, steps=1)


def test_conversion_rounds_to_nearest_without_random_numbers():
    net, opt = make_optimizer("float32")
    train(net, opt)
    saved = opt.state_dict()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        _, other = make_optimizer("8bit", convert_states=True)
        other.load_state_dict(saved)
        results.append(other.named_state_dict()["state"]["weight"])
    _, nearest = make_optimizer("8bit_nearest", convert_states=True)
    nearest.load_state_dict(saved)
    results.append(nearest.named_state_dict()["state"]["weight"])
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
        # rounding twice may pick the other code for a value halfway between two codes
        near = (value.int() - results[2][name].int()).abs()
        assert near.max() <= 1 and near.float().mean() < 0.02


@pytest.mark.parametrize("rule", ["adalomo", "torch.optim.AdamW"])
def test_a_storage_that_no_state_uses_raises(rule):
    with pytest.raises(ConfigError, match=r"state_storage='8bit' has no effect: rule '.*' has no elementwise state"):
        make_optimizer("8bit", rule=rule)


# -- "auto", the default -----------------------------------------------------------------------------------------------

WEIGHTS = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float32}


def optimizer_of(dtypes, steps=1, **options):
    """Returns named weights with these dtypes, and their optimizer after some steps."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(24, 32).to(dtype)) for name, dtype in dtypes.items()}
    opt = lowmem.FusedOptimizer(params.items(), rule="adamw", lr=1e-2, compile=False, **options)
    opt.backward_all = lambda: opt.backward(sum(param.float().square().sum() for param in params.values()))
    for _ in range(steps):
        opt.backward_all()
    return params, opt


def stored(opt):
    """Returns the dtypes of the states by parameter, and the saved storage of the first group."""
    saved = opt.named_state_dict()
    dtypes = {name: state["exp_avg"].dtype for name, state in saved["state"].items()}
    return dtypes, saved["param_groups"][0]["state_storage"]


def test_states_have_the_bits_of_each_weight():
    params, opt = optimizer_of(WEIGHTS)
    assert stored(opt) == ({"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32}, "auto")
    others, resumed = optimizer_of(WEIGHTS, steps=0)
    resumed.load_state_dict(opt.state_dict())
    for name, param in params.items():
        others[name].data.copy_(param)
    for optimizer in (opt, resumed):
        optimizer.backward_all()
    assert stored(opt) == stored(resumed)
    assert all(torch.equal(param, others[name]) for name, param in params.items())
    _, other = optimizer_of(WEIGHTS, steps=0, state_storage="float32")
    with pytest.raises(CheckpointError, match=r"has state_storage 'auto', but this one has 'float32'.*convert_states"):
        other.load_state_dict(opt.state_dict())
    _, other = optimizer_of(WEIGHTS, steps=0, state_storage="float32", convert_states=True)
    other.load_state_dict(opt.state_dict())
    assert stored(other) == (dict.fromkeys(WEIGHTS, torch.float32), "float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_storage_is_saved_by_name(dtype):
    name = str(dtype).removeprefix("torch.")
    _, opt = optimizer_of({"a": dtype})
    assert stored(opt) == ({"a": dtype}, name)
    _, other = optimizer_of({"a": dtype}, steps=0, state_storage=name)
    other.load_state_dict(opt.state_dict())
    assert stored(other) == ({"a": dtype}, name)


@pytest.mark.parametrize(("then", "form"), [("float32", "state_dict"), ("8bit", "named_state_dict")])
def test_states_that_are_loaded_stay_as_they_are(then, form):
    """A checkpoint saved before "auto" became the default continues with the storage that it was saved in."""
    runs = []
    for options in ({"state_storage": then}, {}):
        params, opt = optimizer_of({"a": torch.bfloat16}, steps=0, **options)
        saved = getattr(optimizer_of({"a": torch.bfloat16}, state_storage=then)[1], form)()
        getattr(opt, f"load_{form}")(saved)
        for _ in range(2):
            opt.backward_all()
        runs.append((params["a"], stored(opt)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] and runs[1][1][1] == then


@pytest.mark.parametrize(("start", "end"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_states_of_a_weight_that_is_converted_stay_as_they_are(start, end):
    for steps, dtype in ((1, start), (0, end)):  # without a step, there are no states yet
        params, opt = optimizer_of({"a": start}, steps)
        params["a"].data = params["a"].data.to(end)
        opt.backward_all()
        assert stored(opt)[0] == {"a": dtype}
