"""A torch optimizer used as a rule bitwise equals its `step()`, or raises an error with the reason."""

import copy
import inspect
import random
import re
import sys
import threading
from collections import deque
from typing import ClassVar

import pytest
import torch
from support.nets import plain_step, same, weights
from support.products import FULL, in_turn
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.two_tensor import TwoTensor

import lowmem
from lowmem.errors import ConfigError, UnsupportedError
from lowmem.hf import checkpoint
from lowmem.rules.foreign import import_optimizer

REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
SETTINGS = [
    pytest.param(info.optim_cls, setting.kwargs, id=f"{info.optim_cls.__name__}-{setting.desc}")
    for info in optim_db
    if info.optim_cls not in REFUSED
    for setting in info.optim_inputs_func(device="cpu")
]


def one_param():
    return torch.nn.Parameter(torch.zeros(3))


def small_model(cls):
    bias = cls is not torch.optim.Muon  # Muon accepts matrices only
    return torch.nn.Sequential(torch.nn.Linear(6, 5, bias=bias), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=bias))


def single_tensor(cls):
    """Returns options that make a class update one parameter at a time, as fused training does."""
    return {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}


@pytest.mark.parametrize(("cls", "kwargs"), SETTINGS if FULL else SETTINGS[::3])
def test_same_bits_as_step(cls, kwargs):
    fused, plain = (small_model(cls) for _ in range(2))
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    ours = lowmem.FusedOptimizer(fused.named_parameters(), rule=cls, **single_tensor(cls), **kwargs)
    theirs = cls(plain.parameters(), **single_tensor(cls), **copy.deepcopy(kwargs))
    for _ in range(3):
        x = torch.randn(4, 6)
        ours.backward(fused(x).square().mean())
        plain_step(theirs, plain(x).square().mean())
    assert same(weights(fused), weights(plain))


class TakesModel(torch.optim.Optimizer):
    def __init__(self, model, lr=1e-3):
        super().__init__(model.parameters(), {"lr": lr})


class Drives(torch.optim.SGD):
    param_groups = property(lambda self: [])


