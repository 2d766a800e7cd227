"""The fused optimizer: it equals ordinary training, reports what a step was, and saves and resumes exactly."""

import copy
import dataclasses
import functools
import io
import operator
import pickle

import pytest
import torch
from support.nets import assert_same
from torch.optim.lr_scheduler import LambdaLR

import lowmem
from lowmem.errors import CheckpointError, ConfigError, StepError, UnsupportedError
from lowmem.step.saving import TensorSource


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def roundtrip(saved):
    """Through a file."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- groups and schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("rule", ["lomo", "adalomo", "torch.optim.AdamW"])
def test_learning_rate_zero_moves_nothing(rule, rounding, give_gradients):
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


def test_norms_are_in_the_order_of_the_model_where_groups_are_added(give_gradients):
    """As those of one group: the order decides the last bits of the sum."""
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(8)))
    grads = [torch.randn_like(param) for param in net.parameters()]
    opt = lowmem.FusedOptimizer(net[5].named_parameters("5"), model=net, rule="lomo", clip_norm=0.5, policy="deferred")
    for n in (7, 0, 3, 6, 2, 1, 4):
        opt.add_param_group({"params": net[n].named_parameters(str(n))})
    give_gradients(opt, *zip(net.parameters(), grads, strict=True))
    assert list(opt.last_step.names) == [name for name, _ in net.named_parameters()]


def test_group_that_cannot_be_added_leaves_nothing(give_gradients):
    one, two = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    two.grad = torch.ones(3)
    opt = lowmem.FusedOptimizer([("one", one)], rule="lomo", lr=0.1)
    for fault in ({"params": [("two", two)]}, {"params": [("two", two)], "lr": -1.0}, {"params": [("one", one)]}):
        with pytest.raises((lowmem.LowmemError, ValueError)):
            opt.add_param_group(fault)
        assert len(opt.param_groups) == 1
    opt.zero_grad()
    two.grad = None
    opt.add_param_group({"params": [("two", two)]})
    give_gradients(opt, (one, torch.ones(3)), (two, torch.ones(3)))
    assert opt.last_step.names == ("one", "two")


def test_frozen_parameters_may_be_anything(give_gradients):
    """Quantized base weights, say: what is not trained is not looked at until it is unfrozen."""
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


def test_config_builds():
    config = lowmem.FusedConfig(rule="lomo", clip_value=0.5, rounding="stochastic", seed=7, weight_decay=0.3)
    params = [torch.nn.Parameter(torch.zeros(2))]
    config = dataclasses.replace(config, lr=0.2)
    opt = lowmem.FusedOptimizer.from_config(params, config)
    assert opt.config == config
    assert (opt._clipping.value, opt.param_groups[0]["rounding"], opt._cycle.seed) == (0.5, "stochastic", 7)
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]) == (0.2, 0.3)


def test_hyperparameters_stand_next_to_options():
    """As in FusedOptimizer(...); without a rule, a loop gets AdaLomo."""
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


# -- saving and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_going_back_to_the_beginning_is_exact(rounding, tiny_llama, token_batches):
    """What a later step left, residuals included, does not outlive the loading of an earlier state."""
    model = tiny_llama(dtype=torch.bfloat16)
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=0.01, rounding=rounding)
    beginning, ends = roundtrip([model.state_dict(), opt.state_dict()]), []
    for _ in range(2):
        model.load_state_dict(beginning[0])
        opt.load_state_dict(beginning[1])
        for batch in token_batches(3):
            opt.backward(model(**batch).loss)
        ends.append(weights(model))
    assert_same(*ends)


def optimizer_of(shapes, **options):
    params = [(name, torch.nn.Parameter(torch.ones(shape).bfloat16())) for name, shape in shapes.items()]
    opt = lowmem.FusedOptimizer(params, **options)
    opt.backward(sum(param.float().sum() for _, param in params))
    return opt


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        pytest.param(
            {"rule": "lomo"},
            {"rule": "adalomo"},
            "rule 'lomo', but this one has 'adalomo'",
            marks=pytest.mark.troubleshooting("the saved optimizer has rule"),
        ),
        ({"rounding": "compensated"}, {"rounding": "nearest"}, "rounding 'compensated', but this one has 'nearest'"),
        ({}, {"rounding": "nearest"}, "rounding 'auto', but this one has 'nearest'"),
        ({"shapes": {"a": 3, "c": 2}}, {}, r"differ in \['b', 'c'\]"),
        pytest.param(
            {"shapes": {"a": 3}},
            {},
            r"of 1 parameters, but this one has 1 of 2",
            marks=pytest.mark.troubleshooting("the saved optimizer has ... group"),
        ),
        ({"shapes": {"b": 2, "a": 3}}, {}, "in another order"),
        ({"shapes": {"a": 3, "b": 4}}, {}, "state of 'b' has "),
        (
            {"shapes": {"a": 3, "b": 4}, "rule": "lomo", "rounding": "compensated"},
            {"rule": "lomo", "rounding": "compensated"},
            "state of 'b' has ",
        ),
    ],
)
def test_state_of_another_optimizer_is_refused(saved, loading, message):
    shapes = {"a": 3, "b": 2}
    saved = optimizer_of(**{"shapes": shapes, **saved}).state_dict()
    opt = optimizer_of(**{"shapes": shapes, **loading})
    before = opt.named_state_dict()
    with pytest.raises(CheckpointError, match=message):
        opt.load_state_dict(saved)
    for name, kept in before["state"].items():
        assert_same(opt.named_state_dict()["state"][name], kept)


def changed(saved, path, value):
    """A copy of a saved state with another value at a path; without it if that is `del`."""
    saved = copy.deepcopy(saved)
    *way, last = path
    place = functools.reduce(operator.getitem, way, saved)
    if value is del_:
        del place[last]
    else:
        place[last] = value
    return saved


del_ = object()
DAMAGED = {
    "a negative step": (["step"], -5, "step=-5"),
    "a step of text": (["step"], "3", "step='3'"),
    "a step of True": (["step"], True, "step=True"),
    "a seed of text": (["seed"], "x", "seed='x'"),
    "no step": (["step"], del_, "'step'"),
    "no seed": (["seed"], del_, "seed"),
    "no groups": (["param_groups"], del_, "param_groups"),
    "no state": (["state"], del_, "state"),
    "groups of text": (["param_groups"], "x", "damaged"),
    "a group of text": (["param_groups", 0], "x", "damaged"),
    "no parameters": (["param_groups", 0, "params"], del_, "params"),
    "a learning rate of text": (["param_groups", 0, "lr"], "x", "lr='x'"),
    "no learning rate": (["param_groups", 0, "lr"], del_, "'lr'"),
    "betas that are one": (["param_groups", 0, "betas"], [0.9], "betas"),
    "states in a list": (["state"], [], "damaged"),
    "a state of text": (["state", "b"], "x", "damaged"),
    "a tensor of text": (["state", "b", "exp_avg"], "x", "state of 'b' has .*exp_avg"),
    "something else": (["state", "b", "other"], 5, "state of 'b' has .*other"),
    "a tensor too few": (["state", "b", "step"], del_, "state of 'b' has "),
    "one that cannot be read": (
        ["state", "b", "exp_avg_sq"],
        TensorSource((2,), torch.float32, lambda: int("x")),
        "damaged: ValueError",
    ),
    "another dtype": (["state", "b", "exp_avg"], torch.zeros(2).bfloat16(), "bfloat16, .*this optimizer has"),
    "a parameter that is not there": (["state", "c"], {}, "a state of 'c'"),
    "a group that is not there": (["state", "_group0"], {"x": torch.ones(2)}, "state of group 0"),
    "counts of text": (["nonfinite", "steps"], "x", "nonfinite=.*'steps': 'x'"),
    "a scale of text": (["loss_scale", "scale"], "x", "loss scale has scale='x'"),
    "no scale": (["loss_scale", "scale"], del_, "loss scale has scale=None"),
}


@pytest.mark.parametrize("name", [*DAMAGED, "nothing", "a list", "None"])
def test_a_damaged_state_is_refused_and_changes_nothing(name):
    """The optimizer goes on to the bits of one that nothing was loaded into, also in the middle of a step."""
    options = {"rule": "adamw", "rounding": "stochastic", "loss_scale": "dynamic", "policy": "deferred"}
    shapes, ends = {"a": 3, "b": 2}, []
    for attacked in (False, True):
        opt = optimizer_of(shapes, **options)
        params = [record.param for record in opt._records.values()]
        saved = optimizer_of(shapes, **options, lr=0.5, seed=3).named_state_dict()
        with opt.accumulate():
            opt.backward(sum(param.float().square().sum() for param in params))
        if attacked:
            path, value, message = DAMAGED.get(name, ([], None, "the saved optimizer is damaged"))
            whole = {"nothing": {}, "a list": [saved], "None": None}
            with pytest.raises(CheckpointError, match=message):
                opt.load_named_state_dict(whole[name] if name in whole else changed(saved, path, value))
        opt.backward(sum(param.float().cos().sum() for param in params))
        ends.append(({str(n): param.detach() for n, param in enumerate(params)}, opt.named_state_dict()))
    (one, state), (other, other_state) = ends
    assert_same(one, other)
    for key in state["state"]:
        assert_same(state["state"][key], other_state["state"][key])
    assert {**state, "state": 0} == {**other_state, "state": 0}


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_the_form_of_torch_shows_states_before_the_first_update_and_loads_none(rounding, give_gradients):
    def made():
        params = {name: torch.nn.Parameter(torch.ones(2).bfloat16()) for name in ("used", "frozen", "unused")}
        params["frozen"].requires_grad_(False)
        return params, lowmem.FusedOptimizer(params.items(), rule="adamw", rounding=rounding)

    params, opt = made()
    plain = torch.optim.AdamW(params.items())
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
        others, other = made()
        other.load_state_dict(roundtrip(saved))
        assert other.state.keys() == ({others["used"]} if step else set())
        with pytest.raises(CheckpointError, match=r"no step, .* with opt\.load_named_state_dict"):
            other.load_state_dict(opt.named_state_dict())
        give_gradients(opt, (params["used"], torch.ones(2).bfloat16()))


def test_hooks_of_torch_around_saving_and_loading():
    """As `torch.optim.Optimizer` calls them, in the order in which it does."""
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
        assert saved["mine"] == 1  # hooks are given a shallow copy
        seen.append(log)

    watched(optimizer_of({"a": 3}, rule="adamw"))
    watched(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))
    assert seen[0] == seen[1]


# -- the state of torch.optim.AdamW ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("seldom", [False, True])
def test_a_state_of_torch_is_taken_over(cls, named, seldom):
    """Three steps of torch's optimizer, a file, and three of ours: the bits of six of torch's."""
    decay = {"weight_decay": 0.1 if cls is torch.optim.AdamW else 0.0}

    def groups(net):
        layers = [list(layer.named_parameters(prefix=str(n))) for n, layer in enumerate(net)]
        if not named:
            layers = [[param for _, param in layer] for layer in layers]
        return [{"params": layers[0]}, {"params": layers[1] + layers[2], "lr": 3e-3}]

    def loss(net, step):
        x = torch.linspace(-1, 1, 12).view(4, 3) + step
        return (net[:2] if seldom and step < 4 else net)(x).square().mean()  # the last layer joins late

    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))

    plain, net = made(), made()
    theirs = cls(groups(plain), lr=0.01, betas=(0.8, 0.95), foreach=False, **decay)
    for step in range(6):
        if step == 3:
            saved, weights_then = roundtrip([theirs.state_dict(), plain.state_dict()])
        loss(plain, step).backward()
        theirs.step()
        theirs.zero_grad()
    opt = lowmem.FusedOptimizer(groups(net), rule="adamw", lr=0.5, seed=7)
    net.load_state_dict(weights_then)
    opt.load_state_dict(saved)
    assert [group["lr"] for group in opt.param_groups] == [0.01, 3e-3]
    for step in range(3, 6):
        opt.backward(loss(net, step))
    assert_same(weights(net), weights(plain))
    assert (opt.named_state_dict()["step"], opt.named_state_dict()["seed"]) == (6, 7)
    again = lowmem.FusedOptimizer(groups(made()), rule="adamw", lr=0.5)
    again.load_state_dict(roundtrip(opt.state_dict()))  # and is saved as any other


def test_a_state_of_torch_in_bfloat16(give_gradients):
    """What torch held in the dtype of the weight is held in float32, with the same values."""
    theirs, ours = (torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(2))
    plain = torch.optim.AdamW([theirs])
    theirs.grad = torch.arange(4.0).bfloat16()
    plain.step()
    opt = lowmem.FusedOptimizer([ours], rule="adamw")
    opt.load_state_dict(plain.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(opt.state[ours][name], plain.state[theirs][name].float())
    give_gradients(opt, (ours, torch.ones(4).bfloat16()))
    assert opt.state[ours]["step"].item() == 2


@pytest.mark.parametrize(
    ("cls", "options", "own", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, {}, "group 0 of the saved torch optimizer has amsgrad"),
        (torch.optim.AdamW, {"maximize": True}, {}, "has maximize"),
        (torch.optim.Adam, {"weight_decay": 0.1}, {}, "has coupled weight_decay"),
        (torch.optim.AdamW, {}, {"rule": "adalomo"}, "rule 'adamw', but this one has 'adalomo'"),
        (torch.optim.AdamW, {}, {"names": "cd"}, "has other parameters or a different order"),
        (torch.optim.AdamW, {}, {"names": "ba"}, "has other parameters or a different order"),
        (torch.optim.AdamW, {}, {"names": "abc"}, r"groups of \[2\] parameters, but this one has groups of \[3\]"),
        (torch.optim.AdamW, {}, {"state_storage": "bfloat16"}, "exp_avg .* float32, .*exp_avg .* bfloat16"),
        (torch.optim.SGD, {}, {}, "has no step, seed and loss scale"),
    ],
)
def test_a_state_of_torch_that_is_refused(cls, options, own, message):
    def params(names):
        return [(name, torch.nn.Parameter(torch.ones(2))) for name in names]

    theirs = params("ab")
    plain = cls(theirs, **options)
    for _, param in theirs:
        param.grad = torch.ones(2)
    plain.step()
    opt = lowmem.FusedOptimizer(params(own.pop("names", "ab")), **{"rule": "adamw", **own})
    before = opt.named_state_dict()
    with pytest.raises(CheckpointError, match=message):
        opt.load_state_dict(plain.state_dict())
    assert opt.named_state_dict() == before


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_remove_takes_every_hook(tiny_llama, token_batches):
    model = tiny_llama()
    opt = lowmem.FusedOptimizer(model.named_parameters(), lr=0.1)
    opt.remove()
    before = weights(model)
    (batch,) = token_batches(1)
    model(**batch).loss.backward()
    assert_same(weights(model), before)
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    lowmem.FusedOptimizer(model.named_parameters(), lr=0.1).backward(model(**batch).loss)  # another may take over
    assert not torch.equal(weights(model)["lm_head.weight"], before["lm_head.weight"])


def test_second_optimizer_is_refused_and_leaves_no_hook(give_gradients):
    shared, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first = lowmem.FusedOptimizer([("shared", shared)], rule="lomo", lr=0.1)
    with pytest.raises(StepError, match="'shared' is already updated by another FusedOptimizer"):
        lowmem.FusedOptimizer([("other", other), ("shared", shared)], rule="lomo", lr=0.1)
    lowmem.FusedOptimizer([("other", other)], rule="lomo", lr=0.1)  # free: the refused one took its hooks along
    give_gradients(first, (shared, torch.ones(2)))
    torch.testing.assert_close(shared.detach(), torch.full((2,), 0.9))


# -- what is refused before the first step -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lrr": 0.1}, ConfigError, "'adalomo' has no hyperparameter 'lrr'. Did you mean 'lr'"),
        ({"rounding": "up"}, ConfigError, "rounding 'up' is unknown"),
        ({"placement": "moon"}, ConfigError, "placement 'moon' is unknown"),
        ({"compile": "yes"}, ConfigError, "compile='yes'"),
        ({"clip_value": 0}, ConfigError, "clip_value=0"),
        ({"clip_value": -1.0}, ConfigError, "clip_value=-1.0"),
        ({"loss_scale": "big"}, ConfigError, "loss_scale='big'"),
        ({"clip_norm": 1.0, "policy": "immediate"}, UnsupportedError, "clip_norm=1.0.*clip_value"),
        ({"clip_norm": 0.0}, ConfigError, "clip_norm=0.0.*a number > 0, or None"),
        ({"clip_norm": 1.0, "norm_type": 1.0}, ConfigError, "norm_type=1.0.*2 or inf"),
        ({"policy": "two-pass"}, ConfigError, "policy 'two-pass' is unknown. Did you mean 'two_pass'"),
        ({"store": "hots"}, ConfigError, "Did you mean 'host'"),
        ({"store": "host", "policy": "two_pass"}, ConfigError, "store .* only to policy 'deferred', not to 'two_pass'"),
        ({"accumulation_dtype": "float64"}, ConfigError, "Choose from float32, gradient"),
        ({"loss_scale": "static"}, ConfigError, "a number >= 0.*'dynamic'"),
        ({"clip_norm": "1"}, ConfigError, "clip_norm='1'.*a number > 0"),
        ({"clip_norm": True}, ConfigError, "clip_norm=True"),
        ({"clip_value": "1"}, ConfigError, "clip_value='1'"),
        ({"clip_value": True}, ConfigError, "clip_value=True"),
        ({"norm_type": "2"}, ConfigError, "norm_type='2'"),
        ({"max_nonfinite_steps": True}, ConfigError, "max_nonfinite_steps=True"),
        ({"seed": "x"}, ConfigError, "seed='x'.*a whole number"),
        ({"seed": 1.5}, ConfigError, r"seed=1\.5"),
        ({"seed": True}, ConfigError, "seed=True"),
        ({"compile": 0}, ConfigError, "compile=0.*True, False or 'auto'"),
        ({"batching": 1}, ConfigError, "batching=1.*True or False"),
    ],
)
def test_option_refused(options, error, message):
    with pytest.raises(error, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize("named", [False, True])
def test_groups_as_torch_takes_them(named, give_gradients):
    """A generator and a single tensor, named or not."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    single = torch.nn.Parameter(torch.ones(2))
    if named:
        groups = [{"params": model.named_parameters(), "lr": 0.1}, {"params": [("single", single)]}]
    else:
        groups = [{"params": model.parameters(), "lr": 0.1}, {"params": single}]
    opt = lowmem.FusedOptimizer(groups, rule="lomo", lr=0.2)
    give_gradients(opt, *[(param, torch.ones_like(param)) for param in [*model.parameters(), single]])
    own = [f"param{i}" for i in range(5)]
    assert list(opt.last_step.names) == ([*dict(model.named_parameters()), "single"] if named else own)
    torch.testing.assert_close(single.detach(), torch.full((2,), 0.8))


