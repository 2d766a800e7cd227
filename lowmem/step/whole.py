"""Updates as one call: `rule.update` of a parameter that is one tile, compiled once for all parameters of its kind."""

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowmem.placements.record import Kept, ParamRecord
from lowmem.rules import ENGINE_KEYS, ParamSpec, UpdateRule
from lowmem.tiles.graph import Compiler, Numbers, Size, Sizes, compiled, trace
from lowmem.tiles.storage import Held, Storage, golden_ratio_noise, noise_key, part_name
from lowmem.tiles.sweep import Reading
from lowmem.tiles.whole import LARGEST, UntraceableError, WholeSweep, blocks

logger = logging.getLogger(__name__)

# Keys of a parameter group that no update reads.
_NOT_READ = frozenset((*ENGINE_KEYS, "params", "param_names", "initial_lr"))

# Of one parameter. With more, such as when a number that is fixed changes in every step, it is swept pass by pass.
SPECIALISATIONS = 16

# The tensors that a `Reading` may have.
_READ = tuple(field.name for field in fields(Reading) if field.name != "sums_squares")

# A number among hyperparameters: its name, and its position if it is in a tuple.
Number = tuple[str, int | None]


class Division(NamedTuple):
    """Hyperparameters that compiled code is special to, as text, and those that it is given as numbers at each call."""

    fixed: tuple[tuple[str, str], ...]
    numbers: tuple[Number, ...]


class Hyper:
    """The hyperparameters of a group, as they are at one time.

    Attributes:
        values: `_values` of the group with copies of lists and dicts, to see whether one has changed.
        numbers: the floats.
        divisions: into fixed ones and numbers. A rule that asks whether a number is zero, say, can be traced only if
            the number is fixed: in the second division all but `lr` are.
    """

    def __init__(self, group: Mapping[str, Any], rule: UpdateRule) -> None:
        self.values = [copy.deepcopy(each) if isinstance(each, list | dict) else each for each in _values(group)]
        self.numbers: dict[Number, float] = {}
        fixed = {}
        for name, value in group.items():
            if name in _NOT_READ:
                continue
            if isinstance(value, float) or (type(value) is int and isinstance(rule.defaults.get(name), float)):
                self.numbers[name, None] = float(value)
            elif isinstance(value, tuple | list) and value and all(isinstance(each, float) for each in value):
                self.numbers |= {(name, i): each for i, each in enumerate(value)}
            else:
                fixed[name] = repr(value)
        lr = ("lr", None)
        other = {f"{name} {i}": repr(value) for (name, i), value in self.numbers.items() if (name, i) != lr}
        self.divisions = (
            Division(tuple(sorted(fixed.items())), tuple(self.numbers)),
            Division(tuple(sorted((fixed | other).items())), tuple(self.numbers.keys() & {lr})),
        )
        self.results: dict[Update, tuple[int, list[Tensor]]] = {}  # of a step


