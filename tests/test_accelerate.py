"""Loops that use Accelerate run unchanged with the weights that torch's optimizers give, or raise an error."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.nets import same, weights
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import lowmem
from lowmem.errors import StepError, UnsupportedError

ROWS = [{"x": torch.tensor([n / 10, 1 - n / 9, 0.3]), "y": torch.tensor([0.1 * n, -0.2])} for n in range(28)]


@pytest.fixture(autouse=True)
def fresh_state():
    """Resets Accelerate's state, which is global."""
    yield
    reset()


def reset():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def fused(**options):
    return lambda net: lowmem.FusedOptimizer(
        net.named_parameters(), model=net, rule="adamw", lr=1e-2, weight_decay=1e-2, **options
    )


def ordinary(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def loss_of(net, batch):
    return (net(batch["x"]) - batch["y"]).square().mean()


class Loop:
    """A training loop as in Accelerate's documentation."""

    def __init__(self, make, steps=3, precision="no", scaler=None):
        reset()
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True, mixed_precision=precision)
        self.accelerator.scaler = scaler
        self.net = make_net()
        self.opt = make(self.net)
        scheduler = LambdaLR(self.opt, lambda step: 0.9**step)
        self.model, self.prepared, self.scheduler, self.loader = self.accelerator.prepare(
            self.net, self.opt, scheduler, DataLoader(ROWS, batch_size=4)
        )

    def train(self, epochs=2, clip=None):
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss_of(self.model, batch))
                    if clip is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.prepared.step()
                    self.scheduler.step()
                    self.prepared.zero_grad()
        return weights(self.net)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])  # 7 batches: windows of 3, 3 and 1
def test_an_unchanged_loop(steps, precision):
    assert same(Loop(fused(), steps, precision).train(), Loop(ordinary, steps, precision).train())


@pytest.mark.parametrize("policy", ["auto", "deferred"])
def test_clipping(policy):
    want = Loop(ordinary).train(clip=0.1)
    assert same(Loop(fused(clip_norm=0.1, policy=policy)).train(), want)
    assert not same(want, Loop(ordinary).train())
    with pytest.raises(StepError, match=r"clip_grad_norm_\(\): parameter '0\.weight' has no gradient.*clip_norm=0\.1"):
        Loop(fused()).train(clip=0.1)


REFUSED = {  # options of the optimizer and of the loop
    # on a CPU, clipping takes two passes without accumulation
    "a plain backward of two passes": (
        {"clip_norm": 0.1},
        {"steps": 1},
        r"opt\.backward\(loss\), or use policy='deferred'",
    ),
    "accumulation": ({"policy": "immediate"}, {}, "policy 'immediate' cannot accumulate gradients"),
    # Accelerate creates a GradScaler for fp16 only on a GPU, so the test sets one
    "the scaler of fp16": (
        {},
        {"scaler": torch.amp.GradScaler("cpu")},
        r'GradScaler has scaled the loss.*loss_scale="dynamic"',
    ),
}


@pytest.mark.parametrize(("options", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_rejected_calls_change_no_weight(options, settings, message):
    loop = Loop(fused(**options), **settings)
    with pytest.raises((StepError, UnsupportedError), match=message):
        loop.train()
    assert same(weights(loop.net), weights(make_net()))


def test_the_loss_scale_of_fp16():
    """The loop calls the backward of the unprepared optimizer, which scales the loss instead of Accelerate."""
    loop = Loop(fused(loss_scale=8.0), scaler=torch.amp.GradScaler("cpu", enabled=False))
    for batch in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.opt.backward(loss_of(loop.model, batch) / loop.accelerator.gradient_accumulation_steps)
            loop.prepared.step()
            loop.scheduler.step()
            loop.prepared.zero_grad()
    assert loop.opt.last_step.step == 3
    assert same(weights(loop.net), Loop(ordinary).train(epochs=1))


def test_an_optimizer_that_is_not_prepared():
    """The loop asks Accelerate whether a step is due."""
    net = make_net()
    accelerator, opt = Accelerator(gradient_accumulation_steps=2, cpu=True), fused()(net)
    for row in ROWS[:2]:
        with accelerator.accumulate():
            accelerator.backward(loss_of(net, row))
    with pytest.raises(StepError, match=r"2 backwards came before this step\(\)"):
        opt.step()


@pytest.mark.troubleshooting("cannot save in the middle of step")
def test_saving_between_micro_batches_raises(tmp_path):
    loop = Loop(fused())
    with loop.accelerator.accumulate(loop.model):
        loop.accelerator.backward(loss_of(loop.model, ROWS[0]))
    with pytest.raises(
        StepError, match=r"cannot save in the middle of step .* 1 micro-batch\(es\) have been accumulated"
    ):
        loop.accelerator.save_state(str(tmp_path))
