"""What is done with one tile: a rule's function of it, its sums, how its results are written; eager or compiled."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.tiles.graph import tied
from lowmem.tiles.norms import REDUCED
from lowmem.tiles.storage import Held, Random, Storage, mix, nearest, uniform

Named = dict[str, Tensor]

# Compiled code on a CPU sums columns over this many rows at a time, which the cache holds, and a single line in this
# many elements at a time. What is left over, and what is too small for such a grid, runs eagerly.
BLOCK_ROWS = 16
LINE = 1024

# What lies between the noise of two rounded tensors and the next two of the same update (2³² over the golden ratio,
# signed).
_NEXT_NOISE = -0x61C88647


@dataclass
class Sums:
    """What a reduce function wants summed, each a tile [b, r, c]; and the sums of the parameter's [B, R, C], as
    `Sweep.reduce` gives them.

    row: name → along each row, [B, R].  col: name → along each column, [B, C].  scalar: name → over both, [B].
    row_max: name → not a sum but the largest along each row, [B, R].
    """

    row: dict[str, Tensor] = field(default_factory=dict)
    col: dict[str, Tensor] = field(default_factory=dict)
    scalar: dict[str, Tensor] = field(default_factory=dict)
    row_max: dict[str, Tensor] = field(default_factory=dict)


Parts = tuple[Tensor, ...]


class Formats(NamedTuple):
    """The storage of the weight, and by name those of the states that a tile function reads and writes."""

    param: Storage
    full: tuple[tuple[str, Storage], ...]

    @classmethod
    def of(cls, param: Storage, full: Mapping[str, Held]) -> "Formats":
        return cls(param, tuple((name, held.storage) for name, held in full.items()))

    @property
    def drawing(self) -> list[str]:
        """Names of what draws a random number per element when it is encoded."""
        return [name for name, storage in (("param", self.param), *self.full) if storage.noise == "element"]


class RawTile(NamedTuple):
    """The stored tensors of one tile: the arguments of compiled code."""

    grad: Tensor
    param: Parts
    inverse_scale: Tensor | None
    limit: Tensor | None
    clip_coef: Tensor | None
    full: dict[str, Parts]
    row: Named
    col: Named
    scalar: Named


class Summing(NamedTuple):
    """How a tile is summed.

    measure: the gradient is measured on the way.  lines: sums over everything are left as one of each line, which
    compiled code sums side by side in vector registers.
    """

    measure: bool
    lines: bool


class Writing(NamedTuple):
    """What the results of a tile are written with, in addition to its `RawTile`.

    finite: [b], False where everything stays as it is; None: everything is written.  noise: int32 [b, r], which with
    the column of an element, counted from first_col, gives its random bits; None if nothing draws them.  shared: the
    number in [0, 1) that all elements of the step share; None if nothing draws it.
    """

    finite: Tensor | None
    noise: Tensor | None
    first_col: Tensor | None
    shared: Tensor | None


class Fields:
    """Tensors by name, as attributes."""

    def __init__(self, named: Named) -> None:
        self._named = named

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __getattr__(self, name: str) -> Tensor:
        return self._named[name]


class Tile:
    """One rectangle as a rule's function sees it: everything float32, everything broadcastable to [b, r, c] (where the
    sweep wants rows in blocks: [b, n, m, c]).

    grad: the gradient, unscaled, clamped by value, multiplied by the clip coefficient.  param: the weight.
    full, row, col, scalar: what the rule passes to the sweep.
    """

    def __init__(self, formats: Formats, raw: RawTile) -> None:
        self._formats, self._raw = formats, raw
        rows = raw.grad.shape[1:-1]
        self.full = Fields({name: storage.decode(raw.full[name]) for name, storage in formats.full})
        self.row = Fields({k: v.view(-1, *rows, 1) for k, v in raw.row.items()})
        self.col = Fields({k: v.view(-1, *(1 for _ in rows), v.shape[-1]) for k, v in raw.col.items()})
        self.scalar = Fields({k: v if v.ndim == 0 else self.by_slice(v) for k, v in raw.scalar.items()})
        self._cache: dict[str, Tensor] = {}

    def by_slice(self, value: Tensor) -> Tensor:
        """[b], broadcastable to the tile."""
        return value.view(-1, *(1 for _ in self._raw.grad.shape[1:]))

    def _once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

    @property
    def unclipped(self) -> Tensor:
        """The gradient unscaled, not yet clipped in any way."""
        inverse_scale, grad = self._raw.inverse_scale, self._raw.grad
        return self._once("unclipped", lambda: grad.float() if inverse_scale is None else grad.float() * inverse_scale)

    @property
    def grad(self) -> Tensor:
        """The gradient, unscaled and clipped."""
        limit, clip_coef = self._raw.limit, self._raw.clip_coef

        def clipped() -> Tensor:
            grad = self.unclipped if limit is None else self.unclipped.clamp(-limit, limit)
            return grad if clip_coef is None else grad * clip_coef

        return self._once("grad", clipped)

    @property
    def grad_square(self) -> Tensor:
        """The gradient squared, computed once for the rule and the measurement."""
        return self._once("grad_square", self.grad.square)

    @property
    def unclipped_square(self) -> Tensor:
        """`unclipped` squared."""
        as_it_is = self._raw.limit is None and self._raw.clip_coef is None
        return self.grad_square if as_it_is else self.unclipped.square()

    @property
    def param(self) -> Tensor:
        """The weight."""
        return self._once("param", lambda: self._formats.param.decode(self._raw.param))

    def stored(self, value: Tensor, like: str = "param") -> Tensor:
        """A float32 tile rounded to the dtype of the weight, or of a full state: arithmetic in that dtype."""
        return nearest(value, (self._raw.param if like == "param" else self._raw.full[like])[0].dtype)


ReduceFn = Callable[[Tile], Sums]
ApplyFn = Callable[[Tile], Named]
TileBody = Callable[..., Any]


# Among the sums over everything, those that measure the gradient.
SQUARE, REDUCED_SQUARE = "square of the gradient", "square of the gradient times a small number"


def reduce_tile(fn: ReduceFn, formats: Formats, summing: Summing, raw: RawTile) -> tuple[Named, Named, Named, Named]:
    tile = Tile(formats, raw)
    measured, measure, lines = {}, *summing
    in_blocks = raw.grad.ndim == 4

    def along(value: Tensor) -> Tensor:
        """`value`, to be summed along rows in the same loop as all other values of the tile."""
        return tied(value, raw.grad[..., :1, :1]) if in_blocks else value

    if measure:  # in place and first, so that no more temporaries of the tile exist at a time
        measured[REDUCED_SQUARE] = _total(along((tile.unclipped * REDUCED).square_()), lines)
    sums = fn(tile)
    totals = {**sums.scalar, SQUARE: tile.unclipped_square} if measure else sums.scalar
    row = {name: along(value).sum(-1) for name, value in sums.row.items()}
    col = sums.col
    if in_blocks and row and col:  # column sums follow in the same loop over blocks: the block is still in the cache
        of_block = next(iter(row.values())).sum(-1)[..., None, None]
        col = {name: tied(value, of_block) for name, value in col.items()}
    return (
        {name: value.flatten(1) for name, value in row.items()},
        {name: value.sum(-2) for name, value in col.items()},
        {name: _total(along(value), lines) for name, value in totals.items()} | measured,
        {name: along(value).amax(-1).flatten(1) for name, value in sums.row_max.items()},
    )


def _total(value: Tensor, lines: bool) -> Tensor:
    """Sum over everything but the batch; or of each line, [b, lines]."""
    if not lines:
        return value.sum((-2, -1))
    if value.ndim == 3:
        value = value.unflatten(-1, (-1, LINE))
    return value.sum(-1).flatten(1)


def apply_tile(fn: ApplyFn, formats: Formats, writing: Writing, raw: RawTile) -> None:
    tile = Tile(formats, raw)
    finite = None if writing.finite is None else tile.by_slice(writing.finite)
    storages, drawing = {"param": formats.param, **dict(formats.full)}, formats.drawing
    bits: dict[int, Tensor] = {}

    def draw(name: str, cols: int) -> Tensor:
        """Random numbers for what is encoded under this name: two tensors share the random bits of an element."""
        word, half = divmod(drawing.index(name), 2)
        if word not in bits:
            assert writing.noise is not None and writing.first_col is not None
            col = torch.arange(cols, dtype=torch.int32, device=writing.noise.device) + writing.first_col
            bits[word] = mix(writing.noise.unsqueeze(-1) + word * _NEXT_NOISE + col)
        return uniform(bits[word], half)

    for name, value in fn(tile).items():
        random = Random(functools.partial(draw, name, value.shape[-1]), writing.shared)
        encoded = storages[name].encode(value, random)
        for target, new in zip(raw.param if name == "param" else raw.full[name], encoded, strict=True):
            target.copy_(new if finite is None else torch.where(finite, new, target))
