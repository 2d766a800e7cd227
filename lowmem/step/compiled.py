"""Compiled programs: `rule.update` of a kind of parameters, traced once, for tiles of any size and number."""

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowmem.errors import ConfigError
from lowmem.rules import ParamSpec, UpdateRule
from lowmem.step.program import Kept, Program
from lowmem.step.record import ParamRecord
from lowmem.tiles.graph import Compiler, Size, Sizes, try_compiler
from lowmem.tiles.storage import Held, Storage, part_name
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Reading, Scalars, Sweep
from lowmem.tiles.tile import extent
from lowmem.tiles.traced import Form, TracedTiles, TracedUpdate, UntraceableError, pieces, run_cut

logger = logging.getLogger(__name__)

# With fewer trainable elements compilation takes longer than it saves.
COMPILE_FROM = 1 << 25

# The tensors that a `Reading` may have.
READ = tuple(each.name for each in fields(Reading) if each.name != "sums_squares")

# Sizes for which Inductor plans: how loops are divided among threads, or a GPU's blocks, and which sums are so long
# that they are taken in parts (from 4,096 on). Those of a large parameter.
EXAMPLE = {"batch": 8, "count": 1024, "rows": 16, "cols": 4096}


@dataclass(frozen=True)
class Kind:
    """The cache key of the compiled code of a rule. No size is part of it: code is compiled for all sizes.

    storage: of the weight.  states: storages of the states that have the size of the parameter.  small: the other
    states.  elements: dtypes of the gradient and the tensors of weight and states, with the size of their groups.
    reading: name, dtype and number of dimensions of its tensors.  numbers: names of the rule's.  cut: code is cut at
    each pass over the tiles.  form: see `Piece`.
    """

    spec: ParamSpec
    storage: Storage
    states: tuple[tuple[str, Storage], ...]
    small: tuple[tuple[str, Kept], ...]
    elements: tuple[Kept, ...]
    device: torch.device
    batched: bool
    reading: tuple[tuple[str, torch.dtype, int], ...]
    sums_squares: bool
    numbers: tuple[str, ...]
    cut: bool
    form: Form

    @property
    def group(self) -> int:
        """Elements of a row that are encoded together by some storage."""
        return max(each.group for each in self.elements)

    @property
    def draws(self) -> bool:
        """Returns whether a storage draws random numbers."""
        return any(storage.draws for storage in (self.storage, *dict(self.states).values()))