def test_no_parameters():
    with pytest.raises(ConfigError, match="no parameters"):
        lowmem.FusedOptimizer([])


def test_two_parameters_of_one_name():
    params = [("w", torch.nn.Parameter(torch.zeros(2))) for _ in range(2)]
    with pytest.raises(ConfigError, match="'w' is given twice"):
        lowmem.FusedOptimizer(params)


def test_parameter_that_cannot_be_seen_as_a_matrix():
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(UnsupportedError, match=r"'weight' of shape \[4, 3, 3, 3\].*Make it contiguous"):
        lowmem.FusedOptimizer(convolution.named_parameters())


@pytest.mark.parametrize(
    ("wanted", "compiler", "large", "compiled"),
    [
        (True, True, False, True),
        (False, True, True, False),
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        (True, False, False, ConfigError),
    ],
)
def test_compile_setting(wanted, compiler, large, compiled, monkeypatch):
    """`auto` compiles where there is a compiler and enough to win; what was asked for and cannot be raises."""
    monkeypatch.setattr(lowmem.step.compiled, "has_compiler", lambda device: compiler)
    monkeypatch.setattr(lowmem.step.compiled, "try_compiler", {"cpu": 1}.get if compiler else {}.__getitem__)
    monkeypatch.setattr(lowmem.step.compiled, "COMPILE_FROM", 10 if large else 1000)
    param = torch.nn.Parameter(torch.zeros(100))
    if compiled is ConfigError:
        with pytest.raises(ConfigError, match="compile=True, but compiling for 'cpu' fails; use 'auto'"):
            lowmem.FusedOptimizer([param], compile=wanted)
    else:
        assert lowmem.FusedOptimizer([param], compile=wanted).compiled is compiled


def test_float64():
    """Refused by the rules of the package; a torch class steps in the parameter's own dtype."""
    ours, theirs = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    with pytest.raises(UnsupportedError, match=r"'w'.*float64.*torch\.optim class"):
        lowmem.FusedOptimizer([("w", ours)])
    opt = lowmem.FusedOptimizer([("w", ours)], rule="torch.optim.AdamW", foreach=False)
    opt.backward((ours**3).sum())
    plain = torch.optim.AdamW([theirs], foreach=False)
    (theirs**3).sum().backward()
    plain.step()
    assert torch.equal(ours, theirs)


class OnMps(torch.nn.Parameter):
    device = torch.device("mps")


def test_a_device_without_float64_is_refused():
    with pytest.raises(UnsupportedError, match="'weight' is on 'mps', which does not support float64"):
        lowmem.FusedOptimizer([("weight", OnMps(torch.ones(3)))], rule="lomo")
