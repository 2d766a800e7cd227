"""Runs programs as compiled code, which is traced once for each kind of parameters."""

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowmem.errors import ConfigError
from lowmem.rules import ParamSpec, UpdateRule
from lowmem.step.program import Program, Result
from lowmem.step.record import ParamRecord
from lowmem.tiles.blocks import Form, form_of, pieces
from lowmem.tiles.graph import Compiler, try_compiler
from lowmem.tiles.stages import CompiledUpdate
from lowmem.tiles.storage import Float, Held
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.sweep import Sweep, Tiles
from lowmem.tiles.tile import extent
from lowmem.tiles.traced import GRAD, Arguments, Kind, signature

logger = logging.getLogger(__name__)

# With fewer trainable elements compilation takes longer than it saves.
COMPILE_FROM = 1 << 25

# Compiled updates, which parameters of all sizes share, by rule, or by its class if it has no attributes.
# None: the rule cannot be traced.
_TRACED: WeakKeyDictionary[Any, dict[tuple[ParamSpec, Kind], CompiledUpdate] | None] = WeakKeyDictionary()


def run_compiled(program: Program, tiles: StoredTiles, states: Mapping[str, Tensor]) -> Result | None:
    """Updates a parameter as `Program.run` does, but with compiled code. Returns None if there is none for it."""
    if program.rule.materializes or not (places := pieces(tiles.layout, program.group)):
        return None
    held = program.held(states)
    if not _fits(program, tiles, held.values()):
        return None
    args = _arguments(program, tiles, states)
    is_one = len(places) == 1 and program.ranks is None
    forms = tuple(dict.fromkeys(map(form_of, places)))
    # everything that may differ between updates of one program; all else in a kind is the program's
    varying = tiles.grad.dtype, forms, is_one, tiles.scalars.names, tiles.reading.form
    if varying not in program.compiled:
        kind = Kind(
            ((GRAD, Float(tiles.grad.dtype)), ("param", program.weight), *program.states.items()),
            program.group,
            signature(args),
            tiles.device,
            batched=tiles.shape[0] > 1,
            numbers=tiles.scalars.names,
            form=forms[0] if is_one else None,
        )
        program.compiled[varying] = traced(program.rule, program.spec, kind, forms)
    update: CompiledUpdate | None = program.compiled[varying]
    if update is None:
        return None
    results, square_sums = update.run(tiles, places, args, held), tiles.reading.square_sums
    return Result(results["square_sums"] if square_sums is None else square_sums, results.get("sizes"))


def _fits(program: Program, tiles: StoredTiles, states: Iterable[Held]) -> bool:
    """Returns whether the tensors have the dtypes, the device and the memory order of compiled code."""
    tensors = *tiles.weight.parts, *(part for state in states for part in state.parts)
    if [tensor.dtype for tensor in tensors] != program.dtypes:
        return False
    return all(tensor.is_contiguous() and tensor.device == tiles.device for tensor in (tiles.grad, *tensors))


def _arguments(program: Program, tiles: StoredTiles, states: Mapping[str, Tensor]) -> Arguments:
    """Returns the arguments of compiled code, except for the tensors of a tile."""
    args: Arguments = {**tiles.reading.tensors}
    for name, kept in program.small.items():
        args[kept.extent, name] = states[name].view((*extent(kept.extent, tiles.shape), *kept.extra))
    args["numbers", "single"], args["numbers", "double"] = tiles.scalars.single, tiles.scalars.double
    if program.draws:
        args["key", ""] = torch.full((), *tiles.keys(), dtype=torch.int32, device=tiles.device)
    return args


def traced(rule: UpdateRule, spec: ParamSpec, kind: Kind, forms: Sequence[Form]) -> CompiledUpdate | None:
    """Returns the compiled update of a kind of parameters, for tiles of these forms; None if there is none."""
    updates = _TRACED.setdefault(_key(rule), {})
    if updates is None or Compiler.failure is not None:
        return None

    def update(tiles: Tiles, states: dict[str, Any]) -> dict[Any, Tensor]:
        sweep = Sweep(tiles)
        sizes = rule.update(sweep, spec, states)
        results = {"square_sums": sweep.square_sums} if tiles.reading.square_sums is None else {}
        return results if sizes is None else {**results, "sizes": sizes.view(-1)}

    start = time.perf_counter()
    try:
        if (spec, kind) not in updates:
            updates[spec, kind] = CompiledUpdate(kind, update, forms[0])
        codes = updates[spec, kind].codes(forms)
    except Exception as error:  # of the rule, or of PyTorch's tracer, such as for a branch on the value of a tensor
        updates.clear()
        codes, _TRACED[_key(rule)] = [], None
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("updates of rule %s are not compiled: %s", rule.name, reason)
    try:
        for code in codes:
            code.compile()
    except Exception as error:
        updates.pop((spec, kind), None)
        Compiler.give_up(error)
    Compiler.seconds += time.perf_counter() - start
    return updates.get((spec, kind))


def is_traceable(rule: UpdateRule) -> bool:
    """Returns whether the updates of a rule can be compiled, as far as is known before they are traced."""
    return not rule.materializes and _TRACED.get(_key(rule), {}) is not None


def _key(rule: UpdateRule) -> Any:
    return rule if vars(rule) else type(rule)


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
    size = sum(r.span.numel for r in records if r.param.requires_grad)  # of full parameters: ranks decide alike
    return requested is True or (requested == "auto" and size >= COMPILE_FROM and all(map(has_compiler, devices)))


def has_compiler(device: str) -> bool:
    """Returns whether a compiler for a type of device is installed."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device == "meta" or importlib.util.find_spec("triton") is not None  # "meta" is a GPU that is planned for
