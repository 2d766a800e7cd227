"""Compiles programs, once for each kind of parameters, and runs the compiled code."""

import importlib.util
import logging
import operator
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowmem.errors import ConfigError
from lowmem.kernels import Kernels, Member
from lowmem.kernels import try_compiler as try_triton
from lowmem.placements.ranks import on_rank
from lowmem.rules import ParamSpec, UpdateRule
from lowmem.step.parameters import Parameters
from lowmem.step.program import Program
from lowmem.step.record import Operands, ParamRecord
from lowmem.step.results import Result
from lowmem.tiles.blocks import Form, divisible_places, form_of
from lowmem.tiles.graph import try_compiler
from lowmem.tiles.layout import Place
from lowmem.tiles.quantized import QuantizedWeight
from lowmem.tiles.stages import OneTile, Stages
from lowmem.tiles.storage import Float
from lowmem.tiles.stored import StoredTiles
from lowmem.tiles.tile import GRAD, extent
from lowmem.tiles.traced import Arguments, Kind, TracedUpdate, signature, trace_update

logger = logging.getLogger(__name__)

# With fewer trainable elements, compilation takes longer than it saves.
COMPILE_FROM = 1 << 25

# Types of devices whose updates are Triton kernels. For other devices, Inductor compiles the updates.
KERNELS = {"cuda"}

Update = Stages | OneTile | Kernels

# Compiled updates by rule, or by its class if the rule has no attributes. Parameters of all sizes share them.
# None for each kind of parameters that cannot be traced.
_TRACED: WeakKeyDictionary[Any, dict[tuple[ParamSpec, Kind] | Kind, "Code | None"]] = WeakKeyDictionary()


class BoundUpdate(NamedTuple):
    """The compiled update of one parameter, with the arguments that do not change from step to step."""

    key: Any  # `Operands.key`
    form: Any  # form of its reading, and names of its numbers
    update: Update
    places: Sequence[Place]  # positions of its tiles
    args: Arguments  # views of its states
    alive: Sequence[ReferenceType[Tensor]]  # the states. When one is freed or replaced, all views are freed


