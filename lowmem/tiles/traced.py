"""Traces an update to a graph in which each pass over the tiles is a node, and a list of passes.

    arguments ─► vectors ─► pass 0 ─► sums ─► vectors ─► pass 1 ─► … ─► results
                               │                            │
                      function of a tile           function of a tile

Back ends compile the code between passes from this graph, and trace the functions for tiles in their own form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.errors import UnsupportedError
from lowmem.tiles.graph import Size, Sizes, trace
from lowmem.tiles.storage import Storage, StoredTensor
from lowmem.tiles.sweep import Scalars, States, Sweep, Tiles
from lowmem.tiles.tile import DIMS, GRAD, RawTile, Reading, Vectors, extent

# Size hint [B, R, C] for compilers, from a large parameter. It determines how loops are divided among threads or GPU
# blocks, and which sums are long enough to be split (4,096 and more in Inductor).
PARAMETER = 8, 4096, 4096

# Arguments of compiled code, by kind and name. Vectors and small states have the kinds of `DIMS`. Others are tensors of
# the "reading", the "numbers" of the rule ("single", "double"), the "key" of the noise, the "size" of the parameter,
# and "sum" (n, i), which is sum i of pass n. The tensors of a tile are identified by name and part number.
Key = tuple[str, Any]
Arguments = dict[Key, Any]

# Key and dtype of each argument, and its dimensions after the dimensions of its kind (None for a scalar).
Signature = tuple[tuple[Key, torch.dtype, tuple[int, ...] | None], ...]

# The operation that represents a pass in a graph. kinds: kinds of its sums.  shape: shape of the parameter.
torch.library.define(
    "lowmem::over_tiles", "(Tensor[] vectors, int number, str[] kinds, SymInt[] shape, Device device) -> Tensor[]"
)
OVER_TILES = torch.ops.lowmem.over_tiles.default
fx.node.has_side_effect(OVER_TILES)
torch.library.register_fake(
    "lowmem::over_tiles",
    lambda _, number, kinds, shape, device: [torch.empty(extent(kind, shape), device=device) for kind in kinds],
)


def signature(args: Mapping[Key, Tensor]) -> Signature:
    """Returns the properties of arguments that do not depend on the size of the parameter."""
    tails = {key: value.shape[len(DIMS.get(key[0], ())) :] for key, value in args.items()}
    return tuple((key, value.dtype, tuple(tails[key]) if value.ndim else None) for key, value in args.items())


def fake(args: Signature, shape: Sequence[Size], sizes: Sizes, device: torch.device) -> Arguments:
    """Returns fake arguments for a parameter or a tile with this shape [b, r, c]."""
    return {
        key: sizes.tensor(() if tail is None else (*extent(key[0], shape), *tail), dtype, device)
        for key, dtype, tail in args
    }


def sized(shape: Sequence[Any]) -> Arguments:
    """Returns the size of a parameter as arguments."""
    return {("size", n): size for n, size in enumerate(shape)}


def reading_of(args: Arguments) -> Reading:
    """Returns the reading whose tensors are among these arguments."""
    return Reading(**{name: value for (kind, name), value in args.items() if kind == "reading"})


class Graph(NamedTuple):
    """A traced function of named arguments that returns named tensors. inputs, results: the nodes by name."""

    module: fx.GraphModule
    inputs: Mapping[Key, fx.Node]
    results: Mapping[Any, fx.Node]

    @classmethod
    def of(cls, fn: Callable[[Arguments], dict[Any, Tensor]], args: Arguments) -> "Graph":
        """Traces a function with fake arguments."""
        names = list[Any]()

        def positional(*values: Any) -> list[Tensor]:
            results = fn(dict(zip(args, values, strict=True)))
            names[:] = results
            return list(results.values())

        module = trace(positional, list(args.values()))
        inputs: Any = module.graph.find_nodes(op="placeholder")
        outputs: Any = module.graph.output_node().args[0]
        return cls(module, dict(zip(args, inputs, strict=True)), dict(zip(names, outputs, strict=True)))


class Kind(NamedTuple):
    """The properties that a trace depends on, besides the rule and its spec. They do not include any size.

    storages: storages of the gradient, the weight and the full-size states, by name.  group: number of consecutive
    elements in a row that are encoded together.  args: the other arguments.  batched: whether the parameter has several
    slices.  numbers: names of the rule's scalars.
    """

    storages: tuple[tuple[str, Storage], ...]
    group: int
    args: Signature
    device: torch.device
    batched: bool
    numbers: tuple[str, ...]


class Pass(NamedTuple):
    """A pass over the tiles.

    body: its function.  names: the name that it uses for a tensor of the tile → name of the tensor.  storages: storages
    of these tensors, by name.  args: the other arguments of a tile (scalars of the reading, numbers of the rule,
    and vectors).  vectors: their names.  sums: kind and name of each.  writes: whether the pass calls `apply`, so that
    no pass follows.  node: its `OVER_TILES` node, whose arguments are vectors and whose users are sums.
    """

    body: Callable[[RawTile], Vectors]
    names: Mapping[str, str]
    storages: Mapping[str, Storage]
    args: Signature
    vectors: Sequence[Key]
    sums: Sequence[Key]
    writes: bool
    node: Any = None

    def run(self, args: Arguments, vectors: Vectors) -> Vectors:
        """Calls the function with these vectors, and with the tensors of a tile and of the reading among `args`."""
        tensors = {
            name: StoredTensor(storage, tuple(args[name, n] for n, _ in enumerate(storage.parts)))
            for name, storage in self.storages.items()
        }
        tile = {used: tensors[name] for used, name in self.names.items()}
        return self.body(RawTile(tile, reading_of(args), vectors))


class TracedUpdate(NamedTuple):
    """A traced update.

    graph: the code between the passes. It modifies clones of small states, and copies the new values into the states at
    the end.  sizes: the symbols of the graph.
    """

    kind: Kind
    passes: Sequence[Pass]
    graph: Graph
    sizes: Sizes


class Passes(Tiles):
    """Replaces the tiles of a parameter while its update is traced, and records the passes over them.

    full: the full-size states, by name.
    """

    def __init__(self, kind: Kind, args: Arguments) -> None:
        self.members, self.device, self.passes = 1, kind.device, list[Pass]()
        self.shape = args["size", 0], args["size", 1], args["size", 2]
        self.reading, self.keys = reading_of(args), args.get(("key", ""))
        self.scalars = Scalars(kind.numbers, args["numbers", "single"], args["numbers", "double"])
        with _disable_current_modes():
            self.full = {name: self._one_group(storage, kind.group) for name, storage in kind.storages}
        self._names = {held: name for name, held in self.full.items()}
        self.tensors = {name: self.full.pop(name) for name in (GRAD, "param")}

    def _one_group(self, storage: Storage, cols: int) -> StoredTensor:
        """Returns a tile with one group of elements."""
        return StoredTensor(storage, tuple(torch.zeros(1, 1, cols // p.group, dtype=p.dtype) for p in storage.parts))

    def complete_grad(self) -> Tensor:
        raise UnsupportedError("the rule updates the parameter as one tensor (Sweep.materialized)")

    def run(self, body: Callable[[RawTile], Vectors], full: States, vectors: Vectors, *, writes: bool) -> Vectors:
        read = {key: v.reshape(extent(key[0], self.shape)).contiguous() if v.ndim else v for key, v in vectors.items()}
        reading = {key: value for key, value in self.reading.tensors.items() if not value.ndim}
        args, sums = signature({**reading, **self.scalars.singles, **read}), list[Key]()
        tensors = {**self.tensors, **full}
        if not writes:
            with _disable_current_modes():  # runs a small tile to learn the names of the sums
                here = {key: torch.zeros(() if tail is None else (1, 1, 1), dtype=dtype) for key, dtype, tail in args}
                sums = [*body(RawTile(tensors, reading_of(here), here))]
        names = {used: self._names[held] for used, held in tensors.items()}
        storages = {self._names[held]: held.storage for held in tensors.values()}
        self.passes.append(Pass(body, names, storages, args, tuple(read), sums, writes))
        kinds = [kind for kind, _ in sums]
        totals = OVER_TILES([*read.values()], len(self.passes) - 1, kinds, self.shape, self.device)
        return dict(zip(sums, totals, strict=True))


def trace_update(kind: Kind, update: Callable[[Sweep, dict[str, Any]], Tensor | None], alike: int = 1) -> TracedUpdate:
    """Traces an update, which takes a sweep and states by name. The results are the "square_sums" of the gradient,
    unless they are known, and the "sizes" that the update returns, if any. Raises errors of the rule and the tracer.

    alike: number of consecutive slices whose sums the rule adds, which divides the number of slices.
    """
    sizes, passes = Sizes(), list[Pass]()
    shape = (sizes.size(PARAMETER[0] * alike) if kind.batched else 1), *map(sizes.size, PARAMETER[1:])
    args = sized(shape) | fake(kind.args, shape, sizes, kind.device)

    def results_of(given: Arguments) -> dict[Any, Tensor]:
        tiles = Passes(kind, given)
        small = {key: value.clone() for key, value in given.items() if key[0] in ("row", "col", "slice")}
        sweep = Sweep(tiles)
        sizes = update(sweep, tiles.full | {name: state for (_, name), state in small.items()})
        results = {"square_sums": sweep.square_sums} if tiles.reading.square_sums is None else {}
        for key, state in small.items():
            given[key].copy_(state)
        passes[:] = tiles.passes
        return results if sizes is None else {**results, "sizes": sizes.view(-1)}

    graph = Graph.of(results_of, args)
    if not passes or any(each.writes != (each is passes[-1]) for each in passes):
        raise UnsupportedError("the rule does not call Sweep.apply exactly once, after all calls of Sweep.reduce")
    nodes = graph.module.graph.find_nodes(op="call_function", target=OVER_TILES)
    return TracedUpdate(
        kind, [each._replace(node=node) for each, node in zip(passes, nodes, strict=True)], graph, sizes
    )
