"""Steps that are scaled, clamped, clipped, accumulated, or skipped after an overflow are PyTorch's, to the bit.

The reference is `GradScaler`, `clip_grad_value_`, `clip_grad_norm_` and a class of `torch.optim` on `.grad`.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from support.compiled import equal
from support.devices import seeded
from support.nets import same, weights
from support.products import pairwise
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import lowmem

STEPS = 14
DYNAMIC = lowmem.DynamicScale(init_scale=2.0**8, growth_interval=3)
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.01}

# Limits that have an effect at some steps and not at others.
CLIPS = [{}, {"clip_norm": 30.0}, {"clip_norm": 13.0, "clip_value": 1.5}, {"clip_value": 1.5}]
SCALES = [None, 1024.0, 1000.0, DYNAMIC]  # one is not a power of two: it is unscaled, clamped and clipped in this order
POLICIES = [("immediate", 1), ("two_pass", 1), ("deferred", 1), ("deferred", 4)]  # with micro-batches
KINDS = {"float32": (torch.float32, False), "float16": (torch.float16, False), "autocast": (torch.float32, True)}
# Step → (micro-batch or the last one, parameter, factor of its gradient). Two in a row, one after a growth; the
# parameter whose gradient comes first, the one whose gradient comes last, and one in between.
OVERFLOWS = {
    2: (0, "tied", math.inf),
    3: (3, "point", math.nan),
    7: (1, "stack", -math.inf),
    12: (2, "point", math.inf),
}


class Zoo(torch.nn.Module):
    """Parameters of 0 to 4 dimensions, a tied one, one that never has a gradient, and one that has it at times."""

    def __init__(self, kind, spoilt):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.autocast = KINDS[kind]
        self.spoilt, self.factors = spoilt, {}
        shapes = {"point": (), "line": (7,), "matrix": (4, 6), "stack": (2, 3, 5), "kernel": (3, 2, 2, 2)}
        shapes |= {"tied": (5, 5), "unused": (3,), "seldom": (4,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(self.dtype)))
            getattr(self, name).register_hook(lambda grad, name=name: grad * self.factors.get(name, 1.0))
        self.also_tied = self.tied

    def groups(self):
        """Two groups that are not in the order of the parameters, each with its own learning rate."""
        first = [(name, param) for name, param in self.named_parameters() if name in ("kernel", "line", "unused")]
        rest = [(name, param) for name, param in self.named_parameters() if (name, param) not in first]
        return [{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.02}]

    def losses(self, step, accumulation):
        """The losses of a step's micro-batches, one after the other."""
        at, name, factor = self.spoilt.get(step, (0, None, 1.0))
        for micro in range(accumulation):
            self.factors = {name: factor} if micro == min(at, accumulation - 1) else {}
            with torch.autocast("cpu", torch.float16) if self.autocast else nullcontext():
                yield self.loss(seeded(100 * step + micro), seldom=(step + micro) % 3 == 0) * (1.0 + step % 3)

    def loss(self, source, seldom):
        terms = []
        for name in ["point", "line", "matrix", "stack", "kernel"] + ["seldom"] * seldom:
            param = getattr(self, name)
            target = torch.randn(param.shape, generator=source).to(self.dtype)
            terms.append((param - target).square().sum().float())
        x = torch.randn(5, generator=source).to(self.dtype)
        terms.append((self.also_tied @ torch.tanh(self.tied @ x)).square().sum().float())
        return torch.stack(terms).sum()


