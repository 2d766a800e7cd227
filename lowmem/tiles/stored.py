"""Tiles of stored tensors, and the loop over tiles."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lowmem.tiles.layout import Layout, Place, cut
from lowmem.tiles.rounding import mix
from lowmem.tiles.storage import StoredTensor, Uniform, of_weight
from lowmem.tiles.sweep import Reading, Scalars, States, Tiles
from lowmem.tiles.tile import DIMS, GRAD, RawTile, Vectors, extent, summed

# Elements per tile. On a CPU the float32 temporaries of a tile should fit into the cache. On a GPU, larger tiles mean
# fewer launches. All passes that sum use the same tile size, because it affects the last bits of a sum.
CPU_TILE = 1 << 17
GPU_TILE = 1 << 22

NO_READING, NO_SCALARS = Reading(), Scalars.of({})


class RankGroup(Protocol):
    """The ranks that a parameter is sharded over."""

    def all_reduce(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        """Returns float32 tensors summed over the ranks, or their elementwise maximum, in one collective."""


@dataclass(eq=False)
class StoredTiles(Tiles):
    """Tiles that are views of the parameter, its gradient and its states.

    Attributes:
        layout: layout of the local shard of the parameter.
        weight: the local shard of the parameter, and the other tensors of its storage.
        grad: the local shard of the gradient, in any dtype.
        reading: how the gradient is processed when it is read.
        scalars: the numbers of the rule.
        members: number of stacked parameters.
        ranks: the ranks that the parameter is sharded over; None if it is not sharded.
        tile: elements per tile; None for the default.
    """

    layout: Layout
    weight: StoredTensor
    grad: Tensor
    reading: Reading = NO_READING
    scalars: Scalars = NO_SCALARS
    _: KW_ONLY
    members: int = 1
    keys: Tensor | None = None
    ranks: RankGroup | None = None
    tile: int | None = None

    def __post_init__(self) -> None:
        self.shape, self.device = self.layout.shape, self.weight.parts[0].device
        self._passes = 0

    @functools.cached_property
    def places(self) -> Sequence[Place]:
        """Positions of the tiles. Compiled code sets them."""
        places = self.layout.places(self.tile or (CPU_TILE if self.device.type == "cpu" else GPU_TILE))
        return _two_of_each_size(places) if is_fake(self.weight.parts[0]) else places

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:  # type: ignore[override]
        return {GRAD: StoredTensor(of_weight("nearest", self.grad.dtype), (self.grad,)), "param": self.weight}

    @functools.cached_property
    def _rectangles(self) -> Mapping[str, list[StoredTensor]]:
        """Views of the gradient and the weight, which all passes share."""
        return self._views(self.tensors)

    def _views(self, tensors: Mapping[str, StoredTensor]) -> Mapping[str, list[StoredTensor]]:
        """Returns views of each tensor, one per rectangle."""
        rectangles = self.layout.rectangles
        return {name: [each.map(rectangle.view) for rectangle in rectangles] for name, each in tensors.items()}

    def complete_grad(self) -> Tensor:
        return self.grad

    def run(self, body: Callable[[RawTile], Vectors], full: States, vectors: Vectors, *, writes: bool) -> Vectors:
        return self.total(lambda raw: summed(body(raw)), full, vectors)

    def total(self, body: Callable[[RawTile], Vectors], full: States, vectors: Vectors) -> Vectors:
        """Like `run`, for a `body` that sums over its tile. Every second pass runs backwards, to start with tiles that
        are in the cache.
        """
        total, views = Vectors(), {**self._rectangles, **self._views(full)}
        one_tile = len(self.places) == 1 and self.places[0].rect.size == self.shape
        order = self.places if self._passes % 2 == 0 else self.places[::-1]
        self._passes += 1
        for place in order:
            at = functools.partial(cut, place.inner)
            tensors = {name: each[place.rectangle].map(at) for name, each in views.items()}
            here = {key: self._part(key[0], value, place) for key, value in vectors.items()}
            sums = body(RawTile(tensors, self.reading, {**self.scalars.singles, **here}))
            if one_tile:
                total = sums
            else:
                self._add(total, place, sums)
        return total if self.ranks is None else over_ranks(self.ranks, total)

    def _add(self, total: Vectors, place: Place, part: Vectors) -> None:
        """Adds the sums of a tile, row [b, r], col [b, c], scalar [b], to the sums of the parameter."""
        for key, value in part.items():
            kind, largest = key[0], key[0] == "row_max"
            if key not in total:
                start = -torch.inf if largest else 0.0
                total[key] = torch.full(extent(kind, self.shape), start, dtype=torch.float32, device=self.device)
            here = total[key][tuple(place.rect[d] for d in DIMS[kind])]
            (torch.maximum if largest else torch.add)(here, value, out=here)

    def _part(self, kind: str, value: Tensor, place: Place) -> Tensor:
        """Returns the part of a parameter's vector for one tile, broadcastable to [b, r, c]."""
        if value.ndim == 0:
            return value
        rect = place.rect
        if rect.size != self.shape:
            value = value.view(extent(kind, self.shape))[tuple(rect[d] for d in DIMS[kind])]
        if kind == "noise":  # the columns of the tile are counted from here
            high, low = divmod(rect.cols.start + (1 << 31), 1 << 32)
            value = mix(value + high) if high else value
            value = value if low == 1 << 31 else value + (low - (1 << 31))
        return value.view([n if d in DIMS[kind] else 1 for d, n in enumerate(rect.size)])


def over_ranks(ranks: RankGroup, local: Vectors) -> Vectors:
    """Returns the sums over all ranks."""
    total = Vectors()
    for largest in (False, True):
        sums = {key: value for key, value in local.items() if (key[0] == "row_max") is largest}
        if sums:
            total |= zip(sums, ranks.all_reduce([*sums.values()], largest=largest), strict=True)
    return total


def begin_storage(layout: Layout, weight: StoredTensor) -> None:
    """Initializes the tensors that a storage adds to a parameter, before its first update. The weight is rounded to
    nearest, so that it changes as little as possible.
    """

    def begin_tile(raw: RawTile) -> Vectors:
        parts = raw.tensors["param"].parts
        value = parts[0].float()
        for target, new in zip(parts, weight.storage.encode(value, Uniform.half(value)), strict=True):
            target.copy_(new)
        return {}

    StoredTiles(layout, weight, weight.parts[0]).run(begin_tile, {}, {}, writes=True)


def _two_of_each_size(places: Sequence[Place]) -> list[Place]:
    """Returns the tiles that a dry run needs: two of each size, because the first tile also allocates the sums."""
    of_size: dict[tuple[int, ...], list[Place]] = {}
    for place in places:
        of_size.setdefault(place.rect.size, []).append(place)
    return [place for same in of_size.values() for place in same[:2]]


def flat(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view of the elements in memory order."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    """Divides `flat(tensor)` into tiles."""
    return flat(tensor).split(CPU_TILE if tensor.device.type == "cpu" else GPU_TILE)


def add(total: Tensor, grad: Tensor) -> None:
    """Adds a gradient to a sum with the same memory order and possibly a wider dtype.

    torch would copy the full gradient to the dtype of the sum, and take four times as long on a CPU.
    """
    if grad.dtype == total.dtype or grad.stride() != total.stride():
        total.add_(grad)
        return
    for into, part in zip(tiles(total), tiles(grad), strict=True):
        into.add_(part)


def separate(grad: Tensor) -> Tensor:
    """Returns the gradient, copied if it is a view of a larger tensor. FSDP2's gradients are views of a buffer for a
    whole module, which would stay in memory.
    """
    return grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad
