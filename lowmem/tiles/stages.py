"""Compiled updates: one function where a parameter is one tile, otherwise stages, one for each pass over the tiles.

    one tile:        arguments ─► update ─► results

    several tiles:   arguments ─► before ─► vectors ─► tile · tile · tile ─► sums ─┐
                                    ▲                                              │
                                    └─────────── arguments of the next stage ──────┘

`before` and `tile` are compiled separately. Code before pass n re-runs the update from its start and takes the sums of
passes 1…n-1 as arguments. It computes vectors and scalars alone, so repeating it costs little.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowmem.tiles.blocks import Form, in_blocks
from lowmem.tiles.graph import Function, Sizes, compiled, trace
from lowmem.tiles.layout import Place
from lowmem.tiles.storage import Held
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Tiles
from lowmem.tiles.tile import RawTile, Sums, extent
from lowmem.tiles.traced import GRAD, Arguments, EndOfTrace, Kind, Pass, TracedBetween, TracedTile


class Code:
    """A compiled function of named arguments that returns named tensors.

    Args:
        function: takes and returns a dict. It is traced.
        kind: of its arguments.

    Attributes:
        results: the names of its results.
    """

    def __init__(self, function: Callable[[Arguments], dict[Any, Tensor]], kind: Kind) -> None:
        self._sizes, self.results = Sizes(), list[Any]()
        example = kind.example(self._sizes)

        def positional(*args: Any) -> list[Tensor]:
            results = function(dict(zip(example, args, strict=True)))
            self.results = list(results)
            return list(results.values())

        self._graph = trace(positional, list(example.values()))
        inputs = zip(example, self._graph.graph.find_nodes(op="placeholder"), strict=True)
        unused = {name: node for name, node in inputs if not node.users}
        for node in unused.values():
            self._graph.graph.erase_node(node)
        self._graph.recompile()
        self._example = {name: value for name, value in example.items() if name not in unused}
        self._run: Function | None = None

    def compile(self) -> None:
        """Compiles it, if that has not been done."""
        if self._run is None:
            self._run = compiled(self._graph, self._sizes, list(self._example.values()))

    def __call__(self, args: Arguments) -> dict[Any, Tensor]:
        assert self._run is not None
        return dict(zip(self.results, self._run(*[args[name] for name in self._example]), strict=True))


class TileCode:
    """The function of a pass, compiled for each form of tiles. It is called with a tile, like the function.

    Attributes:
        full, writes: of the pass.
    """

    def __init__(self, reached: Pass) -> None:
        self._body, self._kind, self.full, self.writes = reached.body, reached.kind, reached.full, reached.writes
        self._codes: dict[Form, Code] = {}

    def of(self, form: Form) -> Code:
        """Returns the code for tiles of a form, which is traced if it is new."""
        if form not in self._codes:
            kind = replace(self._kind, form=form)

            def sums_of(args: Arguments) -> dict[Any, Tensor]:
                tile = TracedTile(kind, args)
                vectors = {key: args[key] for key, *_ in kind.args if key[0] != "reading"}
                return {(each, name): value for each, name, value in tile.run(self._body, tile.full, vectors).items()}

            self._codes[form] = Code(sums_of, kind)
        return self._codes[form]

    def __call__(self, raw: RawTile) -> Sums:
        size = batch, rows, cols = raw.grad.shape[0], raw.grad.shape[1], raw.grad.shape[2]
        parts = {GRAD: (raw.grad,), "param": raw.param.parts, **{name: each.parts for name, each in raw.full.items()}}
        args: Arguments = {**raw.reading.tensors}
        for name, tensors in parts.items():
            for n, tensor in enumerate(tensors):
                args[name, n] = in_blocks(tensor, size, self._kind.group, cols // tensor.shape[2])
        for key, value in raw.vectors.items():
            args[key] = value.reshape(extent(key[0], size)).contiguous() if value.ndim else value
        sums = self._codes[batch > 1, rows == 1](args)
        return Sums.of((kind, name, value) for (kind, name), value in sums.items())


# Calls a rule with tiles and with states by name. Returns tensors by name.
Update = Callable[[Tiles, dict[str, Any]], dict[Any, Tensor]]


class Stage:
    """A pass over the tiles, and the code before it.

    Args:
        kind, update: of `CompiledUpdate`.
        earlier: kinds and names of the sums of each earlier pass, which are arguments of `before`.

    Attributes:
        before: returns the vectors of the pass, and in the last stage the results of the update. None: there are none.
        tile: the function of the pass. None: the update ends without another pass.
    """

    def __init__(self, kind: Kind, update: Update, earlier: Sequence[Sequence[Any]]) -> None:
        self._number = len(earlier)
        self._pass: Pass | None = None  # set by the trace
        sums = (((each, (n, name)), torch.float32, ()) for n, keys in enumerate(earlier) for each, name in keys)
        code = Code(functools.partial(self._trace, kind, update, earlier), replace(kind, args=(*kind.args, *sums)))
        self.tile: TileCode | None = None if self._pass is None else TileCode(self._pass)
        self.is_last = self.tile is None or self.tile.writes
        self.before = code if code.results or self.is_last else None

    def _trace(self, kind: Kind, update: Update, earlier: Sequence[Any], args: Arguments) -> dict[Any, Tensor]:
        """Updates up to the next pass. Returns the results of `before`."""
        tiles = TracedBetween(kind, args, earlier) if kind.form is None else TracedTile(kind, args)
        states = {name: args[each, name].clone() for each, name in kind.small}
        results: dict[Any, Tensor] = {}
        with suppress(EndOfTrace):
            results = update(tiles, tiles.full | states)
            for each, name in kind.small:  # in the last stage alone: each one repeats those before it
                args[each, name].copy_(states[name])
        self._pass = tiles.reached
        return results if tiles.reached is None else results | tiles.reached.vectors

    def run(self, tiles: StoredTiles, args: Arguments, held: Mapping[str, Held]) -> dict[Any, Tensor]:
        """Runs the stage, and adds the sums of its pass to `args`."""
        results = {} if self.before is None else self.before(args)
        if self.tile is not None:
            full = {name: held[state] for name, state in self.tile.full.items()}
            vectors = {key: value for key, value in results.items() if isinstance(key, tuple)}
            if self.tile.writes:
                tiles.each(self.tile, full, vectors)
            else:
                sums = tiles.reduce(self.tile, full, vectors)
                args |= {(kind, (self._number, name)): value for kind, name, value in sums.items()}
        return results


class CompiledUpdate:
    """The compiled update of a kind of parameters.

    Args:
        update: is traced.
        form: of some tile.
    """

    def __init__(self, kind: Kind, update: Update, form: Form) -> None:
        self._kind, self._stages = kind, list[Stage]()
        earlier: list[list[Any]] = []
        while not self._stages or not self._stages[-1].is_last:
            stage = Stage(kind, update, earlier)
            self._stages.append(stage)
            if stage.tile is not None:
                earlier.append(stage.tile.of(form).results)

    def codes(self, forms: Iterable[Form]) -> list[Code]:
        """Returns the code of all stages for tiles of these forms. New forms are traced."""
        before = [stage.before for stage in self._stages if stage.before is not None]
        tiles = [stage.tile for stage in self._stages if stage.tile is not None]
        return before + [tile.of(form) for tile in tiles for form in forms]

    def run(
        self, tiles: StoredTiles, places: Sequence[Place], args: Arguments, held: Mapping[str, Held]
    ) -> dict[Any, Tensor]:
        """Updates a parameter that is cut into tiles at these places.

        Args:
            args: numbers and small states. If there is one tile, also the result of `in_blocks` for states.
            held: the states of its size, by name.
        """
        if self._kind.form is None:
            tiles = replace(tiles, pieces=places)
            args |= {("size", n): size for n, size in enumerate(tiles.shape)}
        else:
            args |= self.in_blocks({GRAD: (tiles.grad,), "param": tiles.weight.parts}, places[0])
        results: dict[Any, Tensor] = {}
        for stage in self._stages:
            results = stage.run(tiles, args, held)
        return results

    def in_blocks(self, tensors: Mapping[str, tuple[Tensor, ...]], place: Place) -> Arguments:
        """Returns tensors of a parameter that is one tile, by name and number of the part, as arguments."""
        storages, size = dict(self._kind.storages), place.rect.size
        return {
            (name, n): in_blocks(tensor, size, self._kind.group, part.group)
            for name, parts in tensors.items()
            for n, (tensor, part) in enumerate(zip(parts, storages[name].parts, strict=True))
        }
