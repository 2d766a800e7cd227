"""Tiles of fake tensors, over which an update is traced for the compiler."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.errors import UnsupportedError
from lowmem.tiles.blocks import Form
from lowmem.tiles.graph import Size, Sizes, realized
from lowmem.tiles.storage import Held, Storage
from lowmem.tiles.stored import NO_SCALARS
from lowmem.tiles.sweep import Scalars, States, Tiles
from lowmem.tiles.tile import DIMS, RawTile, Reading, Sums, Vectors, extent

# Sizes for which Inductor plans: how loops are divided among threads, or a GPU's blocks, and which sums are so long
# that they are taken in parts (from 4,096 on). Those of a large parameter: a tile [b, n, m, c], and [B, R, C].
TILE = 8, 1024, 16, 4096
PARAMETER = 8, 4096, 4096

# The name of the gradient among the tensors of a tile, which are otherwise those of "param" and of states.
GRAD = "the gradient"

# Arguments of compiled code, by kind and name. Vectors, small states and sums have the kinds of `DIMS`. The others are
# tensors of the "reading", the "numbers" of the rule ("single", "double"), the "key" of the noise, the "size" of the
# parameter. The tensors of a tile have a name and the number of a part.
Arguments = dict[tuple[str, Any], Any]

# Key and dtype of each argument, and its dimensions after those of its kind; None for a scalar.
Signature = tuple[tuple[tuple[str, Any], torch.dtype, tuple[int, ...] | None], ...]


def signature(args: Mapping[tuple[str, Any], Tensor]) -> Signature:
    """Everything about arguments that does not depend on the size of the parameter."""
    found = []
    for key, value in args.items():
        tail = value.shape[len(DIMS.get(key[0], ())) :]
        found.append((key, value.dtype, tuple(tail) if value.ndim else None))
    return tuple(found)


@dataclass(frozen=True)
class Kind:
    """Everything that compiled code depends on, except for a rule and its spec. No size is part of it.

    storages: of the gradient, of the weight and of the states of the parameter's size, by name.  group: elements of a
    row that some of them encode together.  args: the other arguments.  batched: the parameter has several slices.
    numbers: names of the rule's scalars.  form: of the tile; None for code before a pass.
    """

    storages: tuple[tuple[str, Storage], ...]
    group: int
    args: Signature
    device: torch.device
    batched: bool
    numbers: tuple[str, ...]
    form: Form | None

    @property
    def small(self) -> list[tuple[str, str]]:
        """The kind and name of the states that do not have the size of the parameter."""
        return [key for key, *_ in self.args if key[0] in ("row", "col", "slice")]

    def example(self, sizes: Sizes) -> Arguments:
        """Fake arguments: tensors of a tile are [b, n, m, c], or in groups of elements [b, n, m, c / group, group]."""
        example: Arguments = {}
        shape: tuple[Size, ...]
        if self.form is None:
            shape = (sizes.size(PARAMETER[0]) if self.batched else 1), *map(sizes.size, PARAMETER[1:])
            example |= {("size", n): size for n, size in enumerate(shape)}
        else:
            batched, lines = self.form
            batch, count, height, cols = map(sizes.size, TILE)
            tile = (batch if batched else 1), count, (1 if lines else height), cols
            for name, storage in self.storages:
                for n, part in enumerate(storage.parts):
                    grouped = tile if self.group == 1 else (*tile, self.group // part.group)
                    example[name, n] = sizes.tensor(grouped, part.dtype, self.device)
            shape = _shape_of(example[GRAD, 0], lines)
        for key, dtype, tail in self.args:
            example[key] = sizes.tensor(() if tail is None else (*extent(key[0], shape), *tail), dtype, self.device)
        return example


class Pass(NamedTuple):
    """A pass over the tiles that a traced update has reached.

    body: its function.  kind: of a tile and of the vectors that the function reads, without the form.
    full: the states that it reads, by its own names.  vectors: of the parameter.  writes: it writes, so it is the last.
    """

    body: Callable[[RawTile], Sums | None]
    kind: Kind
    full: dict[str, str]
    vectors: Vectors
    writes: bool


class EndOfTrace(BaseException):
    """Ends the trace of an update at a pass that sums. It is not an `Exception`, which the rule might catch."""


class Traced(Tiles):
    """The tiles of an update that is traced.

    Args:
        kind, args: of the code; fake arguments.

    Attributes:
        full: states of the parameter's size, by name.
        reached: the pass at which the trace ends, or the one that writes; None if passes are traced with the update.
    """

    full: dict[str, Held]
    reached: Pass | None = None

    def __init__(self, kind: Kind, args: Arguments) -> None:
        self.kind, self.members, self.device = kind, 1, kind.device
        tensors = {name: value for (each, name), value in args.items() if each == "reading"}
        self.reading = Reading(**tensors)
        self.scalars = NO_SCALARS  # of the code of a single pass, in which the numbers are among the vectors
        if ("numbers", "single") in args:
            self.scalars = Scalars(kind.numbers, args["numbers", "single"], args["numbers", "double"])
        self._key: Tensor | None = args.get(("key", ""))

    def complete_grad(self) -> Tensor:
        raise UnsupportedError("the rule steps on the parameter as one tensor")

    def noise_keys(self) -> Tensor:
        assert self._key is not None
        return self._key

    def _shaped(self, vectors: Vectors) -> Vectors:
        """Vectors as row [B, R], col [B, C] and scalar [B], or []."""
        shapes = {key: extent(key[0], self.shape) for key, value in vectors.items() if value.ndim}
        return {key: value.reshape(shapes[key]) if key in shapes else value for key, value in vectors.items()}


class TracedTile(Traced):
    """One tile in blocks, [b, n, m, c], or of which each slice is a single line in parts, [b, n, 1, m]."""

    def __init__(self, kind: Kind, args: Arguments) -> None:
        super().__init__(kind, args)
        assert kind.form is not None
        _, self._lines = kind.form
        self.full = {
            name: Held(storage, tuple(args[name, n].flatten(3) for n, _ in enumerate(storage.parts)))
            for name, storage in kind.storages
        }
        self.weight, (self._grad,) = self.full.pop("param"), self.full.pop(GRAD).parts
        self.shape = _shape_of(self._grad, self._lines)

    def reduce(self, body: Callable[[RawTile], Sums], full: States, vectors: Vectors) -> Sums:
        return self.run(body, full, self._realized(vectors))

    def each(self, body: Callable[[RawTile], Sums | None], full: States, vectors: Vectors) -> None:
        self.run(body, full, self._realized(vectors))

    def run(self, body: Callable[[RawTile], Sums | None], full: States, vectors: Vectors) -> Sums:
        """Calls `body` with the tile. vectors: row [b, r], col [b, c], and scalar [b] or []."""
        here = {key: self._broadcast(key[0], value) for key, value in vectors.items()}
        sums = body(self._raw(self._grad, self.weight, dict(full), here)) or Sums()
        return Sums.of((kind, name, self._finished(kind, value)) for kind, name, value in sums.items())

    def _realized(self, vectors: Vectors) -> Vectors:
        return {key: realized(value) if value.ndim else value for key, value in self._shaped(vectors).items()}

    def _broadcast(self, kind: str, value: Tensor) -> Tensor:
        """A vector, broadcastable to [b, n, m, c]."""
        if value.ndim == 0:
            return value
        batch, count, height, width = self._grad.shape
        if kind == "col":
            return value.view((batch, count, 1, width) if self._lines else (batch, 1, 1, width))
        value = value.view((batch, 1, 1, 1) if self._lines or DIMS[kind] == (0,) else (batch, count, height, 1))
        if kind == "noise" and self._lines:  # the noise of a column is counted from the start of its line
            parts = realized(torch.arange(count, dtype=torch.int32, device=self.device) * width)
            value = value + parts.view(1, -1, 1, 1)
        return value

    def _finished(self, kind: str, value: Tensor) -> Tensor:
        """The sum of the tile from the sums of its blocks and lines: [b, r], [b, c] or [b]."""
        if kind == "scalar":
            return value.sum(-1)
        if kind == "col":
            return value.flatten(1) if self._lines else value.sum(-2)
        if self._lines:
            return value.sum(-1, keepdim=True) if kind == "row" else value.amax(-1, keepdim=True)
        return value


class TracedBetween(Traced):
    """Stands for all tiles of a parameter while an update is traced up to a pass.

    Args:
        sums: kinds and names of the sums of earlier passes, which are arguments. The next pass that sums ends the
            trace by raising `EndOfTrace`. A writing pass does not end the trace, but must be the last.
    """

    def __init__(self, kind: Kind, args: Arguments, sums: Sequence[Sequence[tuple[str, str]]]) -> None:
        super().__init__(kind, args)
        self.shape = args["size", 0], args["size", 1], args["size", 2]
        done = [Sums.of((each, name, args[each, (n, name)]) for each, name in keys) for n, keys in enumerate(sums)]
        self._sums = iter(done)
        self.full = {name: Held(storage, ()) for name, storage in kind.storages if name != GRAD}
        self.weight = self.full.pop("param")

    def reduce(self, body: Callable[[RawTile], Sums], full: States, vectors: Vectors) -> Sums:
        sums = next(self._sums, None)
        if sums is None:
            self._reach(body, full, vectors, writes=False)
            raise EndOfTrace
        return sums

    def each(self, body: Callable[[RawTile], Sums | None], full: States, vectors: Vectors) -> None:
        self._reach(body, full, vectors, writes=True)

    def _reach(self, body: Callable[[RawTile], Sums | None], full: States, vectors: Vectors, writes: bool) -> None:
        if self.reached is not None:
            raise UnsupportedError("the rule has another pass after the one that writes")
        names, storages = {id(held): name for name, held in self.full.items()}, dict(self.kind.storages)
        states, vectors = {name: names[id(held)] for name, held in full.items()}, self._shaped(vectors)
        read = {GRAD: GRAD, "param": "param", **states}
        reading = {key: value for key, value in self.reading.tensors.items() if not value.ndim}
        args = signature({**reading, **self.scalars.singles, **vectors})
        kind = replace(self.kind, storages=tuple((name, storages[read[name]]) for name in read), args=args)
        self.reached = Pass(body, kind, states, vectors, writes)


def _shape_of(grad: Tensor, lines: bool) -> tuple[Any, Any, Any]:
    """The size [b, r, c] of a tile, from its gradient in blocks."""
    batch, count, height, *cols = grad.shape
    width = math.prod(cols)
    return (batch, 1, count * width) if lines else (batch, count * height, width)
