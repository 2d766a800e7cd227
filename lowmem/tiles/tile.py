"""Defines `Tile`, the argument of rule functions, sums over a tile, and writes results to it.

Shapes: a parameter is viewed as [B, R, C], and a tile of it is [b, r, c]. In traced code the rows of a tile are in
blocks, [b, n, m, c], or a single row is in parts, [b, n, 1, m] (`tiles/blocks.py`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.tiles.graph import fuse_with, materialize
from lowmem.tiles.rounding import mix, nearest, random_bits
from lowmem.tiles.storage import StoredTensor, Uniform

Named = dict[str, Tensor]

# Name of the gradient among the tensors of a tile. The others are named "param", or by the state.
GRAD = "the gradient"

# Kind (see `DIMS`) and name → a vector of a parameter, or its part for one tile.
Vectors = dict[tuple[str, str], Tensor]

# Kind of a vector of a parameter → its dimensions among [B, R, C]. A scalar may also have none.
DIMS = {
    "row": (0, 1), "row_max": (0, 1), "noise": (0, 1), "col": (0, 2), "scalar": (0,), "slice": (0,), "finite": (0,)
}  # fmt: skip


def extent(kind: str, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shape of a vector of this kind for a parameter [B, R, C] or a tile [b, r, c]; () for other kinds."""
    return tuple([shape[d] for d in DIMS.get(kind, ())])


@dataclass
class Sums:
    """The tensors [b, r, c] that a reduce function returns to be summed, or the sums that `Sweep.reduce` returns.

    row: name → sum of each row, [B, R].  col: name → sum of each column, [B, C].  scalar: name → sum of each slice,
    [B].  row_max: name → maximum of each row, [B, R].
    """

    row: Named = field(default_factory=dict)
    col: Named = field(default_factory=dict)
    scalar: Named = field(default_factory=dict)
    row_max: Named = field(default_factory=dict)

    @classmethod
    def of(cls, vectors: Vectors) -> "Sums":
        """Undoes `vectors`."""
        sums = cls()
        for (kind, name), value in vectors.items():
            getattr(sums, kind)[name] = value
        return sums

    @property
    def vectors(self) -> Vectors:
        """The tensors by kind and name."""
        return {(kind, name): value for kind, named in vars(self).items() for name, value in named.items()}


