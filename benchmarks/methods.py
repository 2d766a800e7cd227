"""Methods of a training step: lowmem, its peers, and the floor, which does not update any weights."""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lowmem import FusedOptimizer, quantize_, rules
from lowmem.errors import ConfigError, did_you_mean

Loss = Callable[[], Tensor]

# Runs a step. Each argument computes the loss of a micro-batch.
Step = Callable[[Sequence[Loss]], None]

FLOOR = "floor"
LR = 1e-4

# The pip names of peers, other than torch
PACKAGES = ("lomo-optim", "torch-optimi", "torchao")


def installed(package: str) -> bool:
    """Returns whether a package with this pip name is installed."""
    return any(importlib.metadata.distributions(name=package))


@dataclass(frozen=True)
class Method:
    """A method of training or updating weights.

    Attributes:
        make: creates the step. Must be picklable: a module-level function, or a `partial` of one.
        package: the pip name of a package that must be installed.
        micro_batches: number of micro-batches per step.
    """

    make: Callable[..., Any]
    kind: Literal["floor", "lowmem", "peer"] = "peer"
    package: str | None = None
    micro_batches: int = 1

    def missing(self) -> str | None:
        """Returns a requirement that this machine does not meet, or None."""
        if self.package is not None and not installed(self.package):
            return f"pip install {self.package}"
        return None


M = TypeVar("M")


def select(methods: Mapping[str, M], only: Iterable[str]) -> dict[str, M]:
    """Returns the methods in `only`, or all methods if it is empty.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in only:
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise ConfigError(f"method {name!r} is unknown.{hint} Choose from: {'; '.join(methods)}.")
    return {name: method for name, method in methods.items() if name in only or not only}


def runnable(methods: Mapping[str, Method]) -> tuple[list[str], dict[str, str]]:
    """Returns the methods that can run on this machine, and the missing requirements of the others.

    Raises:
        ConfigError: no method can run.
    """
    left_out = {name: why for name, method in methods.items() if (why := method.missing())}
    if len(left_out) == len(methods):
        needs = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"no method can run on this machine. Missing requirements: {needs}")
    return [name for name in methods if name not in left_out], left_out


# -- steps -------------------------------------------------------------------------------------------------------------


def _backward(losses: Sequence[Loss]) -> None:
    """Runs the backward passes of a step. Hooks update the weights."""
    for loss in losses:
        loss().backward()


def drop_gradients(model: nn.Module) -> Step:
    """Drops every gradient in a hook and updates nothing. No method can be faster."""

    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    return _backward


def fused(model: nn.Module, weight_format: str | None = None, **options: Any) -> Step:
    """Uses `FusedOptimizer`, by default with the rounding of its peers, or stochastic rounding of quantized weights."""
    if weight_format is not None:
        quantize_(model, weight_format)
        options["rounding"] = "stochastic"
    opt = FusedOptimizer(model.named_parameters(), model=model, **{"lr": LR, "rounding": "nearest", **options})

    def step(losses: Sequence[Loss]) -> None:
        for n, loss in enumerate(losses, start=1):
            with opt.accumulate() if n < len(losses) else nullcontext():
                opt.backward(lambda loss=loss: loss() / len(losses))  # type: ignore[misc]

    return step


def ordinary(
    model: nn.Module, cls: Callable[..., torch.optim.Optimizer], clip_norm: float | None = None, **options: Any
) -> Step:
    """Accumulates gradients in `.grad`, clips them, and calls the optimizer's `step`."""
    optimizer = cls(model.parameters(), **{"lr": LR, **options})

    def step(losses: Sequence[Loss]) -> None:
        for loss in losses:
            (loss() / len(losses)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hooked(model: nn.Module, cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Step:
    """Uses a torch optimizer per parameter, which steps in a hook, as in PyTorch's tutorial and torchtune."""
    optimizers: dict[Tensor, torch.optim.Optimizer] = {p: cls([p], lr=LR, **options) for p in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(update)
    return _backward


def import_lomo_optim() -> Any:
    """Imports lomo_optim. lomo-optim 0.1.1 (adalomo.py, line 87) calls `.cuda()` on its states in every step. Without a
    GPU, this method is replaced for the rest of the process and returns the tensor itself.
    """
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.Tensor.cpu  # type: ignore[method-assign, assignment]
    return importlib.import_module("lomo_optim")


def lomo_optim(model: nn.Module, name: str) -> Step:
    """Uses `Lomo` or `AdaLomo` from the LOMO authors' package."""
    optimizer = getattr(import_lomo_optim(), name)(model, lr=LR)

    def step(losses: Sequence[Loss]) -> None:
        (loss,) = losses
        optimizer.fused_backward(loss(), LR)

    return step


def optimi(model: nn.Module) -> Step:
    """Uses optimi's AdamW with gradient release."""
    package = importlib.import_module("optimi")
    package.prepare_for_gradient_release(model, package.AdamW(model.parameters(), lr=LR, gradient_release=True))
    return _backward


def torchao(model: nn.Module) -> Step:
    """Uses torchao's AdamW with 8-bit moments."""
    return ordinary(model, importlib.import_module("torchao.optim").AdamW8bit)


PEERS = {
    "AdamW, fused": Method(partial(ordinary, cls=torch.optim.AdamW, fused=True)),
    "AdamW, foreach": Method(partial(ordinary, cls=torch.optim.AdamW, foreach=True)),
    "AdamW, fused, in hooks": Method(partial(hooked, cls=torch.optim.AdamW, fused=True)),
    "torch Adafactor": Method(partial(ordinary, cls=torch.optim.Adafactor)),
    "lomo_optim Lomo": Method(partial(lomo_optim, name="Lomo"), package="lomo-optim"),
    "lomo_optim AdaLomo": Method(partial(lomo_optim, name="AdaLomo"), package="lomo-optim"),
    "optimi AdamW": Method(optimi, package="torch-optimi"),
    "torchao AdamW8bit": Method(torchao, package="torchao"),
}


def all_methods(more_rules: Sequence[str] = ()) -> dict[str, Method]:
    """Returns all methods by name. more_rules: rules of lowmem to measure in addition to `adalomo` and `adamw`.

    Raises:
        ConfigError, UnsupportedError: a rule is unknown, or cannot update parameters during backward.
    """
    for rule in more_rules:
        rules.resolve(rule)
    settings: dict[str, dict[str, Any]] = {
        "adalomo": {"rule": "adalomo"},
        "adalomo, stochastic": {"rule": "adalomo", "rounding": "stochastic"},
        "adalomo, int10": {"rule": "adalomo", "weight_format": "int10"},
        "adalomo, int12": {"rule": "adalomo", "weight_format": "int12"},
        **{rule: {"rule": rule, "state_storage": "float32"} for rule in ("adamw", *more_rules)},
    }
    return {
        FLOOR: Method(drop_gradients, "floor"),
        **{f"lowmem {name}": Method(partial(fused, **options), "lowmem") for name, options in settings.items()},
        **PEERS,
    }