@dataclass(frozen=True)
class Blocks:
    """A parameter in blocks: [batch, count, rows, cols * group], where `rows` is 0 if each slice is a single line."""

    batch: Size
    count: Size
    rows: Size
    cols: Size
    group: int

    def shape(self, argument: Kept) -> tuple[Size, ...]:
        """A tensor of a parameter in such blocks."""
        batch, count, rows, cols, group = self.batch, self.count, self.rows, self.cols, self.group
        line = rows == 0
        if argument.extent == "full":
            shape = batch, count, 1 if line else rows, cols
            return shape if group == 1 else (*shape, group // argument.group)
        if argument.extent == "row":
            return batch, 1 if line else count * rows
        if argument.extent == "col":
            return batch, count * cols * group if line else cols * group
        return batch, *argument.extra


@dataclass(frozen=True)
class Kind:
    """What a compiled update is special to.

    rule: or its class, if it has no attributes of its own.  storage: of the weight.  states: storages of those of the
    parameter's size.  arguments: the gradient, the parameter, and what is kept for it.  batched: there are several
    slices of the batch.  lines: each is a single line.  reading: name, dtype and number of dimensions of its tensors.
    division: see `Hyper`.
    """

    rule: Any
    spec: ParamSpec
    storage: Storage
    states: tuple[tuple[str, Storage], ...]
    arguments: tuple[tuple[str, Kept], ...]
    device: torch.device
    batched: bool
    lines: bool
    reading: tuple[tuple[str, torch.dtype, int], ...]
    sums_squares: bool
    division: Division

    @property
    def group(self) -> int:
        """Elements of a row that are encoded together by some storage."""
        return max(argument.group for _, argument in self.arguments)

    def draws(self, noise: str) -> bool:
        """Whether a storage draws such noise."""
        return any(storage.noise == noise for storage in (self.storage, *dict(self.states).values()))


class Update:
    """A compiled update.

    Its arguments are those of its kind, the tensors of the reading, the key of the noise if some is drawn, and what is
    computed from its numbers: the step, the noise that a step shares, and those of the kind.

    Args:
        rule, group: of a parameter of this kind.
    """

    def __init__(self, kind: Kind, rule: UpdateRule, group: Mapping[str, Any]) -> None:
        self.kind, self.draws = kind, kind.draws("element")
        sizes = Sizes()
        batch, count, rows, cols = (sizes.size(*example) for example in EXAMPLE.items())
        here = Blocks(batch if kind.batched else 1, count, 0 if kind.lines else rows, cols, kind.group)
        args = [sizes.tensor(here.shape(each), each.dtype, kind.device) for _, each in kind.arguments]
        args += [sizes.tensor((1,) * ndim, dtype, kind.device) for _, dtype, ndim in kind.reading]
        if self.draws:
            args.append(sizes.tensor((), torch.int32, kind.device))
        numbers = sizes.tensor((2 + len(kind.division.numbers),), torch.float64, torch.device("cpu"))
        try:
            graph = trace(lambda *args: self._update(rule, group, args), (*args, numbers))
        except Exception as error:  # a rule may do anything that PyTorch cannot trace
            raise UntraceableError(str(error)) from error
        self._numbers = Numbers(graph)
        self._run = compiled(graph, sizes, (*args, *self._numbers.fake(sizes, kind.device)))

    def _update(self, rule: UpdateRule, group: Mapping[str, Any], args: Sequence[Tensor]) -> list[Tensor]:
        """What is compiled. Returns the gradient's sum of squares, if that is not known, and what the rule returns."""
        kind, numbers, given = self.kind, args[-1], iter(args)
        grouped = kind.group > 1
        grad, *tensors = (
            next(given).flatten(-2) if grouped and each.extent == "full" else next(given) for _, each in kind.arguments
        )
        states: dict[str, Any] = {name: tensor for (name, _), tensor in zip(kind.arguments[1:], tensors, strict=True)}
        weight = Held(kind.storage, tuple(states.pop(part.name) for part in kind.storage.parts))
        for name, storage in kind.states:
            states[name] = Held(storage, tuple(states.pop(part_name(name, part.name)) for part in storage.parts))
        reading = Reading(**{name: next(given) for name, _, _ in kind.reading}, sums_squares=kind.sums_squares)
        key = next(given) if self.draws else None
        sweep = WholeSweep(weight, grad, reading, lines=kind.lines, noise_key=key, shared=numbers[1])
        hyper = dict(group)
        for i, (name, position) in enumerate(kind.division.numbers, start=2):
            if position is None:
                hyper[name] = numbers[i]
            else:
                hyper[name] = (*hyper[name][:position], numbers[i], *hyper[name][position + 1 :])
        size = rule.update(sweep, kind.spec, states, hyper, numbers[0])  # type: ignore[arg-type]
        measured = [] if reading.square_sums is not None else [sweep.square_sums]
        return measured if size is None else [*measured, size.view(())]

    def __call__(self, args: list[Tensor], hyper: Hyper, step: int) -> list[Tensor]:
        """`args` are all but the numbers."""
        at_step, results = hyper.results.get(self, (None, []))
        if at_step != step:
            shared = golden_ratio_noise(step) if self.kind.draws("step") else 0.0
            values = (step, shared, *(hyper.numbers[number] for number in self.kind.division.numbers))
            results = self._numbers.results(values, self.kind.device)
            hyper.results[self] = step, results
        return self._run(*args, *results)  # type: ignore[no-any-return]


# Sizes for which Inductor plans: how loops are divided among threads, or a GPU's blocks, and which sums are so long
# that they are taken in parts (from 4,096 on). Those of a large parameter.
EXAMPLE = {"batch": 8, "count": 1024, "rows": 16, "cols": 4096}

_UPDATES: dict[Kind, Update | None] = {}


def _compile(kind: Kind, record: ParamRecord) -> Update | None:
    """The compiled update of a kind of parameters, to which `record` belongs; None if there is none."""
    if kind not in _UPDATES:
        start = time.perf_counter()
        _UPDATES[kind] = None
        try:
            _UPDATES[kind] = Update(kind, record.rule, record.group)
        except UntraceableError as error:
            logger.info("%s of rule %s is compiled pass by pass: %s", record.name, record.rule.name, error)
        except Exception as error:
            Compiler.give_up(error)
        Compiler.seconds += time.perf_counter() - start
    return _UPDATES[kind]


class Bound(NamedTuple):
    """A compiled update with the shapes in which it takes the tensors of one parameter."""

    update: Update
    shapes: tuple[tuple[Size, ...], ...]
    states: tuple[str, ...]


class WholeUpdates:
    """Updates parameters that are one tile by compiled code."""

    def __init__(self) -> None:
        self._hyper: dict[int, Hyper] = {}  # by the id of their group

    def update(
        self,
        record: ParamRecord,
        weight: Sequence[Tensor],
        grad: Tensor,
        states: Mapping[str, Tensor],
        reading: Reading,
        step: int,
        seed: int,
    ) -> bool:
        """Updates a parameter, given the tensors of its weight and states. False if it cannot, and has done nothing."""
        hyper = self._hyper_of(record)
        if hyper is None or not all(tensor.is_contiguous() for tensor in (grad, *weight)):
            return False
        tensors = [getattr(reading, name) for name in _READ]
        like = grad.dtype, *(tensor is None for tensor in tensors)
        bound = None
        for division in hyper.divisions:
            if (like, division.fixed) not in record.whole:
                record.whole[like, division.fixed] = self._bind(record, weight, grad, reading, division)
            if (bound := record.whole[like, division.fixed]) is not None:
                break
        if bound is None:
            return False
        elements = (grad, *weight, *(states[name] for name in bound.states))
        wanted = zip(elements, bound.update.kind.arguments, strict=True)
        if not all(t.dtype is its.dtype and t.is_contiguous() and t.device == grad.device for t, (_, its) in wanted):
            return False
        args = [tensor.view(shape) for tensor, shape in zip(elements, bound.shapes, strict=True)]
        args += [tensor for tensor in tensors if tensor is not None]
        if bound.update.draws:
            key = noise_key(seed, step, record.name)
            args.append(torch.full((), key, dtype=torch.int32, device=grad.device))
        results = bound.update(args, hyper, step)
        record.square_sum = (results.pop(0) if reading.square_sums is None else reading.square_sums).view(())
        record.size = results[0] if results else None
        return True

    def _hyper_of(self, record: ParamRecord) -> Hyper | None:
        """The hyperparameters of its group as they are now; None if a tensor is among them."""
        values = _values(record.group)
        hyper = self._hyper.get(id(record.group))
        if hyper is None or hyper.values != values:
            if any(isinstance(value, Tensor) for value in values):
                return None
            hyper = self._hyper[id(record.group)] = Hyper(record.group, record.rule)
        return hyper

    def _bind(
        self, record: ParamRecord, weight: Sequence[Tensor], grad: Tensor, reading: Reading, division: Division
    ) -> Bound | None:
        assert record.layout is not None and record.spec is not None and record.storage is not None
        if not record.layout.in_order:
            return None
        kept = record.tensors
        arguments = (("gradient", Kept(grad.dtype)), ("", Kept(weight[0].dtype)), *kept.items())
        group = max(each.group for _, each in arguments)
        batch, rows, cols = record.layout.shape
        divided = blocks(rows, cols)
        if divided is None or divided[2] % group or batch * rows * cols >= LARGEST:
            return None
        count, height, width = divided
        here = Blocks(batch, count, 0 if rows == 1 else height, width // group, group)
        rule = record.rule if vars(record.rule) else type(record.rule)
        read = [(name, tensor) for name in _READ if (tensor := getattr(reading, name)) is not None]
        kind = Kind(
            rule,
            record.spec,
            record.storage,
            tuple(record.state_storages.items()),
            arguments,
            grad.device,
            batched=batch > 1,
            lines=rows == 1,
            reading=tuple((name, tensor.dtype, tensor.ndim) for name, tensor in read),
            sums_squares=reading.sums_squares,
            division=division,
        )
        if len(record.whole) >= SPECIALISATIONS or (update := _compile(kind, record)) is None:
            return None
        shapes = tuple(here.shape(argument) for _, argument in arguments)
        return Bound(update, shapes, tuple(kept)[len(weight) - 1 :])


def _values(group: Mapping[str, Any]) -> list[Any]:
    """The types and values of what updates read of a group."""
    values = [value for name, value in group.items() if name not in _NOT_READ]
    return [*map(type, values), *values]