@dataclass(frozen=True)
class Reading:
    """The processing of a gradient as it is read, and the decisions of the step about it.

    inverse_scale: float32 scalar that multiplies the gradient first, or None.
    limit: float32 scalar >= 0 to which the gradient is then clamped (+-limit), or None.
    clip_coef: float32 scalar that then multiplies the gradient, or None.
    rule_clip_coef: clip coefficient that the rule applies itself, or None.
    finite: boolean, a scalar or [members]. False leaves everything unchanged. None: the sweep skips each parameter
    whose squared gradient norm is not finite in float32.
    square_sums: squared norms of the unscaled gradients, float64 [members], if they are already measured.
    """

    inverse_scale: Tensor | None = None
    limit: Tensor | None = None
    clip_coef: Tensor | None = None
    rule_clip_coef: Tensor | None = None
    finite: Tensor | None = None
    square_sums: Tensor | None = None

    @functools.cached_property
    def tensors(self) -> Vectors:
        """The tensors that are not None, as vectors of the kind "reading"."""
        return {("reading", name): value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """The properties that compiled code depends on."""
        return tuple((key, value.ndim) for key, value in self.tensors.items())


class RawTile(NamedTuple):
    """The stored tensors of one tile.

    tensors: the gradient, the weight and states by name, [b, r, c / group].  reading: see `Reading`.
    vectors, by kind and name: row [b, r, 1], col [b, 1, c], scalar [] or [b, 1, 1] (including the numbers of the rule),
    finite [b, 1, 1] (False leaves everything unchanged), noise int32 [b, r, 1] (an element's random bits depend on it
    and on the column in the tile). finite and noise are omitted if they are not needed.
    """

    tensors: Mapping[str, StoredTensor]
    reading: Reading
    vectors: Vectors


class Fields:
    """Tensors as attributes. Each is read when it is first used. kind: the kind of vectors, see `DIMS`."""

    def __init__(
        self, named: Mapping[Any, Any], kind: str | None = None, read: Callable[[Any], Tensor] = lambda tensor: tensor
    ) -> None:
        self._named, self._kind, self._read = named, kind, read

    def _key(self, name: str) -> Any:
        return name if self._kind is None else (self._kind, name)

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._named

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self:
            raise AttributeError(f"no tensor named {name!r} was passed to the sweep or returned by `scalars`")
        value = self.__dict__[name] = self._read(self._named[self._key(name)])
        return value

    def get(self, name: str) -> Tensor | None:
        """Returns the tensor with this name, or None if there is none."""
        return getattr(self, name) if name in self else None


class Tile:
    """The argument of a rule's function: tensors of one tile, all float32 and broadcastable to [b, r, c].

    grad: the gradient [b, r, c], unscaled, clamped by value, and multiplied by the clip coefficient.  param: the weight
    [b, r, c].  full [b, r, c], row [b, r, 1], col [b, 1, c]: arguments of the sweep.  scalar [] or [b, 1, 1]: arguments
    of the sweep and the numbers of the rule (`scalars`).
    """

    def __init__(self, raw: RawTile) -> None:
        self._raw, self.full = raw, Fields(raw.tensors, read=StoredTensor.decode)
        self.row, self.col, self.scalar = (Fields(raw.vectors, kind) for kind in ("row", "col", "scalar"))

    @functools.cached_property
    def unclipped(self) -> Tensor:
        """The gradient [b, r, c], unscaled but not clipped."""
        inverse_scale, grad = self._raw.reading.inverse_scale, self._raw.tensors[GRAD].decode()
        return grad if inverse_scale is None else grad * inverse_scale

    @functools.cached_property
    def grad(self) -> Tensor:
        """The gradient, unscaled and clipped."""
        limit, clip_coef = self._raw.reading.limit, self._raw.reading.clip_coef
        grad = self.unclipped if limit is None else self.unclipped.clamp(-limit, limit)
        return grad if clip_coef is None else grad * clip_coef

    @functools.cached_property
    def grad_square(self) -> Tensor:
        """The squared gradient, computed once for both the rule and the measurement."""
        return self.grad.square()

    @property
    def unclipped_square(self) -> Tensor:
        """The square of `unclipped`."""
        as_it_is = self._raw.reading.limit is None and self._raw.reading.clip_coef is None
        return self.grad_square if as_it_is else self.unclipped.square()

    @functools.cached_property
    def param(self) -> Tensor:
        """The weight."""
        return self._raw.tensors["param"].decode()

    def stored(self, value: Tensor, like: str = "param") -> Tensor:
        """Rounds a float32 tile to the dtype of the weight, or of the state `like` if the rule defines its dtype."""
        held = self._raw.tensors[like]
        return nearest(value, held.dtype if like == "param" or held.storage.is_cast else torch.float32)


ReduceFn = Callable[[Tile], Sums]
ApplyFn = Callable[[Tile], Named]

# Name of the scalar sum that is the squared norm of the gradient.
SQUARE = "square of the gradient"

# Kind of a sum → the dimensions of a tile [b, r, c] that are summed.
_SUMMED: dict[str, Any] = {"row": -1, "col": -2, "scalar": (-2, -1)}


def reduce_tile(fn: ReduceFn, measure: bool, raw: RawTile) -> Vectors:
    """Returns the tensors [b, r, c] to sum that `fn` returns, and if `measure`, also the squared gradient."""
    tile = Tile(raw)
    values = fn(tile)
    if measure:
        values = replace(values, scalar={**values.scalar, SQUARE: tile.unclipped_square})
    return values.vectors


def summed(values: Vectors) -> Vectors:
    """Returns the sums of a tile: row [b, r], col [b, c], scalar [b]."""
    return {
        (kind, name): value.amax(-1) if kind == "row_max" else value.sum(_SUMMED[kind])
        for (kind, name), value in values.items()
    }


def apply_tile(fn: ApplyFn, raw: RawTile) -> Vectors:
    """Writes the values [b, r, c] that a rule's function returns for a tile. There is nothing to sum."""
    drawing = [name for name, each in raw.tensors.items() if each.storage.draws]
    group = max(each.storage.group for each in raw.tensors.values())
    finite, words = raw.vectors.get(("finite", "")), list[Tensor]()

    def draw(name: str, cols: int, count: int) -> Tensor:
        """Returns random bits [b, r, c] for one tensor. Each element has one random word for all tensors."""
        if not words:
            noise = raw.vectors["noise", ""]
            words.append(mix(noise + materialize(torch.arange(cols, dtype=torch.int32, device=noise.device))))
        return random_bits(words[0], drawing.index(name), count)

    for name, value in fn(Tile(raw)).items():
        uniform = Uniform(functools.partial(draw, name, value.shape[-1]))
        storage, parts = raw.tensors[name]
        for part, target, new in zip(storage.parts, parts, storage.update(value, uniform, parts), strict=True):
            result = new if finite is None else torch.where(finite, new, target.to(new.dtype))
            if words and value.ndim == 4 and len(parts) > 1 and not part.name:
                result = fuse_with(result, words[0])  # like the other parts, to avoid a copy in compiled code
            if value.ndim == 4 and part.group < group:  # reshaped like the argument, to avoid a copy in compiled code
                target, result = (each.unflatten(-1, (-1, group // part.group)) for each in (target, result))
            target.copy_(result)
    return {}
