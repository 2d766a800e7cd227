"""Functions of a tile, compiled: for parameters that are several tiles, or a shard."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from lowmem.tiles.graph import Compiler, Function, Sizes, compiled, trace
from lowmem.tiles.tile import ApplyFn, Formats, RawTile, ReduceFn, Summing, TileBody, Writing


class Graph(NamedTuple):
    """Compiled code that takes the tensors of a tile, and the names of what it returns, in four dicts or none."""

    run: Function
    names: list[list[str]]


class CompiledTile:
    """`body`, which is `reduce_tile` or `apply_tile`, with `fn` and the storages bound. It is compiled with symbolic
    sizes, once for all parameters and placements, but for dtypes, numbers of dimensions, and which sizes are 1.
    """

    def __init__(self, body: TileBody, fn: ReduceFn | ApplyFn, formats: Formats) -> None:
        self._body = functools.partial(body, fn, formats)
        self._grouped = any(storage.group > 1 for storage in (formats.param, *dict(formats.full).values()))
        self._graphs: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, how: Summing | Writing, raw: RawTile) -> Any:
        leaves = _leaves(how, raw)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if Compiler.failure or not all(tensor.is_contiguous() for tensor in tensors):
            return self._body(how, raw)
        kind: tuple[Any, ...] = tuple(size == 1 for size in raw.grad.shape)
        kind = *kind, *((leaf.ndim, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if self._grouped:
            kind = *kind, *(tensor.shape[-1:] == (1,) for tensor in tensors)
        graph = self._graphs.get(kind)
        if graph is None:
            try:
                graph = self._graphs[kind] = self._compile(how, raw)
            except Exception as error:  # the rule may have written states already, so that the sweep has to go on
                Compiler.give_up(error)
                return self._body(how, raw)
        results = iter(graph.run(*tensors))
        return [{name: next(results) for name in names} for names in graph.names]

    def _compile(self, how: Summing | Writing, raw: RawTile) -> Graph:
        start = time.perf_counter()
        leaves, sizes, names = _leaves(how, raw), Sizes(), list[list[str]]()
        fakes = [_fake(sizes, f"size{i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def run(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            tile = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            results = self._body(*tree_unflatten(tile, tree_structure((how, raw))))
            names[:] = [list(named) for named in results or ()]
            return [value for named in results or () for value in named.values()]

        graph = compiled(trace(run, fakes), sizes, fakes)
        Compiler.seconds += time.perf_counter() - start
        return Graph(graph, names)


def _leaves(how: Summing | Writing, raw: RawTile) -> list[Any]:
    """The tensors of a tile and of how it is read or written, with None and booleans between them: what `tree_leaves`
    returns, in a tenth of the time.
    """
    parts = (part for parts in raw.full.values() for part in parts)
    vectors = (*raw.row.values(), *raw.col.values(), *raw.scalar.values())
    return [*how, raw.grad, *raw.param, raw.inverse_scale, raw.limit, raw.clip_coef, *parts, *vectors]


def _fake(sizes: Sizes, name: str, tensor: Tensor) -> Tensor:
    shape = [size if size == 1 else sizes.size(f"{name}_{i}", size) for i, size in enumerate(tensor.shape)]
    return sizes.tensor(shape, tensor.dtype, tensor.device)


@functools.cache
def tile_function(body: TileBody, fn: ReduceFn | ApplyFn, formats: Formats, compiled: bool) -> Callable[..., Any]:
    """`reduce_tile` or `apply_tile` for a rule's function and storages."""
    return CompiledTile(body, fn, formats) if compiled else functools.partial(body, fn, formats)