def trace_update(kind: Kind, rule: UpdateRule) -> TracedUpdate:
    """Traces and compiles the update of a kind of parameters.

    Arguments: the small states, the tensors of the reading, the rule's numbers in float32 and float64, the key of the
    noise if some is drawn, if it is cut the parameter's size [B, R, C]; of a tile the gradient, weight and states.
    """
    sizes, (batched, lines), group = Sizes(), kind.form, kind.group
    batch, count, height, cols = map(sizes.size, EXAMPLE.values())
    tile_batch: Size = batch if batched else 1
    tile_height: Size = 1 if lines else height
    full: tuple[Size, Size, Size] = (
        tile_batch,
        1 if lines else count * height,
        count * cols * group if lines else cols * group,
    )
    if kind.cut:
        full = (sizes.size(8) if kind.batched else 1), sizes.size(4096), sizes.size(4096)
    shared: list[Tensor | Size] = []
    for _, kept in kind.small:
        shared.append(sizes.tensor((*extent(kept.extent, full), *kept.extra), kept.dtype, kind.device))
    shared += [sizes.tensor((1,) * ndim, dtype, kind.device) for _, dtype, ndim in kind.reading]
    shared += [sizes.tensor((len(kind.numbers),), dtype, kind.device) for dtype in (torch.float32, torch.float64)]
    if kind.draws:
        shared.append(sizes.tensor((), torch.int32, kind.device))
    if kind.cut:
        shared += full
    shape = tile_batch, count, tile_height, cols
    tile = [
        sizes.tensor(shape if group == 1 else (*shape, group // each.group), each.dtype, kind.device)
        for each in kind.elements
    ]

    def update(*args: Any) -> tuple[list[Tensor], TracedTiles]:
        given = iter(args)
        states: dict[str, Any] = {name: next(given) for name, _ in kind.small}
        reading = Reading(**{name: next(given) for name, _, _ in kind.reading}, sums_squares=kind.sums_squares)
        scalars = Scalars(kind.numbers, next(given), next(given))
        key = next(given) if kind.draws else None
        size = tuple(next(given) for _ in full) if kind.cut else None
        grad, parts = next(given), given
        weight = Held(kind.storage, tuple(next(parts) for _ in kind.storage.parts))
        states |= {name: Held(each, tuple(next(parts) for _ in each.parts)) for name, each in kind.states}
        tiles = TracedTiles(weight, grad, reading, scalars, lines, full=size, key=key)
        sweep = Sweep(tiles)
        weighted = rule.update(sweep, kind.spec, states)
        results = [] if reading.square_sums is not None else [sweep.square_sums]
        return results if weighted is None else [*results, weighted.view(-1)], tiles

    return TracedUpdate(update, sizes, shared, tile, cut=kind.cut)


# Compiled code of a rule, by the rule itself, or by its class if it has no attributes of its own. None: the rule cannot
# be traced.
_TRACED: WeakKeyDictionary[Any, dict[Kind, TracedUpdate] | None] = WeakKeyDictionary()


def traced(kind: Kind, rule: UpdateRule, first: bool) -> TracedUpdate | None:
    """The compiled update of a kind of parameters; None if there is none. first: it also computes what lies between two
    passes.
    """
    key = rule if vars(rule) else type(rule)
    updates = _TRACED.setdefault(key, {})
    if updates is None or Compiler.failure is not None:
        return None
    start = time.perf_counter()
    try:
        if kind not in updates:
            updates[kind] = trace_update(kind, rule)
        updates[kind].compile(first)
    except UntraceableError as error:
        _TRACED[key] = None
        logger.info("updates of rule %s are not compiled: %s", rule.name, error)
    except Exception as error:
        updates.pop(kind, None)
        Compiler.give_up(error)
    Compiler.seconds += time.perf_counter() - start
    return updates.get(kind)


@dataclass(frozen=True)
class Compiled:
    """Runs a program by compiled code, with gradients of one kind, whatever the sizes of its tiles.

    kind: of the code, whose form is that of a piece.  names: tensors of the states that have the size of the parameter.
    """

    program: Program
    kind: Kind
    names: tuple[str, ...]
    _updates: dict[tuple[Form, bool], TracedUpdate | None] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, program: Program, tiles: StoredTiles) -> "Compiled | None":
        """The compiled code of a program for tiles such as these; None if it cannot be compiled."""
        layout, grad, reading = tiles.layout, tiles.grad, tiles.reading
        names = tuple(part_name(name, part.name) for name, each in program.states.items() for part in each.parts)
        weight = [Kept(part.dtype, group=part.group) for part in program.weight.parts]
        elements = Kept(grad.dtype), *weight, *(program.kept[name] for name in names)
        parts = pieces(layout, max(each.group for each in elements))
        if not parts or program.rule.materializes:
            return None
        kind = Kind(
            program.spec,
            program.weight,
            tuple(program.states.items()),
            tuple((name, kept) for name, kept in program.kept.items() if kept.extent != "full"),
            elements,
            grad.device,
            batched=layout.shape[0] > 1,
            reading=tuple(
                (name, each.dtype, each.ndim) for name in READ if (each := getattr(reading, name)) is not None
            ),
            sums_squares=reading.sums_squares,
            numbers=tiles.scalars.names,
            cut=program.ranks is not None or not isinstance(grad, Tensor) or len(parts) > 1,
            form=parts[0].form,
        )
        compiled = cls(program, kind, names)
        return None if compiled._update(kind.form, True) is None else compiled

    def _update(self, form: Form, first: bool) -> TracedUpdate | None:
        """The code of pieces of this form. first: it also computes what lies between two passes."""
        if (form, first) not in self._updates:
            self._updates[form, first] = traced(replace(self.kind, form=form), self.program.rule, first)
        return self._updates[form, first]

    def run(self, tiles: StoredTiles, states: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Updates a parameter, and returns what `trace_update` does; None if compiled code takes no such tensors."""
        kind, layout = self.kind, tiles.layout
        tensors = [tiles.grad, *tiles.weight.parts, *(states[name] for name in self.names)]
        for tensor, kept in zip(tensors, kind.elements, strict=True):
            if isinstance(tensor, Tensor) and not _fits(tensor, kept.dtype, kind.device):
                return None
        parts = pieces(layout, kind.group)
        if not parts:
            return None
        first = parts[0].form
        updates = {form: self._update(form, form == first) for form in {each.form for each in parts}}
        if not all(updates.values()):
            return None
        shared: list[Any] = [states[name].view((*extent(k.extent, layout.shape), *k.extra)) for name, k in kind.small]
        shared += [getattr(tiles.reading, name) for name, _, _ in kind.reading]
        shared += tiles.scalars.single, tiles.scalars.double
        if kind.draws:
            shared.append(torch.full((), *tiles.keys(), dtype=torch.int32, device=kind.device))
        groups = [kept.group for kept in kind.elements]
        if not kind.cut:
            shapes = [parts[0].shape(kind.group, group) for group in groups]
            args = [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True)]  # type: ignore[arg-type]
            return updates[first].run(*shared, *args)  # type: ignore[union-attr, no-any-return]
        return run_cut(updates, tiles, parts, shared, groups, tensors)  # type: ignore[arg-type]


def _fits(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether compiled code takes a tensor."""
    return tensor.dtype is dtype and tensor.is_contiguous() and tensor.device == device


def decide_compilation(requested: bool | str, records: Collection[ParamRecord]) -> bool:
    """Returns whether to compile: as requested, or with "auto" where it pays.

    Raises:
        ConfigError: it is True where there is no compiler that works.
    """
    devices = {record.param.device.type for record in records}
    if requested is True and not _get_current_dispatch_mode():
        for device in devices - {"meta"}:
            try:
                try_compiler(device)
            except Exception as error:
                raise ConfigError(f"compile=True, but compiling for {device!r} fails; use 'auto': {error}") from error
    size = sum(r.span.held for r in records if r.param.requires_grad)
    return requested is True or (requested == "auto" and size >= COMPILE_FROM and all(map(has_compiler, devices)))


def has_compiler(device: str) -> bool:
    """Returns whether a compiler for a type of device is installed."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device == "meta" or importlib.util.find_spec("triton") is not None  # "meta" is a GPU that is planned for
