"""Parameter records: one parameter of an optimizer with its group, program and tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lowmem.errors import StepError
from lowmem.placements.base import ParamEntry, Shard
from lowmem.rules import ENGINE_KEYS, UpdateRule
from lowmem.step.program import Program, make_program, rounding_of
from lowmem.tiles.quantized import tensors_of
from lowmem.tiles.storage import ROUNDED_DTYPES, StoredTensor

Group = dict[str, Any]


@dataclass(frozen=True, eq=False)
class AddedGroup:
    """A parameter group with its rule.

    Attributes:
        live: the dict in `param_groups`, which schedulers edit.
        settings: a copy from when the group was added. Loading states replaces "auto" by their storage.
        count: the number of its parameters at that time.
        programs: the programs of its parameters, by the properties that these share.
        memory: the tensors that its rule stores for its clipping by norm; empty before the first step.
    """

    live: Group
    rule: UpdateRule
    settings: Group
    count: int
    programs: dict[Any, Program] = field(default_factory=dict, init=False, repr=False)
    memory: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def is_by_name(self) -> bool:
        """True if a hyperparameter lists parameter names, so that parameters of one program may become different."""
        groups = self.settings, self.live
        values = [value for group in groups for key, value in group.items() if key not in ("params", "param_names")]
        values += [item for value in values if isinstance(value, tuple) for item in value]
        return any(isinstance(value, Mapping | list) for value in values)

    def edits(self, number: int, group: Group) -> Iterable[str]:
        """Yields the differences between this group and entry `number` of `param_groups`."""
        if group is not self.live:
            yield f"parameter group {number}"
        if self.live.get("params") is not self.settings["params"] or len(self.live["params"]) != self.count:
            yield f"'params' of parameter group {number}"
        for key in ENGINE_KEYS:
            if self.live.get(key) != self.settings[key]:
                yield f"{key!r} of parameter group {number}"


@dataclass(eq=False)
class ParamRecord(ParamEntry):
    """One parameter of a `FusedOptimizer`.

    Attributes:
        group: the parameter group.
        program: how the parameter is updated. It is set when the parameter is claimed.
        form: the result of `Shard.form` for which the program was chosen; None before that.
        extra: the other tensors of the weight's storage, by name; empty before its first update, or if it is quantized.
        version: the result of `Shard.version` for the weight that `extra` belongs to; None if `extra` was loaded.
    """

    group: AddedGroup
    program: Program = field(init=False, repr=False)
    form: tuple[Any, ...] | None = field(default=None, init=False)
    extra: dict[str, Tensor] = field(default_factory=dict, init=False)
    version: tuple[Any, ...] | None = field(default=None, init=False)

    @property
    def rule(self) -> UpdateRule:
        """The rule of its group."""
        return self.group.rule

    @property
    def handles_nonfinite(self) -> bool:
        """True if its rule itself handles Inf and NaN in its gradient."""
        return self.rule.handles_nonfinite(self.group.live)

    def program_of(self, group: Mapping[str, Any], shard: Shard) -> Program:
        """Returns how the parameter is updated and stored if its group has these settings; see `make_program`."""
        return make_program(ParamEntry(self.name, self.param, shard.span(self.param)), self.rule, group, shard)

    def choose_program(self, shard: Shard, state: Mapping[str, Any] | None = None) -> None:
        """Chooses how the parameter is updated and stored, also after it has changed. state: its current states, whose
        storage does not change; None if it does not have any yet.

        Raises:
            StepError: its states, residual or master copy no longer fit. Nothing changes.
        """
        was, form, group = self.form, shard.form(self.param), self.group.live
        if was is None or state is None:
            program = self.program_of(group, shard)
        else:
            before = self.program
            unchanged = {"state_storage": before.state_storage} if before.state_storage else {}
            program = self.program_of({**group, **unchanged}, shard)
            # residuals and master copies belong to one weight; third-party optimizer states may, too
            of_weight = before.extra_names or program.extra_names or not state.keys() <= program.tensor_specs.keys()
            fits = before.tensor_specs == program.tensor_specs and before.span.shape == program.span.shape
            moved = was[1:2] != form[1:2]  # forms are (dtype, device, shape, stride), or (dtype,) of a shard
            if was[:3] != form[:3] and (of_weight or moved or not fits):
                each = zip(("dtype", "device", "shape"), was, form, strict=False)
                changes = ", ".join(f"{name} from {old} to {new}" for name, old, new in each if old != new)
                raise StepError(
                    f"parameter {self.name!r} has changed ({changes}), and its optimizer state no longer fits. Create "
                    "the optimizer after model.to(...), convert the model back, or load a state that fits"
                )
        self.span, self.form = program.span, form
        like = self.param.dtype, self.param.device, self.span, program.spec, program.ranks
        self.program = self.group.programs.setdefault((*like, program.weight, *program.states.items()), program)

    def put_extra(self, tensors: dict[str, Tensor], shard: Shard) -> None:
        """Loads the saved tensors of the weight's storage."""
        if (quantized := shard.quantized(self.param)) is None:
            self.extra, self.version = tensors, None
        else:
            for part, saved in zip(quantized.parts, tensors.values(), strict=True):
                part.copy_(saved)

    def written(self, shard: Shard, tensor: Tensor) -> None:
        """Called when an update has changed this rank's shard of the weight, which `Shard.read` returned."""
        shard.write(self.param, tensor)
        self.version = shard.version(self.param) if self.extra else None

    def require_no_gradient(self) -> None:
        """Raises `StepError` if the parameter has a gradient to which the next one would be added."""
        if self.param.grad is not None and self.trained:
            raise StepError(
                f"parameter {self.name!r} already has a gradient in .grad, which would be added to the gradient of "
                "this step. Call zero_grad() first. Gradients cannot accumulate in .grad, because the hooks free them."
            )


