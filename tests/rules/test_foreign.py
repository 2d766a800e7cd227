"""Any torch optimizer as a rule: the same bits as its own step(), or a refusal that says why."""

import copy
import inspect
import shutil
import sys

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.two_tensor import TwoTensor

import lowmem
from lowmem import rules
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


def small_model(cls):
    bias = cls is not torch.optim.Muon  # which takes matrices only
    return torch.nn.Sequential(torch.nn.Linear(6, 5, bias=bias), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=bias))


def single_tensor(cls):
    """What makes a class step parameter by parameter, as fused training does."""
    return {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}


@pytest.mark.parametrize(("cls", "kwargs"), SETTINGS)
def test_same_bits_as_step(cls, kwargs):
    fused, plain = (small_model(cls) for _ in range(2))
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    ours = lowmem.FusedOptimizer(fused.named_parameters(), rule=cls, **single_tensor(cls), **kwargs)
    theirs = cls(plain.parameters(), **single_tensor(cls), **copy.deepcopy(kwargs))
    for _ in range(3):
        x = torch.randn(4, 6)
        ours.backward(fused(x).square().mean())
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ["torch.optim.AdamW", torch.optim.AdamW])
def test_class_and_import_path(rule):
    param = torch.nn.Parameter(torch.zeros(3))
    opt = lowmem.FusedOptimizer([param], rule=rule, betas=(0.5, 0.9))
    assert opt.config.rule == rule
    assert rules.resolve(opt.param_groups[0].get("rule", rule)).name == "torch.optim.adamw.AdamW"
    assert opt.param_groups[0]["lr"] == 1e-3  # the class's own default
    assert opt.param_groups[0]["betas"] == (0.5, 0.9)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()


class TakesModel(torch.optim.Optimizer):
    def __init__(self, model, lr=1e-3):
        super().__init__(model.parameters(), {"lr": lr})


class Drives(torch.optim.SGD):
    param_groups = property(lambda self: [])


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (NeedsClosure, "needs a closure"),
        (torch.optim.SparseAdam, "sparse gradients only"),
        (TakesModel, "takes a whole model.*'adalomo'"),
        (Drives, "drives other optimizers"),
    ],
)
def test_class_refused(cls, message):
    with pytest.raises(UnsupportedError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=cls)


class CountsInGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1


class CountsInTensor(torch.optim.SGD):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.param_groups[0]["k"] = torch.zeros(())

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["k"].add_(1)


class ChangesGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.9