class Compilation:
    """The compiled code of one optimizer. Either all ranks that train a model use it or none does, because compiled and
    eager code sum in different orders. If parameters are sharded, ranks agree on new code when they need it. Replicas
    may update in different orders, so they agree at the end of the step, and use the code from the next step on.

    A compiler error may be temporary, such as a full disk. After an error, updates are not compiled until the next
    step whose number is a power of 10.

    Attributes:
        seconds: total compile time in this process.
        failure: the error that prevents compilation, or None.
    """

    seconds: ClassVar[float] = 0.0
    failure: str | None = None

    def __init__(self, parameters: Parameters) -> None:
        self._parameters, self._requested = parameters, parameters.config.compile
        self._step, self._decided = 0, False
        self._unsettled: dict[tuple[Program, Any], Update | None] = {}  # code on which ranks have not yet agreed
        self._error: str | None = None  # compiler error on this rank since ranks last agreed
        self._bound: dict[ParamRecord, BoundUpdate] = {}
        self._warns = self._requested is True  # whether to warn about updates that are not compiled

    @property
    def active(self) -> bool:
        """True if updates are compiled now."""
        return self._decided and self.failure is None

    def decide(self) -> None:
        """Decides whether to compile: as requested, or with "auto" if the model is large enough. Every rank calls it.

        Raises:
            ConfigError: `compile=True`, but some rank has no working compiler. Raised on every rank.
        """
        records, requested = self._parameters.records.values(), self._requested
        size = sum(r.span.numel for r in records if r.param.requires_grad)  # full sizes, so all ranks decide alike
        wanted = requested is True or (requested == "auto" and size >= COMPILE_FROM)
        devices = {record.param.device.type for record in records} if wanted else set()
        missing = next(filter(None, (missing_compiler(device, tries=requested is True) for device in devices)), None)
        failure = self._parameters.placement.agree(missing)
        if failure is not None and requested is True:
            raise ConfigError(f"compile=True, but {failure}. Use 'auto'")
        if failure is not None and missing is None:  # the cause is on another rank
            logger.warning("updates are not compiled, because %s", failure)
        self._decided = wanted and failure is None
        self._allow_decoding()

    def _allow_decoding(self) -> None:
        if any(self._parameters.shard.quantized(param) is not None for param in self._parameters.records):
            QuantizedWeight.compiled = self._decided

    def begin(self, step: int) -> None:
        """Begins a step. If its number is a power of 10, clears an earlier compiler error."""
        self._step = step
        if str(step).rstrip("0") == "1":
            self.failure = None
            self._allow_decoding()

    def raise_if_failed(self) -> None:
        """Raises `ConfigError`, once per failure, if compiling was requested and has failed."""
        if self._requested is True and self.failure is not None:
            failure, self.failure = self.failure, None
            raise ConfigError(f"compile=True, but compiling failed; use 'auto' or False: {failure}")

    def run(self, operands: Operands, tiles: StoredTiles) -> Result | None:
        """Updates a parameter as `Program.run` does, but with compiled code. Returns None if it has no compiled code.

        Every rank calls it for the same parameters, even if its shard is empty.
        """
        bound = self.bind(operands, tiles)
        if bound is None:
            return None
        assert not isinstance(bound.update, Kernels)
        args = bound.args | _numbers(tiles)
        results = bound.update.run(tiles, bound.places, args, operands.program.full_states(operands.states))
        return Result.of(results, tiles.reading)

    def by_kernels(self, record: ParamRecord) -> bool:
        """Returns whether kernels update a parameter, unless its tensors do not allow it."""
        return self.active and record.param.device.type in KERNELS and not record.program.rule.materializes

    def are_bound(self, records: Sequence[ParamRecord], bounds: Sequence[BoundUpdate]) -> bool:
        """Returns whether `bind` would return these updates again, if no key and no form has changed."""
        return not is_observed() and all(map(operator.is_, map(self._bound.get, records), bounds))

    def bind(self, operands: Operands, tiles: StoredTiles) -> BoundUpdate | None:
        """Returns the compiled update of a parameter, or None if it has no compiled code. Every rank calls it for the
        same parameters, even if its shard is empty.
        """
        (record,), bound = operands.records, None
        if not record.program.rule.materializes:
            key, form = None if is_observed() else operands.key, (tiles.reading.form, tiles.scalars.names)
            bound = self._bound.get(record)
            if bound is None or bound.key != key or bound.form != form:
                bound = self._bind(operands, tiles, key, form)
        if bound is None:
            self._warn(record)
        return bound

    def _bind(self, operands: Operands, tiles: StoredTiles, key: Any, form: Any) -> BoundUpdate | None:
        """Binds an update, unless `key` is None, to its code and to its constant arguments."""
        (record,), program, bound = operands.records, operands.program, self._bound
        bound.pop(record, None)
        tensors = {name: state for name, state in operands.states.items() if torch.is_tensor(state)}
        data = {name: tensor.data for name, tensor in tensors.items()}  # their views do not keep the states alive
        variant, places, fits = _variant_of(operands._replace(states=data), tiles)
        small: Arguments | None = None
        if fits and key is not None:
            small = {
                (state.extent, name): data[name].view((*extent(state.extent, tiles.shape), *state.extra))
                for name, state in program.small_states.items()
            }
        update = self._code(program, tiles, (tiles.grad.dtype, form, variant), small)
        if update is None or small is None:
            return None
        args = {} if isinstance(update, Kernels) else small  # kernels read addresses from tables
        if isinstance(update, OneTile):
            args |= update.in_blocks(program.full_states(data), places[0].rect.size)
        alive = [ref(state, lambda _: bound.pop(record, None)) for state in tensors.values()]
        bound[record] = BoundUpdate(key, form, update, places, args, alive)
        return bound[record]

    def _code(self, program: Program, tiles: StoredTiles, key: Any, small: Arguments | None) -> Update | None:
        """Returns the code of an update, which is compiled if it is new, or None.

        Args:
            key: the key of the code in `Program.compiled`.
            small: the small states; None if code cannot update the tensors of this rank.
        """
        several = bool(self._parameters.shard.process_groups)
        if small is None and not several:
            return None
        if key not in program.compiled and (program, key) not in self._unsettled:
            self._unsettled[program, key] = None if small is None else self._compile(program, tiles, key[-1], small)
            if program.ranks is not None or not several:  # sharded: all ranks update in the same order
                self.settle()
        return program.compiled.get(key)

    def _warn(self, record: ParamRecord) -> None:
        """Warns once about an update that is not compiled although compile=True. Compiler errors are raised instead."""
        if self._warns and self.failure is None and not (self._unsettled or is_observed()):
            self._warns = False
            cause = "the shape or strides of the parameter do not allow it"
            if not is_traceable(record.rule):
                cause = "the rule is a third-party optimizer" if record.rule.materializes else "it cannot be traced"
            logger.warning(
                "compile=True, but the update of parameter %r by rule %r is not compiled: %s. There may be more such "
                "parameters. They are updated by slower code with the same result", record.name, record.rule.name,
                cause,
            )  # fmt: skip

    def _compile(self, program: Program, tiles: StoredTiles, variant: Any, small: Arguments) -> Update | None:
        """Compiles an update. Returns None if this fails, or has failed in this step, or the rule cannot be traced."""
        kind = Kind(
            ((GRAD, Float(tiles.grad.dtype)), ("param", program.weight), *program.states.items()),
            program.group,
            signature(small | _numbers(tiles)),
            tiles.device,
            batched=tiles.shape[0] > 1,
            numbers=tiles.scalars.names,
        )
        update, start = None, time.perf_counter()
        try:
            update = compiled_update(program, kind, variant) if self._error is None else None
        except Exception as error:
            self._error = f"{type(error).__name__}{on_rank()}: {error}"
        Compilation.seconds += time.perf_counter() - start
        return update

    def settle(self) -> None:
        """Called when a step ends. Enables new code unless compiling has failed on any rank."""
        if not self._unsettled:
            return
        self.failure = self._parameters.placement.agree(self._error)
        if self.failure is None:
            for (program, code_key), update in self._unsettled.items():
                program.compiled[code_key] = update
        else:
            cost = " and take tens of launches per pass and 4M elements" if torch.cuda.is_available() else ""
            again = "" if self._requested is True else f" until step {10 ** len(str(self._step))}"
            logger.warning("compiling failed: %s. Updates are not compiled%s%s", self.failure, again, cost)
        self._error, self._unsettled = None, {}


