"""Compiled updates: in one piece where a parameter is one tile, else in stages, one for each pass over the tiles.

    one tile                            several tiles

    arguments ─► update ─► results      arguments ─► up to a pass ─► vectors ─► tile · tile · tile ─► sums ─┐
                                                          ▲                                                 │
                                                          └──────── arguments of the next stage ────────────┘

Each of these is a function that is compiled by itself. The one that leads up to a pass is the update from its start, in
which earlier passes return the sums that they had. It computes vectors and scalars alone, so repeating costs little.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.tiles.blocks import Form, in_blocks
from lowmem.tiles.graph import Function, Sizes, compiled, trace
from lowmem.tiles.storage import Held
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Tiles
from lowmem.tiles.tile import RawTile, Sums, extent
from lowmem.tiles.traced import (
    GRAD,
    Arguments,
    Kind,
    NextPass,
    Traced,
    TracedBetween,
    TracedTile,
    UntraceableError,
    signature,
)


class Code:
    """A compiled function of named arguments that returns named tensors.

    Args:
        function: takes and returns a dict. It is traced.
        kind: of its arguments.
    """

    def __init__(self, function: Callable[[Arguments], dict[Any, Tensor]], kind: Kind) -> None:
        self._sizes, results = Sizes(), dict[Any, Tensor]()
        example = kind.example(self._sizes)

        def positional(*args: Any) -> list[Tensor]:
            results.clear()
            results.update(function(dict(zip(example, args, strict=True))))
            return list(results.values())

        try:
            self._graph = trace(positional, list(example.values()))
        except Exception as error:  # a rule may do anything that PyTorch cannot trace
            raise UntraceableError(str(error)) from error
        inputs = zip(example, self._graph.graph.find_nodes(op="placeholder"), strict=True)
        unused = {name: node for name, node in inputs if not node.users}
        for node in unused.values():
            self._graph.graph.erase_node(node)
        self._graph.recompile()
        self._example = {name: value for name, value in example.items() if name not in unused}
        self.results = list(results)
        self._run: Function | None = None

    def compile(self) -> None:
        """Compiles it, if that has not been done."""
        if self._run is None:
            self._run = compiled(self._graph, self._sizes, list(self._example.values()))

    def __call__(self, args: Arguments) -> dict[Any, Tensor]:
        assert self._run is not None
        return dict(zip(self.results, self._run(*(args[name] for name in self._example)), strict=True))


class TileCode:
    """The function of a pass, compiled for tiles of each form. It is called with a tile, as the function is.

    Args:
        body: the function.
        kind: of a tile and the vectors that it reads, without the form.
    """

    def __init__(self, body: Callable[[RawTile], Sums | None], kind: Kind) -> None:
        self._body, self._kind, self._codes = body, kind, dict[Form, Code]()

    def of(self, form: Form) -> Code:
        """The code for tiles of a form, traced if it is new."""
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


class Stage(NamedTuple):
    """A pass over the tiles, and the code that leads up to it.

    before: returns the vectors of the pass, in the last stage also the results of the update; None if that is nothing.
    tile: the function of the pass, and the states that it reads, by its names; None if `before` is the whole update.
    """

    before: Code | None
    tile: TileCode | None
    full: dict[str, str]


class CompiledUpdate:
    """The compiled update of a kind of parameters.

    Args:
        update: is traced.
        form: of some tile.
    """

    def __init__(self, kind: Kind, update: Update, form: Form) -> None:
        self._kind, self._stages = kind, list[Stage]()
        self._sums: list[list[Any]] = []  # kinds and names of the sums, by pass
        is_last = False
        while not is_last:
            stage, is_last = self._traced(update)
            self._stages.append(stage)
            if stage.tile is not None:
                self._sums.append(stage.tile.of(form).results)

    def _traced(self, update: Update) -> tuple[Stage, bool]:
        """Traces the update up to the first pass whose sums are not known, or to its end. Returns whether it ended."""
        kind, traced, is_last = self._kind, list[Traced](), False

        def before(args: Arguments) -> dict[Any, Tensor]:
            nonlocal is_last
            tiles = TracedBetween(kind, args, self._sums) if kind.form is None else TracedTile(kind, args)
            traced.append(tiles)
            states, results = {name: args[each, name].clone() for each, name in kind.small}, dict[Any, Tensor]()
            with contextlib.suppress(NextPass):
                results, is_last = update(tiles, tiles.full | states), True
                for each, name in kind.small:  # in the last stage alone: each one repeats those before it
                    args[each, name].copy_(states[name])
            return results if tiles.next is None else results | tiles.next.vectors

        sums = (((each, (n, name)), torch.float32, ()) for n, keys in enumerate(self._sums) for each, name in keys)
        code = Code(before, replace(kind, args=(*kind.args, *sums)))
        (tiles,) = traced
        if tiles.next is None:
            return Stage(code, None, {}), True
        body, full, vectors = tiles.next
        storages = dict(kind.storages)
        read = {GRAD: GRAD, "param": "param", **full}
        scalars = {key: value for key, value in tiles.reading.tensors.items() if not value.ndim}
        of_tile = replace(
            kind,
            storages=tuple((name, storages[state]) for name, state in read.items()),
            args=signature({**scalars, **tiles.scalars.singles, **vectors}),
        )
        return Stage(code if code.results or is_last else None, TileCode(body, of_tile), full), is_last

    def compile(self, forms: Iterable[Form]) -> None:
        """Compiles the code for tiles of these forms, if that has not been done."""
        for before, tile, _ in self._stages:
            if before is not None:
                before.compile()
            if tile is not None:
                for form in forms:
                    tile.of(form).compile()

    def run(self, tiles: StoredTiles, args: Arguments, held: Mapping[str, Held]) -> dict[Any, Tensor]:
        """Updates a parameter. held: the states of its size, by name."""
        if self._kind.form is None:
            args |= {("size", n): size for n, size in enumerate(tiles.shape)}
        else:
            args |= self._of_tile(tiles, held)
        results: dict[Any, Tensor] = {}
        for n, stage in enumerate(self._stages):
            results = {} if stage.before is None else stage.before(args)
            if stage.tile is None:
                break
            full = {name: held[state] for name, state in stage.full.items()}
            vectors = {key: value for key, value in results.items() if isinstance(key, tuple)}
            if stage is self._stages[-1]:
                tiles.each(stage.tile, full, vectors)
            else:
                sums = tiles.reduce(stage.tile, full, vectors)
                args |= {(kind, (n, name)): value for kind, name, value in sums.items()}
        return results

    def _of_tile(self, tiles: StoredTiles, held: Mapping[str, Held]) -> Arguments:
        """The tensors of a parameter that is one tile."""
        (place,), args = tiles.places, Arguments()
        parts = {GRAD: (tiles.complete_grad(),), "param": tiles.weight.parts}
        for name, storage in self._kind.storages:
            for n, part in enumerate(storage.parts):
                tensor = (parts.get(name) or held[name].parts)[n]
                args[name, n] = in_blocks(tensor, place.rect.size, self._kind.group, part.group)
        return args