class Counting(torch.optim.Optimizer):
    """Divides each update by the number of steps so far."""

    steps = 0

    def __init__(self, params, lr=1e-3, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            used = [param for param in group["params"] if param.grad is not None]
            divisor = self.divisor(group, used)
            for param in used:
                param.sub_(param.grad * (group["lr"] / divisor))

    def divisor(self, group, used):
        group["steps"] = group.get("steps", 0) + 1
        return group["steps"]


def divides_by(function, **members):
    """Returns a class that divides its updates by `function(self, group, parameters with a gradient)`."""
    return type("Divides", (Counting,), {"divisor": function, **members})


def in_a_tensor(self, group, used):
    group["k"] = group.get("k", torch.zeros((), dtype=torch.int64, device="cpu"))
    return int(group["k"].add_(1))


def sum_of_rates(self, group, used):
    """Schedule-free optimizers accumulate such a sum."""
    group["sum"] = group.get("sum", 1.0) + group["lr"]
    return group["sum"]


def with_another_rate(self, group, used):
    group["lr"] *= 0.9
    return 1


def beside_states(self, group, used):
    shared = self.state["all"]
    shared.setdefault("recent", deque(maxlen=3)).append(len(shared))
    shared[1] = shared.get(1, 0) + 1
    return shared[1] + len(shared["recent"])


def in_training_only(self, group, used):
    assert self.training
    return Counting.divisor(self, group, used)


COUNTING = {
    "in the group": Counting,
    "in a tensor": divides_by(in_a_tensor),
    "sum of rates": divides_by(sum_of_rates),
    "its rate": divides_by(with_another_rate),
    "on itself": divides_by(lambda self, group, used: self.steps),
    "beside states": divides_by(beside_states),
    "in training only": divides_by(in_training_only, train=lambda self: setattr(self, "training", True)),
}


class Projector:
    """An object that an optimizer stores for each parameter."""

    def __init__(self):
        self.seen, self.kept = 0, None

    def __call__(self, grad):
        self.seen += 1
        self.kept = grad.clone() if self.kept is None else self.kept + grad
        return self.kept / self.seen


class ReadsOnce(torch.optim.SGD):
    """Reads arguments in its constructor that its groups do not contain, or contain in a different form."""

    def __init__(self, params, lr=0.1, betas=(0.9, 0.5), limit=None, boost=1.0):
        super().__init__(params, lr)
        self.param_groups[0].update(beta=betas[0], limit=3 * lr if limit is None else limit)
        self.scale, self.of_rate = boost, limit is None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            size, limit = group["lr"] * group["beta"] * self.scale, group["limit"] * (1 + self.of_rate)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_((param.grad * size).clamp(-limit, limit))


def test_edited_settings_take_effect(give_gradients):
    """The edits are to a list in place, an argument that only a new object reads, and None for a default."""
    param = torch.nn.Parameter(torch.zeros(1))
    opt = lowmem.FusedOptimizer([param], rule=ReadsOnce, betas=[0.5, 0.5], limit=1.0)
    group = opt.param_groups[0]

    def size():
        before = param.item()
        give_gradients(opt, (param, torch.ones(1)))
        return pytest.approx(before - param.item(), rel=1e-5)

    assert size() == 0.05
    group["betas"][0] = 0.25
    assert size() == 0.025
    group["boost"] = 100.0
    assert size() == 1.0
    group["limit"] = None
    assert [size(), size()] == [0.6, 0.6]


class KeepsAnObject(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    projector = self.state[param].setdefault("projector", Projector())
                    param.sub_(projector(param.grad) * group["lr"])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cls", [*COUNTING.values(), KeepsAnObject], ids=[*COUNTING, "an object"])
def test_a_class_counts_its_steps(cls, groups, tmp_path):
    if groups == 2 and cls is COUNTING["beside states"]:
        pytest.skip("it counts groups")
    follow(cls, tmp_path, groups=({},) * groups, trained=hasattr(cls, "train"))


@pytest.mark.parametrize("cls", [COUNTING["in the group"], COUNTING["on itself"]])
def test_a_step_without_a_gradient_counts(cls):
    """One parameter has no gradient, or a whole group has none."""
    (ours, theirs), steps = ([torch.nn.Parameter(torch.ones(3)) for _ in range(3)] for _ in range(2)), range(6)
    fused = lowmem.FusedOptimizer([{"params": ours[:2]}, {"params": ours[2:]}], rule=cls, lr=0.1)
    plain = cls([{"params": theirs[:2]}, {"params": theirs[2:]}], lr=0.1)
    for step in steps:
        plain.zero_grad()
        for params in (ours, theirs):
            used = [param for n, param in enumerate(params) if (step + n) % 3]
            sum((param * (n + 1)).square().sum() for n, param in enumerate(used)).backward()
        plain.step()
        assert all(map(torch.equal, ours, theirs))
    assert fused.last_step is not None


# --- Classes that combine parameters --------------------------------------------------------------------------------


class Position(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for n, param in enumerate(group["params"]):
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] / (n + 1))


def number_of_updates(self, group, used):
    """Halves the divisor from the 1000th update on, which the first steps cannot reveal."""
    self.updates = getattr(self, "updates", 0) + len(used)
    return 1 if self.updates < 1000 else 0.5


def adapted_rate(self, group, used):
    """D-Adaptation computes its rate this way."""
    group["d"] = max(group.get("d", 1e-6), 1e-6 * sum(float(param.grad.abs().sum()) for param in used))
    return 1 / group["d"]


COMBINING = {
    "norm of all gradients": divides_by(
        lambda self, group, used: float(sum(p.grad.square().sum() for p in used).sqrt())
    ),
    "number of updates": divides_by(number_of_updates),
    "adapted rate": divides_by(adapted_rate),
    "coin for all": divides_by(lambda self, group, used: 1 + (random.random() < 1e-3)),
    "position": Position,
}


@pytest.mark.parametrize("lr", [0.1, 1e-9])
@pytest.mark.parametrize("name", COMBINING)
def test_a_class_that_combines_parameters_raises(name, lr):
    reason = "draws random numbers" if name == "coin for all" else "combines parameters inside step()"
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        lowmem.FusedOptimizer([one_param()], rule=COMBINING[name], lr=lr)


CountsGroups = divides_by(lambda self, group, used: setattr(self, "seen", getattr(self, "seen", 0) + 1) or self.seen)


def test_a_class_that_combines_groups_raises_for_a_second_group():
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    lowmem.FusedOptimizer([{"params": params}], rule=CountsGroups, lr=0.1).remove()
    with pytest.raises(UnsupportedError, match="combines parameters"):
        lowmem.FusedOptimizer([{"params": params[:1]}, {"params": params[1:]}], rule=CountsGroups, lr=0.1)


def keeps_a_buffer(self, group, used):
    self.buffer = getattr(self, "buffer", torch.zeros(5)) + 1
    return 1


class KeepsASet(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["seen"] = [{1, 2}]


@pytest.mark.parametrize("rule", ["adamw", torch.optim.AdamW, torch.optim.Adafactor])
def test_complex_parameters_raise_by_name(rule):
    """Frozen complex parameters are allowed, but raise once they are unfrozen."""
    real, wave = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    named = [("real", real), ("wave", wave)]
    with pytest.raises(UnsupportedError, match=r"'wave' is complex, .*torch\.view_as_complex"):
        lowmem.FusedOptimizer(named, rule=rule, lr=0.1)
    wave.requires_grad_(False)
    opt = lowmem.FusedOptimizer(named, rule=rule, lr=0.1)
    (real.sum() + wave.real.sum()).backward()
    wave.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="'wave' is complex"):
        (real.sum() + wave.real.sum()).backward()
    assert opt.last_step.step == 1


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.AdamW])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_model_converted_after_its_optimizer_was_created(cls, dtypes):
    """A class that creates states in its constructor has them in the model's former dtype."""
    models = [torch.nn.Linear(4, 4, dtype=dtypes[0]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"lr": 0.1, "foreach": False}
    opt = lowmem.FusedOptimizer(models[0].named_parameters(), rule=cls, **options)
    plain = cls(models[1].parameters(), **options)
    for model in models:
        model.to(dtypes[1])
    for _ in range(3):
        x = torch.randn(3, 4, dtype=dtypes[1])
        opt.backward(models[0](x).square().sum())
        plain_step(plain, models[1](x).square().sum())
    assert same(*map(weights, models))


class Kinds(Counting):
    """Reads a group key that is not an argument of its constructor."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        assert all("kind" in group for group in self.param_groups), "a group needs a kind"

    def divisor(self, group, used):
        return 1 if group["kind"] == "matrix" else 2


def test_group_keys_that_are_not_arguments():
    params, kinds = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)], ("matrix", "vector")
    opt = lowmem.FusedOptimizer(
        [{"params": p, "kind": kind} for p, kind in zip(params, kinds, strict=True)], rule=Kinds, lr=1.0
    )
    sum(param.sum() for param in params).backward()
    assert (params[0] == -1.0).all() and (params[1] == -0.5).all() and opt.param_groups[1]["kind"] == "vector"
    with pytest.raises(ConfigError, match=r"Kinds does not read 'llr'. Did you mean 'lr'"):
        lowmem.FusedOptimizer([{"params": [one_param()], "kind": "matrix", "llr": 1.0}], rule=Kinds)


class Unusual(torch.optim.Optimizer):
    """Does what third-party optimizers do: it replaces tensors and states, and hides settings in attributes."""

    def __init__(self, params, lr, betas=(0.9, 0.5), boost=1.0, **kwargs):
        super().__init__(params, {"lr": torch.tensor(lr), "beta": betas[0], "limit": kwargs.pop("limit", 1.0)})
        self.scale = boost
        assert not kwargs

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert isinstance(group["lr"], torch.Tensor)
            for p in group["params"]:
                old, pair = self.state[p].get("momenta", [torch.zeros_like(p), None])
                old = old * group["beta"] + p.grad
                both = TwoTensor(old.clone(), old * 2) if pair is None else TwoTensor(pair.a + old, pair.b + 1)
                self.state[p] = {"momenta": [old, both], "shape": p.shape, "dtype": ({"of": p.dtype}, 1.5)}
                p.data = p - group["lr"] * (old + both.b).clamp(-group["limit"], group["limit"]) * self.scale


def follow(rule, tmp_path, dtype=torch.float32, groups=({},), rounding="nearest", trained=False, **settings):
    """Compares six steps at changing rates: lowmem, the class's own step(), and lowmem resumed in two ways.

    `groups` are settings of parameter groups, to which parameters are assigned in turn.
    """

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64)).to(dtype)

    def split(model):
        named = list(model.named_parameters())
        return [{"params": named[i :: len(groups)], **each} for i, each in enumerate(groups)]

    def fuse(model, lr):
        return lowmem.FusedOptimizer(split(model), rule=rule, rounding=rounding, **{**settings, "lr": lr})

    def step(model, optimizers, lr, x):
        for group in [group for opt in optimizers for group in opt.param_groups]:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        model(x).float().square().mean().backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()

    cls = import_optimizer(rule) if isinstance(rule, str) else rule
    rates = [1e-3, 3e-3, 2e-3, 5e-4, 1e-3, 2e-3]
    batches = torch.randn(len(rates), 8, 64).to(dtype)
    ours, theirs, copied, read = make(), make(), make(), make()
    fused = [fuse(ours, lr=rates[0])]
    plain = [
        cls([param for _, param in group.pop("params")], **{"lr": rates[0], **settings, **group})
        for group in split(theirs)
    ]
    for optimizer in plain if trained else ():
        optimizer.train()
    for i, (lr, x) in enumerate(zip(rates, batches, strict=True)):
        if i == 3:
            copied.load_state_dict(ours.state_dict())
            read.load_state_dict(ours.state_dict())
            copy_of_fused, fused_of_file = [fuse(copied, lr=9.0)], [fuse(read, lr=9.0)]
            copy_of_fused[0].load_state_dict(fused[0].state_dict())
            checkpoint.save_optimizer(fused[0], tmp_path / "o.safetensors")
            checkpoint.load_optimizer(fused_of_file[0], tmp_path / "o.safetensors")
        step(ours, fused, lr, x)
        step(theirs, plain, lr, x)
        if i >= 3:
            step(copied, copy_of_fused, lr, x)
            step(read, fused_of_file, lr, x)
    for start, weight, expected, *resumed in zip(*map(weights, (make(), ours, theirs, copied, read)), strict=True):
        assert not torch.equal(weight, start)
        assert torch.equal(weight, expected) or rounding != "nearest"
        assert all(torch.equal(weight, again) for again in resumed)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    in_turn([torch.bfloat16, torch.float32], ["nearest", "stochastic", "compensated"]),
)
def test_an_unusual_third_party_class(dtype, rounding, tmp_path):
    groups = [{"betas": (0.9, 0.5), "limit": 3.0}, {"betas": (0.1, 0.5), "boost": 2.0}]
    follow(Unusual, tmp_path, dtype, groups, rounding)


# --- Unsupported classes --------------------------------------------------------------------------------------------

IN_THE_HOOK = {"loss_scale": 1024, "policy": "immediate"}


@pytest.mark.parametrize(
    ("error", "rule", "options", "message"),
    [
        (UnsupportedError, torch.optim.LBFGS, {}, "needs a closure"),
        (UnsupportedError, torch.optim.SparseAdam, {}, "does not run: .*dense gradients"),
        (UnsupportedError, TakesModel, {}, "takes a whole model.*'adalomo'"),
        (UnsupportedError, Drives, {}, "wraps other optimizers"),
        (UnsupportedError, KeepsASet, {}, r"stores 'seen.0' as set, which cannot be saved"),
        (
            UnsupportedError,
            divides_by(keeps_a_buffer),
            {},
            r"stores a tensor, 'self.buffer', outside the states of its parameters",
        ),
        (UnsupportedError, divides_by(lambda *_: 1 // 0), {}, r"Divides does not run: integer division"),
        (UnsupportedError, Kinds, {}, r"parameter 'param0'.*a group needs a kind"),
        (UnsupportedError, torch.optim.Muon, {}, r"parameter 'param0' of shape \[3\] is not accepted by .*Muon"),
        (UnsupportedError, "torch.optim.AdamW", {"lr": -1.0}, "is not accepted by .*AdamW: Invalid learning rate"),
        (UnsupportedError, "torch.optim.AdamW", IN_THE_HOOK, "bfloat16 without a loss scale"),
        (ConfigError, "torch.optim.AdamW", {"beta": (0.9, 0.9)}, "Did you mean 'betas'"),
        (ConfigError, Counting, {"decay": 0.1}, "does not read 'decay'"),
        (ConfigError, Unusual, {}, r"Unusual has no default for 'lr'; set it"),
        (ConfigError, "no_such_package.optim.AdamW", {}, "no_such_package is not installed; pip install no_such_p"),
        (ConfigError, "optimi.AdamW", {}, "optimi is not installed; pip install torch-optimi"),
        (ConfigError, "broken_package.AdamW", {}, r"cannot import 'broken_package' \(needs another libc\)"),
        (ConfigError, "torch.optm.AdamW", {}, "cannot import 'torch.optm'"),
        (ConfigError, "torch.optim.AdamWW", {}, "torch.optim has no 'AdamWW'. Did you mean 'AdamW'"),
        (ConfigError, "torch.optim.lr_scheduler", {}, "not a torch.optim.Optimizer class"),
    ],
)
def test_unsupported_classes_raise_before_the_first_update(error, rule, options, message, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('needs another libc')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "optimi", None)  # simulates a missing package
    with pytest.raises(error, match=message):
        lowmem.FusedOptimizer([one_param()], rule=rule, **options)


@pytest.mark.cpu_only("bitsandbytes looks for the libraries of CUDA")
def test_bitsandbytes_settings_of_single_parameters_raise(monkeypatch):
    manager = pytest.importorskip("bitsandbytes", exc_type=ImportError).optim.GlobalOptimManager.get_instance()
    for name in ("pid2config", "index2config"):
        monkeypatch.setattr(manager, name, {})
    monkeypatch.setattr(manager, "module_weight_config_triple", [])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    rule = "bitsandbytes.optim.AdamW8bit"
    lowmem.FusedOptimizer(model.parameters(), rule=rule).remove()
    manager.override_config(model[1].weight, "optim_bits", 32)
    with pytest.raises(UnsupportedError, match="settings for individual parameters"):
        lowmem.FusedOptimizer(model.parameters(), rule=rule)
    manager.pid2config.clear()
    manager.register_module_override(model[1], "weight", {"optim_bits": 32})  # as StableEmbedding does
    with pytest.raises(UnsupportedError, match="settings for individual parameters"):
        lowmem.FusedOptimizer(model.parameters(), rule=rule)


class NotesSettings(torch.optim.SGD):
    """Records a compiler setting in each step."""

    seen: ClassVar[list[int]] = []

    def step(self, closure=None):
        self.seen.append(torch._dynamo.config.recompile_limit)
        super().step(closure)


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
def test_settings_of_the_compiler_reach_the_threads_of_autograd(policy):
    """Settings are per thread since torch 2.12. On a CPU, hooks run on the thread that calls backward."""
    param = torch.nn.Parameter(torch.ones(2))
    with torch._dynamo.config.patch(recompile_limit=100):
        opt = lowmem.FusedOptimizer([param], rule=NotesSettings, policy=policy)
        NotesSettings.seen.clear()
        thread = threading.Thread(target=param.square().sum().backward)
        thread.start()
        thread.join()
    assert NotesSettings.seen == [100] and opt.last_step.step == 1


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.grad.add_(torch.randn_like(param))
        super().step(closure)


def test_the_trial_draws_no_random_numbers():
    before = torch.get_rng_state()
    lowmem.FusedOptimizer([one_param()], rule=Noisy)
    assert torch.equal(torch.get_rng_state(), before)