def is_observed() -> bool:
    """Returns whether a dispatch mode (fake tensors, memory tracker) observes operations, which compiled code hides."""
    return _get_current_dispatch_mode() is not None


def _variant_of(operands: Operands, tiles: StoredTiles) -> tuple[tuple[Any, Sequence[Form]], Sequence[Place], bool]:
    """Returns the variant of a parameter's code (the arguments of `Code.update_for`), the places of its tiles for
    Inductor, and whether compiled code can update these tensors.
    """
    program, grad, states = operands.program, operands.grad, operands.program.full_states(operands.states)
    parts = *operands.weight.parts, *(part for state in states.values() for part in state.parts)
    dtypes = [part.dtype for storage in (program.weight, *program.states.values()) for part in storage.parts]
    fits = [part.dtype for part in parts] == dtypes
    fits = fits and all(each.is_contiguous() and each.device == tiles.device for each in (grad, *parts))
    if tiles.device.type in KERNELS:
        member = member_of(operands)
        # shards are treated as unaligned, because ranks would have to agree on alignment
        aligned = program.ranks is None and member.is_aligned and grad.data_ptr() % 16 == 0
        return ((tiles.shape[1] == 1, aligned), ()), (), fits and member.fits
    places = divisible_places(tiles.layout, program.group) or []
    forms = tuple(dict.fromkeys(form_of(place.rect.size) for place in places))
    return (len(places) == 1 and program.ranks is None, forms), places, fits and bool(places)


