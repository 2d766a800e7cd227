"""Updates compiled by Inductor: one function where a parameter is one tile, otherwise stages, one for each pass.

    one tile:        arguments ─► update ─► results

    several tiles:   arguments ─► before ─► vectors ─► tile · tile · tile ─► sums ─┐
                                    ▲                                              │
                                    └─────────── arguments of the next stage ──────┘

`before` and `tile` are compiled separately. Code before pass n takes the sums of passes 1…n-1 as arguments, and
repeats what earlier stages have computed. These are vectors and scalars alone, so repeating it costs little.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from lowmem.tiles.blocks import Form, blocks, form_of, run_in_blocks, shape_of
from lowmem.tiles.graph import Function, Sizes, compiled, realized
from lowmem.tiles.layout import Place
from lowmem.tiles.storage import Held
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Scalars
from lowmem.tiles.tile import RawTile, Sums, extent
from lowmem.tiles.traced import GRAD, OVER_TILES, Arguments, Graph, Kind, Pass, Signature, TracedUpdate, fake

TILE = 8, 1024, 16, 4096  # the size [b, n, m, c] for which Inductor plans, of a tile of a large parameter


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
        """Compiles it, if that has not been done."""
        if self._run is None:
            self._run = compiled(self._module, self._sizes, list(self._example.values()))

    def __call__(self, args: Arguments) -> dict[Any, Tensor]:
        assert self._run is not None
        return dict(zip(self._results, self._run(*[args[name] for name in self._example]), strict=True))


class TileCode:
    """A function of one tile, compiled for each form of tiles. names: of the tensors of the tile, which it takes in
    blocks.  args: its other arguments.
    """

    def __init__(
        self, kind: Kind, names: Iterable[str], args: Signature, function: Callable[[Arguments], dict[Any, Tensor]]
    ) -> None:
        self._kind, self._args, self._function = kind, args, function
        self._storages = {name: dict(kind.storages)[name] for name in names}
        self._codes: dict[Form, Code] = {}

    def codes(self, forms: Iterable[Form]) -> list[Code]:
        """Returns the code for tiles of these forms. New forms are traced."""
        self._codes |= {form: self._trace(*form) for form in forms if form not in self._codes}
        return [self._codes[form] for form in forms]

    def _trace(self, batched: bool, lines: bool) -> Code:
        sizes, example = Sizes(), Arguments()
        batch, count, height, cols = map(sizes.size, TILE)
        tile = (batch if batched else 1), count, (1 if lines else height), cols
        for name, storage in self._storages.items():
            for n, part in enumerate(storage.parts):
                example[name, n] = sizes.tensor(self._shape(tile, part.group), part.dtype, self._kind.device)
        example |= fake(self._args, shape_of(example[GRAD, 0]), sizes, self._kind.device)
        return Code(Graph.of(self._function, example), sizes)

    def in_blocks(self, tensors: Mapping[str, Sequence[Tensor]], size: tuple[int, int, int]) -> Arguments:
        """Returns tensors of a tile of this size [b, r, c] as arguments."""
        divided = blocks(*size[1:], self._kind.group)
        assert divided is not None  # as it is for all `pieces`
        tile = size[0], *divided[:2], divided[2] // self._kind.group
        return {
            (name, n): tensor.view(self._shape(tile, part.group))
            for name, parts in tensors.items()
            for n, (tensor, part) in enumerate(zip(parts, self._storages[name].parts, strict=True))
        }

    def _shape(self, tile: tuple[Any, ...], own: int) -> tuple[Any, ...]:
        """The shape of a tensor with one value per `own` elements of a row: [b, n, m, c]; where elements are encoded in
        groups [b, n, m, c / group, group / own].
        """
        return tile if self._kind.group == 1 else (*tile, self._kind.group // own)


def at_once(update: TracedUpdate, args: Arguments) -> dict[Any, Tensor]:
    """Runs an update with one tile in blocks, to trace all of it as one function."""
    kind, args = update.kind, args | {("size", n): size for n, size in enumerate(shape_of(args[GRAD, 0]))}
    args |= Scalars(kind.numbers, args["numbers", "single"], args["numbers", "double"]).singles

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, values: Any, kwargs: Any) -> Any:
            if target is not OVER_TILES:
                return super().call_function(target, values, kwargs)
            vectors, reached = values[0], update.passes[values[1]]
            here = {key: realized(v) if v.ndim else v for key, v in zip(reached.vectors, vectors, strict=True)}
            return [*run_in_blocks(kind, reached, args | here).values()]

    results = Interpreter(update.graph.module).run(*(args[key] for key in update.graph.inputs))
    return dict(zip(update.graph.results, results, strict=True))


class OneTile(TileCode):
    """The compiled update of parameters that are one tile."""

    def __init__(self, update: TracedUpdate) -> None:
        super().__init__(update.kind, dict(update.kind.storages), update.kind.args, functools.partial(at_once, update))

    def run(self, tiles: StoredTiles, places: Sequence[Place], args: Arguments, _: Any) -> dict[Any, Tensor]:
        """Updates a parameter. args: numbers and small states, and the states of its size `in_blocks`."""
        size = places[0].rect.size
        args |= self.in_blocks({GRAD: (tiles.grad,), "param": tiles.weight.parts}, size)
        return self._codes[form_of(size)](args)


class Stage(TileCode):
    """A pass over the tiles, which is called with a tile, like its function. before: returns the vectors of the pass,
    and in the last stage the results of the update; None: there are none.
    """

    def __init__(self, kind: Kind, reached: Pass, before: Code | None) -> None:
        names = {GRAD, "param", *reached.full.values()}
        super().__init__(kind, names, reached.args, functools.partial(run_in_blocks, kind, reached))
        self.reached, self.before = reached, before

    def __call__(self, raw: RawTile) -> Sums:
        size = raw.grad.shape[0], raw.grad.shape[1], raw.grad.shape[2]
        full = {name: each.parts for name, each in raw.full.items()}
        args = self.in_blocks({GRAD: (raw.grad,), "param": raw.param.parts, **full}, size) | raw.reading.tensors
        for key, value in raw.vectors.items():
            args[key] = value.reshape(extent(key[0], size)).contiguous() if value.ndim else value
        return Sums.of((*key, value) for key, value in self._codes[form_of(size)](args).items())


class Stages:
    """The compiled update of parameters that have several tiles."""

    def __init__(self, update: TracedUpdate) -> None:
        self._update = update

    @functools.cached_property
    def _stages(self) -> list[Stage]:
        stages, inputs, returned = list[Stage](), dict(self._update.graph.inputs), self._update.graph.results
        for n, reached in enumerate(self._update.passes):
            results = dict(zip(reached.vectors, reached.node.args[0], strict=True))
            results |= returned if reached.sums is None else {}
            before = self._before(inputs, results, reached) if results or reached.sums is None else None
            stages.append(Stage(self._update.kind, reached, before))
            inputs |= {("sum", (n, each.args[1])): each for each in reached.node.users}
        return stages

    def _before(self, inputs: dict[Any, fx.Node], results: dict[Any, fx.Node], reached: Pass) -> Code:
        """Returns the code up to a pass; up to the end, if that writes."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs.values()}
        for node, copy in copies.items():
            copy.meta = node.meta
        for node in self._update.graph.module.graph.nodes:
            if node.op == "output" or (node is reached.node and reached.sums is not None):
                break
            if node.target is not OVER_TILES and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in results.values()])
        graph.eliminate_dead_code()
        inputs, results = ({key: copies[node] for key, node in nodes.items()} for nodes in (inputs, results))
        return Code(Graph(fx.GraphModule(torch.nn.Module(), graph), inputs, results), self._update.sizes)

    def codes(self, forms: Sequence[Form]) -> list[Code]:
        """Returns the code of all stages for tiles of these forms. New forms are traced."""
        before = [stage.before for stage in self._stages if stage.before is not None]
        return before + [code for stage in self._stages for code in stage.codes(forms)]

    def run(
        self, tiles: StoredTiles, places: Sequence[Place], args: Arguments, held: Mapping[str, Held]
    ) -> dict[Any, Tensor]:
        """Updates a parameter that is cut into tiles at these places. held: the states of its size, by name."""
        tiles = replace(tiles, pieces=places)
        args |= {("size", n): size for n, size in enumerate(tiles.shape)}
        for n, stage in enumerate(self._stages):
            results = {} if stage.before is None else stage.before(args)
            full = {state: held[state] for state in stage.reached.full.values()}
            vectors = {key: results[key] for key in stage.reached.vectors}
            if stage.reached.sums is None:
                tiles.each(stage, full, vectors)
            else:
                sums = tiles.total(stage, full, vectors).items()
                args |= {("sum", (n, i)): value for i, (*_, value) in enumerate(sums)}
        return results
