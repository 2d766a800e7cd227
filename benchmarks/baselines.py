"""Who takes a training step: this package, its peers, and the floor, which updates nothing."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowmem import rules
from lowmem.errors import ConfigError, did_you_mean
from lowmem.files import version
from lowmem.optimizer import FusedOptimizer

Loss = Callable[[], Tensor]

# Takes a step, given the losses of its micro-batches, each computed when it is called.
Step = Callable[[Sequence[Loss]], None]

FLOOR = "floor"
LR = 1e-4


@dataclass(frozen=True)
class Contender:
    """Who takes a step, and what that needs: a package to be installed, a GPU.

    `make` turns a model into its step. It goes to another process: a function of a module, or a `partial` of one.
    """

    make: Callable[[nn.Module], Step]
    kind: Literal["floor", "ours", "peer"] = "peer"
    package: str | None = None
    gpu: bool = False
    micro_batches: int = 1

    def missing(self) -> str | None:
        """What it needs and is not here, or None."""
        if self.package is not None and version(self.package) is None:
            return f"pip install {self.package}"
        if self.gpu and not torch.cuda.is_available():
            return "it needs a GPU"
        return None


def backward_alone(losses: Sequence[Loss]) -> None:
    """The step of those whose work is in hooks."""
    for loss in losses:
        loss().backward()


def drop_gradients(model: nn.Module) -> Step:
    """The floor: every gradient is dropped the moment it exists, and nothing is updated."""

    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    return backward_alone


def fused(model: nn.Module, **settings: Any) -> Step:
    """A `FusedOptimizer` with these settings."""
    opt = FusedOptimizer(model.named_parameters(), **{"lr": LR, **settings})

    def step(losses: Sequence[Loss]) -> None:
        for n, loss in enumerate(losses, start=1):

            def share(loss: Loss = loss) -> Tensor:
                return loss() / len(losses)

            with opt.accumulate() if n < len(losses) else nullcontext():
                opt.backward(share)

    return step


def ordinary(
    model: nn.Module, cls: Callable[..., torch.optim.Optimizer], clip_norm: float | None = None, **settings: Any
) -> Step:
    """Gradients accumulate in `.grad`, are clipped, and then applied."""
    optimizer = cls(model.parameters(), **{"lr": LR, **settings})

    def step(losses: Sequence[Loss]) -> None:
        for loss in losses:
            (loss() / len(losses)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hooked(model: nn.Module, cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Step:
    """One torch optimizer per parameter, which steps in its hook: PyTorch's tutorial, torchtune."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {p: cls([p], lr=LR, **settings) for p in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(update)
    return backward_alone


def lomo_optim(model: nn.Module, name: str) -> Step:
    """Lomo or AdaLomo of the package that LOMO's authors wrote."""
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.Tensor.cpu  # type: ignore[method-assign, assignment]  # it names the device
    optimizer = getattr(importlib.import_module("lomo_optim"), name)(model, lr=LR)

    def step(losses: Sequence[Loss]) -> None:
        (loss,) = losses
        optimizer.fused_backward(loss(), LR)

    return step


def optimi(model: nn.Module) -> Step:
    """AdamW with gradient release."""
    package = importlib.import_module("optimi")
    package.prepare_for_gradient_release(model, package.AdamW(model.parameters(), lr=LR, gradient_release=True))
    return backward_alone


def torchao(model: nn.Module) -> Step:
    """AdamW whose moments have 8 bits."""
    return ordinary(model, importlib.import_module("torchao.optim").AdamW8bit)


def flashoptim(model: nn.Module) -> Step:
    """AdamW with gradient release; its moments have 8 bits, bfloat16 weights have 8 more."""
    package = importlib.import_module("flashoptim")
    package.enable_gradient_release(model, package.FlashAdamW(model.parameters(), lr=LR))
    return backward_alone


PEERS = {
    "AdamW, fused": Contender(partial(ordinary, cls=torch.optim.AdamW, fused=True)),
    "AdamW, foreach": Contender(partial(ordinary, cls=torch.optim.AdamW, foreach=True)),
    "AdamW, fused, in hooks": Contender(partial(hooked, cls=torch.optim.AdamW, fused=True)),
    "torch Adafactor": Contender(partial(ordinary, cls=torch.optim.Adafactor)),
    "lomo_optim Lomo": Contender(partial(lomo_optim, name="Lomo"), package="lomo-optim"),
    "lomo_optim AdaLomo": Contender(partial(lomo_optim, name="AdaLomo"), package="lomo-optim"),
    "optimi AdamW": Contender(optimi, package="torch-optimi"),
    "torchao AdamW8bit": Contender(torchao, package="torchao"),
    "FlashOptim AdamW": Contender(flashoptim, package="flashoptim", gpu=True),
}


def chosen(more_rules: Sequence[str] = (), only: Sequence[str] = ()) -> dict[str, Contender]:
    """The floor, ours and the peers, by name.

    Args:
        more_rules: rules of ours beside the usual ones, as `FusedOptimizer` takes them by name.
        only: the names of those wanted; all where it is empty.

    Raises:
        ConfigError, UnsupportedError: there is no such rule, or it cannot run fused.
        ConfigError: there is no such contender.
    """
    for rule in more_rules:
        rules.resolve(rule)
    ours: dict[str, dict[str, Any]] = {
        "lowmem adalomo": {"rule": "adalomo"},
        "lowmem adalomo, stochastic": {"rule": "adalomo", "rounding": "stochastic"},
        "lowmem adamw": {"rule": "adamw"},
        **{f"lowmem {rule}": {"rule": rule} for rule in more_rules},
    }
    known = {
        FLOOR: Contender(drop_gradients, "floor"),
        **{name: Contender(partial(fused, **settings), "ours") for name, settings in ours.items()},
        **PEERS,
    }
    for name in only:
        if name not in known:
            raise ConfigError(
                f"contender {name!r} is unknown.{did_you_mean(name, known)} Known are {'; '.join(known)}; --rule adds "
                "another rule of lowmem."
            )
    return {name: known[name] for name in known if name in only or not only}