def _numbers(tiles: StoredTiles) -> Arguments:
    """Returns the arguments of compiled code that change in each step, except for the tensors of a tile."""
    args: Arguments = {**tiles.reading.tensors}
    args["numbers", "single"], args["numbers", "double"] = tiles.scalars.single, tiles.scalars.double
    if tiles.keys is not None:
        args["key", ""] = tiles.keys
    return args


class Code:
    """The code that is generated from the trace of an update: for Triton, or on other devices for Inductor."""

    def __init__(self, trace: TracedUpdate) -> None:
        self._trace = trace
        self._updates: dict[Any, Update] = {}

    def update_for(self, kind: Any, forms: Sequence[Form]) -> tuple[Update, Sequence[Any]]:
        """Returns the update of a kind of parameters with tiles of these forms, and its code, which is not compiled.

        kind: for Inductor, whether they are one tile; for Triton, the options of `Kernels`.
        """
        if kind not in self._updates:
            if self._trace.kind.device.type in KERNELS:
                one_row, aligned = kind
                self._updates[kind] = Kernels(self._trace, one_row=one_row, aligned=aligned)
            else:
                self._updates[kind] = OneTile(self._trace) if kind else Stages(self._trace)
        update = self._updates[kind]
        return update, [update] if isinstance(update, Kernels) else update.codes(forms)


def compiled_update(program: Program, kind: Kind, variant: Any) -> Update | None:
    """Returns the compiled update of a kind of parameters; None if the rule cannot be traced. Raises the compiler's
    error. variant: see `_variant_of`.
    """
    rule, spec = program.rule, program.spec
    codes = _TRACED.setdefault(_key(rule), {})
    if kind in codes:
        return None
    try:
        if (code := codes.get((spec, kind))) is None:
            traced = trace_update(kind, lambda sweep, states: rule.update(sweep, spec, states), alike=spec.alike)
            code = codes[spec, kind] = Code(traced)
        update, uncompiled = code.update_for(*variant)
    except Exception as error:  # from the rule or PyTorch's tracer, such as for a branch on a tensor's value
        if None not in codes.values():  # warn once per rule
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            shape = list(program.span.shape)
            logger.warning("updates of rule %s are not compiled: %s (parameters such as %s)", rule.name, reason, shape)
        codes.pop((spec, kind), None)
        codes[kind] = None  # without the spec, which may refer to a parameter group
        return None
    for each in uncompiled:
        each.compile()
    return update


def member_of(operands: Operands, numbers_offset: int = 0, key_index: int = 0) -> Member:
    """Returns the tensors of a parameter as kernel arguments, with `numbers_offset` and `key_index` as in `Member`."""
    program, states = operands.program, operands.states
    full = {"param": operands.weight, **program.full_states(states)}
    parts = {(name, n): part for name, each in full.items() for n, part in enumerate(each.parts)}
    small = {(str(state.extent), name): states[name] for name, state in program.small_states.items()}
    return Member(program.layout, parts, small, numbers_offset, key_index)


def is_traceable(rule: UpdateRule) -> bool:
    """Returns whether the updates of a rule can be compiled. Tracing may still show that they cannot."""
    codes = _TRACED.get(_key(rule))
    return not rule.materializes and (not codes or any(codes.values()))


def _key(rule: UpdateRule) -> Any:
    return rule if vars(rule) else type(rule)


def missing_compiler(device: str, *, tries: bool) -> str | None:
    """Returns why updates cannot be compiled for a type of device, or None. tries: whether to compile a test."""
    if not tries:
        return None if has_compiler(device) else f"no compiler for {device!r} is installed{on_rank()}"
    if device == "meta" or is_observed():
        return None
    try:
        if device in KERNELS:
            try_triton()
        else:
            try_compiler(device)
    except Exception as error:
        return f"compiling for {device!r} fails{on_rank()}: {error}"
    return None


def has_compiler(device: str) -> bool:
    """Returns whether a compiler for a type of device is installed."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device == "meta" or importlib.util.find_spec("triton") is not None  # "meta": a planned GPU
