"""Lion: steps of one size, and a plain transcription in torch."""

import pytest
import torch

import lowmem

SHAPES = [(), (1,), (7,), (5, 3), (5, 3), (2, 3, 4), (2, 2, 3, 3), (400, 400)]


class PlainLion(torch.optim.Optimizer):
    """Lion as an ordinary optimizer; every number is float32, as tensors' are."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr = group["lr"]
            beta1, gain1, beta2, gain2, keep, size = (
                torch.tensor(number)
                for number in (*(x for beta in group["betas"] for x in (beta, 1.0 - beta)), 1.0 - lr * group["wd"], lr)
            )
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    change = (mean * beta1 + param.grad * gain1).sign()
                    param.copy_(param * keep - change * size)
                    mean.copy_(mean * beta2 + param.grad * gain2)


@pytest.mark.parametrize(
    ("betas", "decay"), [((0.9, 0.99), 0.0), ((0.95, 0.98), 0.5), ((0.0, 0.0), 0.1), ((0.5, 0.9), 0.01)]
)
def test_equals_a_plain_transcription(give_gradients, betas, decay):
    start = [torch.randn(shape) for shape in SHAPES]
    params, theirs = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    opt = lowmem.FusedOptimizer(params, rule="lion", betas=betas, weight_decay=decay)
    plain = PlainLion(theirs, {"lr": 0.0, "betas": betas, "wd": decay})
    for step in range(10):
        opt.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.01 / (1 + step % 3)
        pairs = []
        for i, (param, their) in enumerate(zip(params, theirs, strict=True)):
            absent = i % 3 == 1 and step % 4 == 0
            their.grad = None if absent else torch.randn(their.shape)
            pairs += [] if absent else [(param, their.grad.clone())]
        give_gradients(opt, *pairs)
        plain.step()
    for i, (param, their) in enumerate(zip(params, theirs, strict=True)):
        assert torch.equal(param, their)
        assert torch.equal(opt.named_state_dict()["state"][f"param{i}"]["exp_avg"], plain.state[their]["exp_avg"])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_every_step_is_of_the_learning_rate(give_gradients, size):
    """Whatever the gradient's size; where there has been none at all, nothing moves."""
    param = torch.nn.Parameter(torch.zeros(50))
    opt = lowmem.FusedOptimizer([param], rule="lion")
    for lr in (2.0**-7, 2.0**-9):
        before, opt.param_groups[0]["lr"] = param.detach().clone(), lr
        grad = torch.randn(50) * size
        grad[:10] = 0.0
        give_gradients(opt, (param, grad))
        assert torch.equal((param - before).abs(), torch.tensor([0.0, lr]).repeat_interleave(torch.tensor([10, 40])))