class Operands(NamedTuple):
    """The operands of an update: a parameter, or a stack of parameters that have the same program."""

    records: Sequence[ParamRecord]
    shard: Tensor  # the result of `Shard.read`, or a stack of them
    extra: Mapping[str, Tensor]  # the other tensors of the weight's storage
    grad: Tensor
    states: dict[str, Any]

    @property
    def program(self) -> Program:
        """The program of the parameter, or of the stack."""
        program = self.records[0].program
        return program if len(self.records) == 1 else program.stacked(len(self.records))

    @property
    def weight(self) -> StoredTensor:
        """The shard with the other tensors of its storage."""
        return StoredTensor(self.records[0].program.weight, (*tensors_of(self.shard), *self.extra.values()))

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that the compiled update of a parameter depends on. `states` may have values of users."""
        records, shard, extra, grad, states = self
        tensors = (*tensors_of(shard), *extra.values(), *states.values())
        pointers = [each.data_ptr() for each in tensors if isinstance(each, Tensor)]
        return records[0].program, grad.dtype, grad.is_contiguous(), grad.data_ptr() % 16 == 0, pointers


def weights_in_words(records: Iterable[ParamRecord]) -> str:
    """Describes the dtypes, formats and rounding of weights."""
    return ", ".join(dict.fromkeys(map(_weight_in_words, records)))


def states_in_words(records: Iterable[ParamRecord]) -> str:
    """Lists the storages of elementwise states of matrices."""
    programs = (record.program for record in records if record.claimed)
    return ", ".join(dict.fromkeys(p.state_storage for p in programs if p.state_storage and len(p.span.shape) > 1))


def _weight_in_words(record: ParamRecord) -> str:
    if record.claimed and record.program.weight.is_quantized:
        return f"{record.program.weight} (rounding stochastic)"
    dtype = record.param.dtype
    how = f"rounding {rounding_of(record.rule, record.group.live, dtype)}" if dtype in ROUNDED_DTYPES else "exact"
    return f"{str(dtype).removeprefix('torch.')} ({how})"