class CountsOnItself(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1


class CountsBeside(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class BeginsBeside(torch.optim.SGD):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.state["steps"] = 0

    def step(self, closure=None):
        super().step(closure)
        self.state["steps"] += 1


class StepsInTrainingOnly(CountsInGroup):
    def train(self):
        self.training = True

    def step(self, closure=None):
        assert self.training
        super().step(closure)


class KeepsASet(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["seen"] = [{1, 2}]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (CountsInGroup, r"keeps state in its parameter group \(steps\)"),
        (CountsInTensor, r"keeps state in its parameter group \(k\)"),
        (ChangesGroup, r"keeps state in its parameter group \(lr\)"),
        (CountsOnItself, r"keeps state on itself \(steps\)"),
        (CountsBeside, r"keeps state beside its parameters \(all\)"),
        (BeginsBeside, r"keeps state beside its parameters \(steps\)"),
        (StepsInTrainingOnly, r"keeps state in its parameter group \(steps\)"),
        (KeepsASet, r"keeps 'seen.0' as set, which cannot be saved"),
    ],
)
def test_state_that_cannot_be_kept_is_refused_before_the_first_update(cls, message):
    with pytest.raises(UnsupportedError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=cls, lr=0.1)


class CountsLater(CountsInGroup):
    """Its trial fails, as it would without a GPU."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].numel() > 3:
            raise RuntimeError("no kernel for this device")
        super().step(closure)


def test_state_in_the_group_that_shows_later_is_refused_then(give_gradients):
    param = torch.nn.Parameter(torch.zeros(3))
    opt = lowmem.FusedOptimizer([("w", param)], rule=CountsLater, lr=0.1)
    with pytest.raises(UnsupportedError, match=r"'w'.*keeps state in its parameter group \(steps\)"):
        give_gradients(opt, (param, torch.ones(3)))


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.grad.add_(torch.randn_like(param))
        super().step(closure)


def test_the_trial_draws_no_random_numbers():
    before = torch.get_rng_state()
    lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=Noisy)
    assert torch.equal(torch.get_rng_state(), before)


class Unusual(torch.optim.Optimizer):
    """AdamW-like in nothing, but it does what third parties do: new memory, new state, settings that only it knows."""

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


def follow(rule, tmp_path, dtype=torch.float32, groups=({},), rounding="nearest", **settings):
    """Six steps at changing learning rates: ours, the class's own step(), and ours resumed half-way, in two ways.

    `groups` are settings of parameter groups, which take turns with the parameters.
    """

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64)).to(dtype)

    def split(model):
        named = list(model.named_parameters())
        return [{"params": named[i :: len(groups)], **own} for i, own in enumerate(groups)]

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
    for start, weight, own, *resumed in zip(
        *(model.parameters() for model in (make(), ours, theirs, copied, read)), strict=True
    ):
        assert not torch.equal(weight, start)
        assert torch.equal(weight, own) or rounding != "nearest"
        assert all(torch.equal(weight, again) for again in resumed)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_third_parties_do(dtype, rounding, tmp_path):
    groups = [{"betas": (0.9, 0.5), "limit": 3.0}, {"betas": (0.1, 0.5), "boost": 2.0}]
    follow(Unusual, tmp_path, dtype, groups, rounding)


def test_a_setting_without_default_is_asked_for():
    with pytest.raises(ConfigError, match=r"Unusual has no default for 'lr'; set it"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=Unusual)


class FillsIn(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, max_lr=None):
        super().__init__(params, lr)
        self.param_groups[0]["max_lr"] = lr if max_lr is None else max_lr


def test_a_setting_that_depends_on_others_is_asked_for():
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"derives max_lr=0.1 from its other settings where max_lr=None.*Set max_lr"):
        lowmem.FusedOptimizer([param], rule=FillsIn, lr=0.1)
    lowmem.FusedOptimizer([param], rule=FillsIn, lr=0.1, max_lr=0.2)


# --- Packages that need not be there --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("no_such_package.optim.AdamW", "no_such_package is not installed; pip install no_such_package"),
        ("optimi.AdamW", "optimi is not installed; pip install torch-optimi"),
        ("broken_package.AdamW", r"cannot import 'broken_package' \(needs another libc\)"),
        ("torch.optm.AdamW", "cannot import 'torch.optm'"),
        ("torch.optim.AdamWW", "torch.optim has no 'AdamWW'. Did you mean 'AdamW'"),
        ("torch.optim.lr_scheduler", "not a torch.optim.Optimizer class"),
    ],
)
def test_what_cannot_be_imported(rule, message, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('needs another libc')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "optimi", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=rule)


def importable(rule):
    """Skips the test where the package of an import path is missing."""
    pytest.importorskip(rule.rpartition(".")[0], exc_type=ImportError)
    return rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {"decouple_lr": True, "max_lr": 5e-3}),
        ("AdamW", {}),
        ("AdamW", {"kahan_sum": False, "groups": [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.6)}]}),
        ("AdamW", {"rounding": "compensated"}),
        ("Adan", {}),
        ("Lion", {}),
        ("RAdam", {}),
        ("Ranger", {}),
        ("SGD", {"momentum": 0.9}),
        ("StableAdamW", {}),
        ("StableAdamW", {"rounding": "stochastic"}),
    ],
)
def test_optimi(name, settings, dtype, tmp_path):
    follow(importable(f"optimi.{name}"), tmp_path, dtype, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"gradient_release": True}, "gradient_release=True registers hooks"), ({"decouple_lr": True}, "Set max_lr")],
)
def test_optimi_refused(settings, message):
    rule = importable("optimi.AdamW")
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=rule, lr=1e-3, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW8bit", {}),
        ("AdamW8bit", {"groups": [{"block_size": 256, "weight_decay": 0.1}, {"block_size": 32}]}),
        ("AdamW8bit", {"rounding": "stochastic"}),
        ("AdamW4bit", {}),
        ("AdamW4bit", {"rounding": "compensated"}),
        ("AdamWFp8", {}),
        ("Adam8bit", {}),
        ("Adam4bit", {}),
        ("AdamFp8", {}),
    ],
)
def test_torchao(name, settings, dtype, tmp_path):
    with torch.compiler.set_stance("force_eager"):  # it would compile for each shape and dtype
        follow(importable(f"torchao.optim.{name}"), tmp_path, dtype, **settings)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torchao compiles its step")
def test_torchao_compiled(tmp_path):
    follow(importable("torchao.optim.AdamW8bit"), tmp_path, torch.bfloat16)


def test_torchao_offload_refused():
    rule = importable("torchao.optim.CPUOffloadOptimizer")
    with pytest.raises(UnsupportedError, match="drives other optimizers"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {}),
        ("AdamW8bit", {}),
        ("AdamW8bit", {"groups": [{}, {"min_8bit_size": 64, "weight_decay": 0.1}]}),
        ("AdamW8bit", {"rounding": "stochastic"}),
        ("AdEMAMix8bit", {"t_alpha": 10, "t_beta3": 10}),
        ("Lion8bit", {}),
        ("Lion8bit", {"rounding": "compensated"}),
        ("SGD8bit", {"momentum": 0.9}),
    ],
)
def test_bitsandbytes(name, settings, dtype, tmp_path):
    follow(importable(f"bitsandbytes.optim.{name}"), tmp_path, dtype, **settings)


@pytest.mark.parametrize("name", ["Lomo", "AdaLomo"])
def test_lomo_optim_refused(name):
    rule = importable(f"lomo_optim.{name}")
    with pytest.raises(UnsupportedError, match=r"takes a whole model.*'adalomo'"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule=rule)


def test_muon_names_the_vector():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match=r"parameter 'bias' of shape \[4\].*Muon does not accept this"):
        lowmem.FusedOptimizer(model.named_parameters(), rule=torch.optim.Muon)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [({"lr": -1.0}, "learning rate"), ({"betas": (2.0, 0.9)}, "beta parameter"), ({"eps": -1.0}, "epsilon")],
)
def test_value_that_the_class_refuses(hyper, message):
    with pytest.raises(UnsupportedError, match=f"AdamW does not accept this: Invalid {message}"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule="torch.optim.AdamW", **hyper)


def test_unknown_option_of_a_class():
    with pytest.raises(ConfigError, match="Did you mean 'betas'"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], rule="torch.optim.AdamW", beta=(0.9, 0.9))


def test_loss_scale_in_the_hook_refused():
    options = {"rule": "torch.optim.AdamW", "loss_scale": 1024}
    with pytest.raises(UnsupportedError, match="bfloat16 without a loss scale"):
        lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], policy="immediate", **options)
    assert lowmem.FusedOptimizer([torch.nn.Parameter(torch.zeros(3))], **options).policy == "two_pass"


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_rounding_of_a_class(rounding, give_gradients):
    """A bfloat16 weight with a float32 copy for the step stays within one rounding of a float32 weight."""
    start = torch.randn(8, 8).bfloat16()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    opt = lowmem.FusedOptimizer([("w", ours)], rule="torch.optim.SGD", lr=0.1, rounding=rounding)
    sgd = torch.optim.SGD([theirs], lr=0.1)
    grad = torch.randn(8, 8).bfloat16()
    give_gradients(opt, (ours, grad))
    theirs.grad = grad.float()
    sgd.step()
    # stochastic rounding may go either way: one spacing, 2⁻⁷ of the value's power of two; nearest half of it
    limit = {"stochastic": 2**-7, "compensated": 2**-8}[rounding]
    assert ((ours.float() - theirs).abs() <= limit * theirs.abs()).all()
    assert not torch.equal(ours, start)
