"""The sweep: passes over a parameter, its gradient and its states, tile by tile, in float32.

A rule passes module-level functions of one `Tile` to `Sweep.reduce` and `Sweep.apply`. The sweep hides from rules the
tile size, the device, the storage, compilation, stacks of small parameters, and sharding.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from lowmem.tiles.rounding import mix, nearest
from lowmem.tiles.storage import FLOAT32, StoredTensor
from lowmem.tiles.tile import (
    SQUARE,
    ApplyFn,
    Fields,
    RawTile,
    Reading,
    ReduceFn,
    Sums,
    Tile,
    Vectors,
    apply_tile,
    reduce_tile,
)
from lowmem.tiles.transfers import to_device

__all__ = ["Reading", "Scalars", "Sweep", "TileInputs", "Tiles", "Vectors"]

States = Mapping[str, StoredTensor]


class TileInputs(TypedDict, total=False):
    """The tensors that tile functions read by name in addition to the gradient and the weight.

    full: full-size states.  row: one value per row, [B, R].  col: one per column, [B, C].  scalar: a scalar, or [B].
    """

    full: States | None
    row: Mapping[str, Tensor] | None
    col: Mapping[str, Tensor] | None
    scalar: Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Scalars:
    """The numbers that a rule computes once per group and step, on a parameter's device."""

    names: tuple[str, ...]
    single: Tensor  # float32 [n]
    double: Tensor  # float64 [n]

    @classmethod
    def of(cls, numbers: Mapping[str, float], device: torch.device | str = "cpu") -> "Scalars":
        """Copies numbers to a device without synchronizing with it."""
        double = to_device([*numbers.values()], torch.float64, torch.device(device))
        return cls(tuple(numbers), double.float(), double)

    @functools.cached_property
    def singles(self) -> Vectors:
        """The numbers as float32 vectors of the kind "scalar"."""
        pairs = zip(self.names, self.single.unbind(), strict=True) if self.names else ()
        return {("scalar", name): number for name, number in pairs}

    @functools.cached_property
    def doubles(self) -> Mapping[str, Tensor]:
        """The numbers as float64 scalars."""
        return dict(zip(self.names, self.double.unbind(), strict=True))


class Tiles(ABC):
    """A parameter, its gradient and its states, cut into tiles.

    Attributes:
        shape: shape of the parameter, [B, R, C].
        members: number of parameters stacked in the batch.
        device: the device of all tensors.
        tensors: the gradient and the weight ("param") by name.
        reading: how the gradient is processed when it is read.
        scalars: the numbers of the rule.
        keys: seed of each member's random bits, int32 [members, 1], a scalar for one member, or None if not needed.
    """

    shape: tuple[int, int, int]
    members: int
    device: torch.device
    tensors: Mapping[str, StoredTensor]
    keys: Tensor | None
    reading: Reading
    scalars: Scalars

    @abstractmethod
    def run(self, body: Callable[[RawTile], Vectors], full: States, vectors: Vectors, *, writes: bool) -> Vectors:
        """Calls `body` with every tile of this process. Returns the sums of its results over all tiles and ranks: row
        [B, R], col [B, C], scalar [B].

        Args:
            full: full-size states, by the names that `body` uses.
            vectors: row [B, R], col [B, C], and scalar [] or [B].
            writes: whether `body` writes to its tile, and returns nothing to sum.
        """

    @abstractmethod
    def complete_grad(self) -> Tensor:
        """Returns the gradient as one tensor with the weight's shape."""


def _split(given: TileInputs) -> tuple[States, Vectors]:
    """Splits arguments into full-size states and vectors (rows, columns and scalars)."""
    named = {"row": given.get("row"), "col": given.get("col"), "scalar": given.get("scalar")}
    vectors = {(kind, name): value for kind, values in named.items() for name, value in (values or {}).items()}
    return given.get("full") or {}, vectors