class Ordinary:
    """PyTorch's loop. Weights have float32 shadows that are stepped in their place, because `GradScaler` rejects
    gradients in float16, and a rule updates a float32 copy of each tile.
    """

    def __init__(self, zoo, rule, loss_scale):
        self.zoo = zoo
        self.shadows = {name: torch.nn.Parameter(param.detach().float()) for name, param in zoo.named_parameters()}
        groups = [{**group, "params": [self.shadows[name] for name, _ in group["params"]]} for group in zoo.groups()]
        self.in_order = [param for group in groups for param in group["params"]]
        sgd, adamw = torch.optim.SGD, torch.optim.AdamW
        self.optimizer = sgd(groups, foreach=False) if rule == "lomo" else adamw(groups, foreach=False, **ADAMW)
        init, interval = (DYNAMIC.init_scale, 3) if loss_scale is DYNAMIC else (loss_scale or 1.0, 1 << 30)
        on = loss_scale is not None
        self.scaler = torch.amp.GradScaler("cpu", init, growth_interval=interval, enabled=on, backoff_factor=0.5)
        self.fixed = None if loss_scale is DYNAMIC else loss_scale

    def step(self, step, accumulation, whole, clip_norm=None, clip_value=None):
        """Skips the `whole` step after an overflow, or the parameters whose gradients are not finite. Returns names and
        norms of gradients, names of those that are not finite, and the clip coefficient."""
        for loss in self.zoo.losses(step, accumulation):
            self.scaler.scale(loss).backward()
            for name, param in self.zoo.named_parameters():
                if param.grad is not None:
                    before, grad = self.shadows[name].grad, param.grad.float()
                    self.shadows[name].grad, param.grad = grad if before is None else before + grad, None
        self.scaler.unscale_(self.optimizer)
        grads = {name: shadow.grad for name, shadow in self.shadows.items() if shadow.grad is not None}
        norms = {name: grad.double().norm().item() for name, grad in grads.items()}
        nonfinite = [name for name, grad in grads.items() if not grad.isfinite().all()]
        coef = None
        if clip_value is not None:
            clip_grad_value_(self.in_order, clip_value, foreach=False)
        if clip_norm is not None:
            norm = clip_grad_norm_(self.in_order, clip_norm)
            coef = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if whole and self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        else:
            for name in grads if whole and nonfinite else nonfinite:
                self.shadows[name].grad = None
            self.optimizer.step()
        if self.fixed is None:
            self.scaler.update()
        else:
            self.scaler.update(self.fixed)
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, param in self.zoo.named_parameters():
                self.shadows[name].copy_(param.copy_(self.shadows[name]))  # as it is stored
        return norms, nonfinite, coef


RULES = ("lomo", "adamw")
WITHOUT_NORM = [clip for clip in CLIPS if "clip_norm" not in clip]
CASES = pairwise(POLICIES[1:], CLIPS, SCALES, KINDS, RULES, (False, True))
CASES += pairwise(POLICIES[:1], WITHOUT_NORM, SCALES, KINDS, RULES, (False, True))
# a third-party class steps in the dtype of its weight
CASES += pairwise(POLICIES[1:], CLIPS, SCALES, ("float32", "autocast"), ("torch.optim.AdamW",), (False, True))


@pytest.mark.parametrize(("policy", "clip", "loss_scale", "kind", "rule", "overflows"), CASES, ids=str)
def test_steps_equal_torch(policy, clip, loss_scale, kind, rule, overflows):
    (policy, accumulation), whole = policy, policy[0] != "immediate"
    spoilt = OVERFLOWS if overflows else {}
    ordinary, zoo = Zoo(kind, spoilt), Zoo(kind, spoilt)
    theirs = Ordinary(ordinary, rule, loss_scale)
    options = {**clip, **(ADAMW if rule != "lomo" else {}), "rounding": "nearest", "max_nonfinite_steps": None}
    options["state_storage"] = "float32"  # as `torch.optim` has them in the reference
    opt = lowmem.FusedOptimizer(zoo.groups(), rule, policy=policy, loss_scale=loss_scale, **options)
    start, taken, clipped, nonfinite_gradients = weights(zoo), 0, 0, 0
    for step in range(STEPS):
        before, scale = weights(zoo), opt.loss_scale
        norms, nonfinite, coef = theirs.step(step, accumulation, whole, **clip)
        for n, loss in enumerate(zoo.losses(step, accumulation), start=1):
            with opt.accumulate() if n < accumulation else nullcontext():
                assert torch.equal(opt.backward(loss), loss.detach())
        assert all(map(equal, weights(zoo), weights(ordinary)))
        last, skipped = opt.last_step, bool(nonfinite) and whole
        assert not skipped or same(weights(zoo), before)
        assert (last.skipped, sorted(last.nonfinite)) == (skipped, sorted(nonfinite))
        assert last.skipped_params == (len(norms) if skipped else len(nonfinite))
        assert dict(zip(last.names, last.norms.tolist(), strict=True)) == pytest.approx(norms, rel=1e-6, nan_ok=True)
        if coef is not None and not nonfinite:
            assert torch.equal(last.clip_coef, coef)
            clipped += bool(coef < 1)
        assert last.loss_scale == scale
        assert opt.loss_scale == (None if loss_scale is None else theirs.scaler.get_scale())
        nonfinite_gradients, taken = nonfinite_gradients + len(nonfinite), taken + (not skipped)
        assert opt.named_state_dict()["step"] == taken
    assert opt.nonfinite_gradients == nonfinite_gradients
    assert "clip_norm" not in clip or clipped
    assert [torch.equal(*pair) for pair in zip(weights(zoo), start, strict=True)] == [False] * 6 + [True, False]
