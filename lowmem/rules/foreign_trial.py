"""Inputs of the trial of an optimizer class, and its isolation from the rest of the process."""

import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

# Shapes of a trial's parameters, by number of dimensions.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [(), ()],
    1: [(96,), (160,)],
    2: [(64, 64), (32, 160)],
    3: [(4, 32, 40), (2, 8, 8)],
    4: [(16, 32, 3, 3), (8, 16, 1, 1)],
}
_LARGEST = 1 << 20  # maximum elements of a parameter whose actual shape is tried
_STEPS = 12
_GRAD_SCALES = (1e-3, 1.0, 1e3)

# For each step, the gradients of all parameters.
Grads = list[list[Tensor | None]]


def trial_shapes(params: Sequence[Tensor], sharded: bool) -> list[list[tuple[int, ...]]]:
    """Returns lists of shapes on which to try a class: small predefined shapes with the numbers of dimensions of
    `params`, and the shapes of the smallest and largest of `params`. (Low-bit optimizers store float32 states for small
    parameters.)
    """
    ndims = {2} if sharded or not params else {param.ndim for param in params}
    usual = [shape for ndim in sorted(ndims, reverse=True) for shape in _SHAPES.get(ndim, ())]
    tried = [param for param in params if 0 < param.numel() <= _LARGEST and not (param.is_meta or is_fake(param))]
    by_size = sorted(tried, key=torch.numel)
    ends = [{param.ndim: tuple(param.shape) for param in order} for order in (by_size, by_size[::-1])]
    own = [shape for end in ends for shape in end.values()]
    return [shapes for shapes in (usual, own) if shapes]


def trial_inputs(shapes: Sequence[tuple[int, ...]], omit_one: bool, device: torch.device) -> tuple[list[Tensor], Grads]:
    """Returns reproducible parameters, and their gradients for each step. omit_one: one gradient is missing."""
    source = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=source, device="cpu").mul_(scale).to(device)

    starts = [draw(shape) for shape in shapes]
    grads: Grads = [
        [draw(shape, _GRAD_SCALES[(step + n) % len(_GRAD_SCALES)]) for n, shape in enumerate(shapes)]
        for step in range(_STEPS)
    ]
    if omit_one:
        grads[_STEPS // 2][0] = None
    return starts, grads


class RecordedGroup(dict[str, Any]):
    """A parameter group that records which keys are read."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@contextmanager
def isolated() -> Iterator[None]:
    """Restores random states and warnings after a trial, and disables torch.compile, which torchao's step uses."""
    python_state, *numpy_state = random_states()
    eager = torch.compiler.set_stance("force_eager")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork_rng warns where several GPUs are visible
            with torch.random.fork_rng(), eager, _disable_current_modes():
                yield
    finally:
        random.setstate(python_state)
        for state in numpy_state:
            sys.modules["numpy"].random.set_state(state)


def random_states() -> list[Any]:
    """Returns the states of Python's random generator, and of NumPy's if it is imported."""
    states: list[Any] = [random.getstate()]
    if numpy := sys.modules.get("numpy"):
        name, key, *rest = numpy.random.get_state()
        states.append((name, key.tolist(), *rest))
    return states