class Sweep:
    """The interface through which `UpdateRule.update` reads and writes a parameter.

    Attributes:
        shape: shape of the parameter, or of a stack of parameters, [B, R, C].
        scalar: the numbers that the rule's `scalars` returned, as float32 scalars.  double: the same in float64.
        rule_clip_coef: see `Reading`.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._tiles, self._weight = tiles, tiles.tensors["param"]
        self.shape, self.device = tiles.shape, tiles.device
        self.scalar = Fields(tiles.scalars.singles, "scalar")
        self.rule_clip_coef = tiles.reading.rule_clip_coef
        self._guarded = True  # whether writes depend on `finite`
        self._finite = None if tiles.reading.finite is None else tiles.reading.finite.expand(tiles.members)
        self._square_sums = tiles.reading.square_sums  # known after the first reduce

    @functools.cached_property
    def double(self) -> Fields:
        return Fields(self._tiles.scalars.doubles)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored weight."""
        return self._weight.dtype

    @property
    def count(self) -> int:
        """Number of elements in each batch slice."""
        return self.shape[1] * self.shape[2]

    @property
    def square_sums(self) -> Tensor:
        """Squared norm of each parameter's unscaled, unclipped gradient over all shards, float64 [members]. It is
        summed in float32. Reading this property measures the gradient.
        """
        self._measure()
        assert self._square_sums is not None
        return self._square_sums

    def _measure(self) -> None:
        """Measures the gradient with a separate pass over the tiles, unless it is measured already."""
        if self._square_sums is None:
            self.reduce(_nothing)

    @property
    def finite(self) -> Tensor | None:
        """True where the squared norm of a gradient is finite: boolean [members], on the device. If neither the step
        nor an earlier pass has determined this, the gradient is measured.

        `apply` and `store` leave a parameter unchanged where it is False. None means that everything is written.
        """
        if self._finite is None and self._guarded:
            self._finite = self.square_sums.isfinite()
        return self._finite

    def allow_nonfinite(self) -> None:
        """Makes later writes unconditional, for rules that handle non-finite gradients themselves."""
        self._guarded = False

    def reduce(self, fn: ReduceFn, **given: Unpack[TileInputs]) -> Sums:
        """Returns the sums that `fn` requests: rows [B, R], columns [B, C], scalars [B], all float32.

        The first reduce of a sweep also measures the gradient. If a rule writes first, or does not reduce, measuring
        takes a separate pass, unless the gradient was measured before the sweep.
        """
        measure = self._square_sums is None
        body = functools.partial(reduce_tile, fn, measure)
        sums = Sums.of(self._tiles.run(body, *_split(given), writes=False))
        if measure:
            self._square_sums = sums.scalar.pop(SQUARE).view(self._tiles.members, -1).sum(-1).double()
        return sums

    def apply(self, fn: ApplyFn, **given: Unpack[TileInputs]) -> None:
        """Writes the values that `fn` returns for each tile: `param`, and states by their names in `full`."""
        full, vectors = _split(given)
        tiles, (batch, rows, _) = self._tiles, self.shape
        self._measure()  # before the writing pass, which must be the last in a trace
        if (finite := self.finite) is not None:  # one value per batch slice
            vectors["finite", ""] = finite.view(-1, 1).expand(tiles.members, batch // tiles.members).reshape(batch)
        if any(each.storage.draws for each in (self._weight, *full.values())):  # int32 arithmetic may wrap
            line = torch.arange(batch * rows // tiles.members, dtype=torch.int32, device=self.device)
            assert tiles.keys is not None
            vectors["noise", ""] = mix(line + tiles.keys)
        tiles.run(functools.partial(apply_tile, fn), full, vectors, writes=True)

    def store(self, state: Tensor, value: Tensor) -> Tensor:
        """Writes a small state (row, column or slice), and returns the new value in the state's dtype and shape."""
        new, finite = value.view_as(state), self.finite
        if finite is not None and self._tiles.members == 1:
            new = torch.where(finite.view(()), new, state)
        elif finite is not None:
            members = (self._tiles.members, -1)
            new = torch.where(finite[:, None], new.view(members), state.view(members)).view_as(state)
        state.copy_(new)
        return new

    def stored(self, value: Tensor) -> Tensor:
        """Like `Tile.stored`, for small tensors."""
        return nearest(value, self.dtype)

    @contextmanager
    def materialized(self) -> Iterator[Tensor]:
        """Yields the local shard as one leaf tensor with `.grad`, for optimizers that are not written with reduce
        and apply.

        The tensor is the parameter itself if its storage is a plain cast (float32, or nearest rounding). Otherwise it
        is a float32 copy, which is written back tile by tile. The gradient is unscaled and clipped in place.
        """
        weight, grad = self._weight, self._tiles.complete_grad()
        self._measure()  # before the gradient is modified
        self.allow_nonfinite()
        reading = self._tiles.reading
        if reading.inverse_scale is not None:
            grad.mul_(reading.inverse_scale)
        if reading.limit is not None:
            grad.clamp_(-reading.limit, reading.limit)
        if reading.clip_coef is not None:
            grad.mul_(reading.clip_coef)
        is_cast = weight.storage.is_cast
        param = weight.parts[0].detach() if is_cast else weight.decode()
        param.requires_grad_()
        param.grad = grad.to(param.dtype)
        yield param
        if not is_cast:
            self.apply(_replaced, full={"value": StoredTensor(FLOAT32, (param.detach(),))})


def _nothing(t: Tile) -> Sums:
    return Sums()


def _replaced(t: Tile) -> dict[str, Tensor]:
    return {"param": t.full.value}
