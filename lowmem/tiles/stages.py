"""Updates compiled by Inductor: one function if a parameter is one tile, otherwise one stage for each pass.

    one tile:        arguments ─► update ─► results

    several tiles:   arguments ─► before ─► vectors ─► tile · tile · tile ─► sums ─┐
                                    ▲                                              │
                                    └─────────── arguments of the next stage ──────┘

`before` and `tile` are compiled separately. The code before pass n takes the sums of passes 1…n-1 as arguments, and
recomputes the vectors and scalars of earlier stages, which costs little.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowmem.tiles.blocks import Form, blocks, form_of, run_in_blocks, shape_of
from lowmem.tiles.graph import Function, Sizes, compiled, module
from lowmem.tiles.layout import Place
from lowmem.tiles.storage import Storage, StoredTensor
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.tile import GRAD, RawTile, Vectors, extent
from lowmem.tiles.traced import OVER_TILES, Arguments, Graph, Kind, Pass, Signature, TracedUpdate, fake, sized

TILE = 8, 1024, 16, 4096  # size hint for Inductor: [b, n, m, c] of a tile of a large parameter


class Code:
    """A compiled function of named arguments that returns named tensors."""

    def __init__(self, graph: Graph, sizes: Sizes) -> None:
        self._module, self._sizes, self._results = graph.module, sizes, list(graph.results)
        self._example = {name: node.meta["val"] for name, node in graph.inputs.items() if node.users}
        for node in [node for node in graph.inputs.values() if not node.users]:
            self._module.graph.erase_node(node)
        self._module.recompile()
        self._run: Function | None = None

    def compile(self) -> None:
        """Compiles the function unless it is already compiled."""
        if self._run is None:
            self._run = compiled(self._module, self._sizes, list(self._example.values()))

    def __call__(self, args: Arguments) -> dict[Any, Tensor]:
        assert self._run is not None
        return dict(zip(self._results, self._run(*[args[name] for name in self._example]), strict=True))


class TileCode:
    """A function of one tile, compiled for each form of tiles. storages: storages of the tile's tensors, which are
    passed in blocks.  args: the other arguments.  graph: traces the function, given fake arguments.
    """

    def __init__(
        self,
        kind: Kind,
        storages: Mapping[str, Storage],
        args: Signature,
        graph: Callable[[Arguments, Sizes], Graph],
    ) -> None:
        self._kind, self._storages, self._args, self._graph = kind, storages, args, graph
        self._codes: dict[Form, Code] = {}

    def codes(self, forms: Iterable[Form]) -> list[Code]:
        """Returns the code for tiles of these forms, and traces new forms."""
        self._codes |= {form: self._trace(*form) for form in forms if form not in self._codes}
        return [self._codes[form] for form in forms]

    def _trace(self, batched: bool, lines: bool) -> Code:
        sizes, example = Sizes(), Arguments()
        batch, count, height, cols = map(sizes.size, TILE)
        tile = (batch if batched else 1), count, (1 if lines else height), cols
        for name, storage in self._storages.items():
            for n, part in enumerate(storage.parts):
                example[name, n] = sizes.tensor(self._shape(tile, part.group), part.dtype, self._kind.device)
        example |= fake(self._args, shape_of(example[GRAD, 0].shape, is_line=lines), sizes, self._kind.device)
        return Code(self._graph(example, sizes), sizes)

    def in_blocks(self, tensors: Mapping[str, StoredTensor], size: tuple[int, int, int]) -> Arguments:
        """Returns the tensors of a tile with this size [b, r, c] as arguments."""
        matrix = blocks(*size[1:], self._kind.group)
        assert matrix is not None  # true for all `divisible_places`
        tile = size[0], *matrix[:2], matrix[2] // self._kind.group
        return {
            (name, n): tensor.view(self._shape(tile, part.group))
            for name, (storage, stored) in tensors.items()
            for n, (part, tensor) in enumerate(zip(storage.parts, stored, strict=True))
        }

    def _shape(self, tile: tuple[Any, ...], own: int) -> tuple[Any, ...]:
        """Returns the shape of a tensor with one value per `own` elements of a row: [b, n, m, c], or if elements are
        encoded in groups, [b, n, m, c / group, group / own].
        """
        return tile if self._kind.group == 1 else (*tile, self._kind.group // own)


def copied(
    update: TracedUpdate, args: Arguments, results: Mapping[Any, fx.Node], end: fx.Node, sums_of: Callable[..., Any]
) -> Graph:
    """Copies the graph of an update up to node `end`. args: fake arguments.  results: nodes of the update.  sums_of:
    (graph, n, nodes of arguments and vectors by name) → the nodes of pass n's sums in the new graph.
    """
    graph, inputs = fx.Graph(), dict(args)
    for n, (key, value) in enumerate(args.items()):
        if not isinstance(value, int):  # a symbol or a tensor
            inputs[key] = graph.placeholder(f"given_{n}")
            inputs[key].meta["val"] = value
    if (GRAD, 0) in args:  # sizes are symbols of tensors: Inductor's cache on disk has no guards for other arguments
        grad, blocked = inputs[GRAD, 0], args[GRAD, 0].shape
        size_of = torch.ops.aten.sym_size.int
        dims = [fx.Proxy(graph.call_function(size_of, (grad, d))) for d in range(len(blocked))]
        shape = shape_of(dims, is_line=blocked[2] == 1)
        inputs |= sized([size.node if isinstance(size, fx.Proxy) else size for size in shape])
    copies: dict[fx.Node, Any] = {node: inputs.get(key) for key, node in update.graph.inputs.items()}
    for node in update.graph.module.graph.nodes:
        if node is end:
            break
        if node.target is OVER_TILES:
            vectors = zip(update.passes[node.args[1]].vectors, map(copies.__getitem__, node.args[0]), strict=True)
            sums = sums_of(graph, node.args[1], {**inputs, **dict(vectors)})
            copies |= {each: sums[each.args[1]] for each in node.users}
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results.values()])
    graph.eliminate_dead_code()
    placeholders = {key: node for key, node in inputs.items() if isinstance(node, fx.Node) and node.op == "placeholder"}
    return Graph(module(graph), placeholders, {key: copies[node] for key, node in results.items()})


def at_once(update: TracedUpdate, args: Arguments, sizes: Sizes) -> Graph:
    """Returns the graph of an update of one tile, with each pass replaced by its graph."""
    kind, graph, sizes_of_grad = update.kind, update.graph, args[GRAD, 0].shape
    shape = shape_of(sizes_of_grad, is_line=sizes_of_grad[2] == 1)

    def sums_of(into: fx.Graph, n: int, given: Arguments) -> Any:
        tile_pass = update.passes[n]
        function = functools.partial(run_in_blocks, tile_pass)
        traced = Graph.of(function, args | fake(tile_pass.args, shape, sizes, kind.device))
        single, select = given["numbers", "single"], torch.ops.aten.select.int
        numbers = {("scalar", k): into.call_function(select, (single, 0, i)) for i, k in enumerate(kind.numbers)}
        given = numbers | given
        return into.graph_copy(traced.module.graph, {node: given[key] for key, node in traced.inputs.items()})

    return copied(update, args, graph.results, graph.module.graph.output_node(), sums_of)


class OneTile(TileCode):
    """The compiled update of parameters that are one tile."""

    def __init__(self, update: TracedUpdate) -> None:
        super().__init__(update.kind, dict(update.kind.storages), update.kind.args, functools.partial(at_once, update))

    def run(self, tiles: StoredTiles, places: Sequence[Place], args: Arguments, _: Any) -> dict[Any, Tensor]:
        """Updates a parameter. args: numbers, small states, and full-size states `in_blocks`."""
        size = places[0].rect.size
        tensors = {GRAD: StoredTensor(self._storages[GRAD], (tiles.grad,)), "param": tiles.weight}
        args |= self.in_blocks(tensors, size)
        return self._codes[form_of(size)](args)


class Stage(TileCode):
    """A compiled pass over the tiles, called with one tile at a time. before: returns the vectors of the pass, and in
    the last stage the results of the update; None if there are none.
    """

    def __init__(self, kind: Kind, tile_pass: Pass, before: Code | None) -> None:
        function = functools.partial(run_in_blocks, tile_pass)
        super().__init__(kind, tile_pass.storages, tile_pass.args, lambda args, _: Graph.of(function, args))
        self.tile_pass, self.before = tile_pass, before

    def __call__(self, raw: RawTile) -> Vectors:
        batch, rows, cols = raw.tensors[GRAD].parts[0].shape
        size = batch, rows, cols
        args = self.in_blocks(raw.tensors, size) | raw.reading.tensors
        for key, value in raw.vectors.items():
            args[key] = value.reshape(extent(key[0], size)).contiguous() if value.ndim else value
        return self._codes[form_of(size)](args)


class Stages:
    """The compiled update of parameters that have several tiles."""

    def __init__(self, update: TracedUpdate) -> None:
        self._update = update

    @functools.cached_property
    def _stages(self) -> list[Stage]:
        kind, passes, graph, sizes = self._update
        inputs, stages = {key: node.meta["val"] for key, node in graph.inputs.items() if node.users}, list[Stage]()

        def sums_of(_: fx.Graph, n: int, given: Arguments) -> Any:
            return {each.args[1]: given["sum", (n, each.args[1])] for each in passes[n].node.users}

        for n, tile_pass in enumerate(passes):
            results, end = dict(zip(tile_pass.vectors, tile_pass.node.args[0], strict=True)), tile_pass.node
            if tile_pass.writes:
                results, end = {**results, **graph.results}, graph.module.graph.output_node()
            copies = results or tile_pass.writes
            before = Code(copied(self._update, inputs, results, end, sums_of), sizes) if copies else None
            stages.append(Stage(kind, tile_pass, before))
            inputs |= {("sum", (n, each.args[1])): each.meta["val"] for each in tile_pass.node.users}
        return stages

    def codes(self, forms: Sequence[Form]) -> list[Code]:
        """Returns the code of all stages for tiles of these forms, and traces new forms."""
        before = [stage.before for stage in self._stages if stage.before is not None]
        return before + [code for stage in self._stages for code in stage.codes(forms)]

    def run(
        self, tiles: StoredTiles, places: Sequence[Place], args: Arguments, held: Mapping[str, StoredTensor]
    ) -> dict[Any, Tensor]:
        """Updates a parameter that is cut into tiles at these places. held: the full-size states, by name."""
        tiles.places = places
        args |= sized(tiles.shape)
        for n, stage in enumerate(self._stages):
            results = {} if stage.before is None else stage.before(args)
            full = {name: held[name] for name in stage.tile_pass.storages if name in held}
            vectors = {key: results[key] for key in stage.tile_pass.vectors}
            sums = tiles.total(stage, full, vectors).values()
            args |= {("sum", (n, i)): value for i, value in enumerate(sums)}
        return results
