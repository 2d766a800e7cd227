"""Options of the fused optimizer and the layers, declared once for `FusedOptimizer`, trainers and YAML files."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

import torch

from lowmem import placements, rules
from lowmem.errors import ConfigError, did_you_mean, require_known
from lowmem.rules import UpdateRule, require
from lowmem.rules.rule import GROUP_KEYS
from lowmem.tiles import storage

Policy = Literal["auto", "immediate", "two_pass", "deferred"]


def valid_fields(options: Any, prefix: str = "") -> None:
    """Checks the fields of a dataclass whose type is `Annotated[..., check]`. prefix: of their names in errors."""
    for each in fields(options):
        for check in getattr(each.type, "__metadata__", ()):
            check(prefix + each.name, getattr(options, each.name))


def _is_scale(value: Any) -> bool:
    """Returns whether float32 can represent a value and its inverse."""
    limits = torch.finfo(torch.float32)
    return require.is_number(value) and limits.tiny <= value <= limits.max


def _is_loss_scale(value: Any) -> bool:
    """Returns whether a value is allowed for `loss_scale`."""
    named = value in (None, "dynamic") or isinstance(value, DynamicScale)
    return named or _is_scale(value) or (require.is_number(value) and value == 0)


_SCALE = require.check(_is_scale, "a number > 0 that float32 can represent")
_LOSS_SCALE = require.check(_is_loss_scale, "a number >= 0 (0: none), 'dynamic', a DynamicScale, or None")
_GROUPS = require.check(lambda value: isinstance(value, list | tuple), "a list: [{match: norm, rule: lomo}, ...]")
_HOME = require.check(
    lambda home: isinstance(home, str) and home not in ("", "disk"), "'host', or a folder such as '/mnt/fast/home'"
)
_POSITIVE = require.number("> 0", optional=True)
_COUNT = require.number(">= 1", whole=True)
_OPTIONAL_COUNT = require.number(">= 1", whole=True, optional=True)


@dataclass(frozen=True)
class DynamicScale:
    """A dynamic loss scale that is adapted as in `torch.amp.GradScaler`.

    It starts at `init_scale`. It is multiplied by `growth_factor` after `growth_interval` steps without an overflow,
    and by `backoff_factor` after an overflow, but never falls below `min_scale`. With `hysteresis` > 1, it decreases
    only after that many overflows since its last growth, as in Megatron.

    Raises:
        ConfigError: a value is out of range.
    """

    init_scale: Annotated[float, _SCALE] = 65536.0
    growth_factor: Annotated[float, require.number("> 1")] = 2.0
    backoff_factor: Annotated[float, require.number("> 0", "< 1")] = 0.5
    growth_interval: Annotated[int, _COUNT] = 2000
    min_scale: Annotated[float, _SCALE] = 1.0
    hysteresis: Annotated[int, _COUNT] = 1

    def __post_init__(self) -> None:
        valid_fields(self, "loss_scale.")
        require.that(self.init_scale >= self.min_scale, "loss_scale.init_scale", self.init_scale, "at least min_scale")


@dataclass(frozen=True, init=False)
class FusedConfig:
    """The options of a `FusedOptimizer`, except for the parameters. Other keyword arguments are hyperparameters of the
    rule: `FusedConfig(rule="adamw", weight_decay=0.1)`.

    Gradients are unscaled, clamped by `clip_value`, and then clipped by `clip_norm`, like `scaler.unscale_`,
    `clip_grad_value_` and `clip_grad_norm_` in this order. (AdaLomo measures norms before it clamps, as in its source.)

    Attributes:
        rule: a name (`lowmem.rules.table()`), an `UpdateRule`, a `torch.optim.Optimizer` class, or its import path. If
            None, trainers use the optimizer that their arguments name (AdamW by default), and loops use "adalomo".
        lr: learning rate. If None, trainers use their argument `learning_rate`, and loops the default of the rule.
        hyper: the other hyperparameters of the rule, by name.
        groups: parameter groups, if parameters are passed with names. Each group is a dict with a regular expression
            under "match", and optionally "rule" and hyperparameters of that rule. A parameter belongs to the first
            group whose expression is found in its name, or else to the default group. In a group with a "rule",
            hyperparameters that are not set, including `lr`, have the defaults of that rule.
        policy: "immediate": update in the hook. "two_pass": run backward twice, first to measure gradients. "deferred":
            store gradients until the step is known to be finite and its clip coefficient is computed. "auto": the
            cheapest exact policy for these options. It may change at the first `accumulate` (see `policy_reason`).
        clip_norm: the maximum norm over all gradients, as in `torch.nn.utils.clip_grad_norm_`, bit for bit in float32
            on a CPU. Raises an error under "immediate".
        clip_value: gradients are clamped to [-clip_value, clip_value].
        loss_scale: `backward` multiplies the loss by this scale, and gradients are divided by it: a number, "dynamic",
            or a `DynamicScale`. After an overflow, "two_pass" and "deferred" skip the whole step, like
            `torch.amp.GradScaler`. "immediate" skips only parameters with non-finite gradients.
        max_nonfinite_steps: after this many consecutive steps with a non-finite gradient, `backward` raises `StepError`
            instead of taking another step. None never raises. Steps in which a dynamic loss scale searches for its
            first value, before any step with finite gradients, do not count.
        store: where "deferred" stores gradients: "auto" (on the device while memory is free, then on the host), "host"
            (in pinned memory if there is a GPU), "device", or a limit of device memory per device, such as "4GiB".
            Setting it selects "deferred".
        accumulation_dtype: the dtype in which micro-batches are summed: "float32" (4 bytes per element in the store) or
            "gradient" (the dtype of the gradient; 2 bytes for bfloat16, rounded after every micro-batch like `.grad`).
            A step of one micro-batch stores its gradient unchanged.
        rounding: how a float32 result is stored in a bfloat16 or float16 weight: "nearest", "stochastic", "compensated"
            (adds 2 bytes per parameter), "compensated8" (adds 1 byte), "master" (a float32 copy, adds 4 bytes), or a
            registered storage. "auto" is the default of the rule, usually "stochastic". For torch and third-party
            optimizers it is "nearest", as without lowmem. float32 weights are exact. Param groups may override it.
        state_storage: how elementwise optimizer states are stored: "float32"; "bfloat16" or "float16", both rounded
            stochastically; "8bit", quantized with a scale per group of 32 elements of a row, rounded stochastically;
            "8bit_64", the same in groups of 64; "8bit_nearest", the same rounded to nearest; or a registered storage.
            "auto" uses at most the memory of a PyTorch optimizer: "bfloat16" for bfloat16 and float16 weights,
            "float32" for float32 weights and with `rounding="master"`. For loaded states, "auto" continues with the
            storage in which they were saved. Param groups may override it.
        convert_states: whether to convert loaded states that were saved in another `state_storage`.
        weight_format: "int8", "int10" or "int12": trainers quantize the weights of linear layers, embeddings and
            experts to this many bits (in a loop, call `lowmem.quantize_`). None does not quantize.
        placement: "local"; "replicated": each rank of a process group has all parameters (broadcast from rank 0) and
            separate data, and gradients are averaged; "zero3" and "fsdp2": parameters are sharded over the ranks by
            DeepSpeed or `fully_shard`; "streamed": the weights of the repeated layers of `model` are in host memory,
            and on the device only while they compute; "auto": determined from the parameters and the process group.
            "auto" does not broadcast, and raises an error if the parameters differ between ranks.
        home: for "streamed", where the weights and states of layers are stored: "host", or a folder on a fast disk. In
            a loop, call `lowmem.stream(model, device, home=...)`.
        device_memory: for "streamed", memory for weights on the device, such as "20GiB": as many layers as fit stay
            there. None streams all layers. In a loop, pass it to `lowmem.stream`.
        compile: True, False, or "auto": compile updates if there is a compiler and the model is large enough.
        seed: seed of stochastic rounding.
        batching: whether small parameters of equal shape are updated together as one stack, with bitwise equal results.
        log_norms: whether trainers log the gradient norm of each parameter.

    Raises:
        ConfigError: a name, value or combination is not allowed.
        UnsupportedError: the rule cannot run inside backward.
    """

    rule: str | UpdateRule | type | None = None
    lr: float | None = None
    hyper: dict[str, Any] = field(default_factory=dict)
    groups: Annotated[tuple[dict[str, Any], ...], _GROUPS] = ()
    policy: Annotated[Policy, require.one_of(*get_args(Policy))] = "auto"
    clip_norm: Annotated[float | None, _POSITIVE] = None
    clip_value: Annotated[float | None, _POSITIVE] = None
    loss_scale: Annotated[float | Literal["dynamic"] | DynamicScale | None, _LOSS_SCALE] = None
    max_nonfinite_steps: Annotated[int | None, _OPTIONAL_COUNT] = 20
    store: str = "auto"
    accumulation_dtype: Annotated[Literal["float32", "gradient"], require.one_of("float32", "gradient")] = "float32"
    rounding: str = "auto"
    state_storage: str = "auto"
    convert_states: Annotated[bool, require.flag] = False
    weight_format: Annotated[str | None, require.one_of(*storage.WEIGHT_FORMATS, optional=True)] = None
    placement: Annotated[placements.Choice, require.one_of(*get_args(placements.Choice))] = "auto"
    home: Annotated[str, _HOME] = "host"
    device_memory: str | None = None
    compile: Annotated[bool | Literal["auto"], require.flag_or_auto] = "auto"
    seed: Annotated[int, require.number(whole=True)] = 0
    batching: Annotated[bool, require.flag] = True
    log_norms: Annotated[bool, require.flag] = False

    def __init__(self, rule: str | UpdateRule | type | None = None, **options: Any) -> None:
        names = {option.name for option in fields(self)}
        hyper = {**options.pop("hyper", {}), **{name: options.pop(name) for name in options.keys() - names}}
        options |= {"rule": rule, "hyper": hyper}
        for option in fields(self):
            object.__setattr__(self, option.name, options.get(option.name, option.default))
        valid_fields(self)
        _ = self.store_bytes, self.device_bytes  # raise if they are not amounts of memory
        gradients = {"store": self.store, "accumulation_dtype": self.accumulation_dtype}
        if self.policy in ("immediate", "two_pass") and gradients != {"store": "auto", "accumulation_dtype": "float32"}:
            raise ConfigError(f"{' and '.join(gradients)} apply only to policy 'deferred', not to {self.policy!r}")
        if self.placement != "streamed" and (self.home, self.device_memory) != ("host", None):
            raise ConfigError(f"home and device_memory apply only to placement 'streamed', not to {self.placement!r}")
        self.complete({"rule": "lomo"} if self.rule is None else {})  # the rule is checked once it is known
        for n, group in enumerate(self.groups):
            self._check_group(group, f"groups[{n}]: ")

    @property
    def given(self) -> dict[str, Any]:
        """The hyperparameters that are set, including `lr`."""
        return {**({} if self.lr is None else {"lr": self.lr}), **self.hyper}

    @property
    def device_bytes(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else parse_bytes(self.device_memory, "device_memory")

    @property
    def store_bytes(self) -> float | None:
        """`store` as bytes of gradients that may stay on each device; None: as much as is free."""
        named: dict[str, float | None] = {"auto": None, "host": 0, "device": math.inf}
        if isinstance(self.store, str) and re.match(r"\d", self.store):
            return parse_bytes(self.store, "store")
        require.one_of(*named)("store", self.store)
        return named[self.store]

    def param_groups(self, params: Iterable[Any]) -> list[dict[str, Any]]:
        """Divides (name, parameter) pairs into groups for `torch.optim`: the default group first, then `groups`.

        Raises:
            ConfigError: a parameter does not have a name, or an expression does not match any parameter.
        """
        params = list(params)
        if not all(isinstance(item, tuple) for item in params):
            raise ConfigError("groups: parameters are matched by name. Pass model.named_parameters() instead")
        groups: list[dict[str, Any]] = []
        for n, group in enumerate(self.groups):
            taken: list[Any] = []
            others: list[Any] = []
            for item in params:
                (taken if re.search(group["match"], item[0]) else others).append(item)
            if not taken:
                raise ConfigError(
                    f"groups[{n}]: match={group['match']!r} matches no parameter that is not already in a group"
                )
            groups.append({**_without_match(group), "params": taken})
            params = others
        return [{"params": params}, *groups] if params else groups

    def complete(self, group: Mapping[str, Any], place: str = "") -> tuple[UpdateRule, dict[str, Any]]:
        """Returns the rule of a parameter group, and the group with a value for each of its options.

        Raises:
            ConfigError: an option does not exist or is out of range.
        """
        rule = rules.resolve(group.get("rule", self.rule))
        own = "rule" in group and (self.rule is None or rule.name != rules.resolve(self.rule).name)
        shared = {} if own else self.given
        engine = {"rounding": self.rounding, "state_storage": self.state_storage}
        complete = {**rule.defaults, **shared, **engine, **group, "rule": rule.name}
        known = [*rule.defaults, *(option.name for option in fields(self))]
        for key in complete:
            if key not in GROUP_KEYS and not rule.takes(key, of_group=key in group):
                raise ConfigError(
                    f"{place}rule {rule.name!r} has no hyperparameter {key!r}.{did_you_mean(key, known)} "
                    f"It has {', '.join(rule.defaults)}."
                )
        try:
            rule.check(complete)
        except ConfigError as error:
            raise ConfigError(f"{place}{error}") from None
        require_known(f"{place}rounding", complete["rounding"], ["auto", *storage.roundings()])
        require_known(f"{place}state_storage", complete["state_storage"], ["auto", *storage.state_storages()])
        return rule, complete

    def _check_group(self, group: Mapping[str, Any], place: str) -> None:
        if not isinstance(group, Mapping) or not isinstance(group.get("match"), str):
            raise ConfigError(f"{place}a group is a mapping with a regular expression under 'match'; found {group!r}")
        try:
            re.compile(group["match"])
        except re.error as error:
            raise ConfigError(f"{place}match={group['match']!r} is not a regular expression: {error}") from None
        if self.rule is not None or "rule" in group:
            self.complete(_without_match(group), place)


@dataclass(frozen=True)
class LayersConfig:
    """Options that avoid materializing full logits and activations.

    Attributes:
        computed_gradients: "auto" computes the loss from tiles of logits. False uses TRL's losses.
        head_memory: additional memory for computing the loss and its gradients, such as "1GiB". More is faster. None
            means 128 MiB on a CPU and 512 MiB on a GPU. At least the logits of one token exist at a time.
        mlp_tile: number of tokens that an MLP processes at a time, and again in backward. None processes all at once.

    Raises:
        ConfigError: a value is out of range.
    """

    computed_gradients: Annotated[bool | Literal["auto"], require.flag_or_auto] = "auto"
    head_memory: str | None = None
    mlp_tile: Annotated[int | None, _OPTIONAL_COUNT] = None

    @property
    def head_bytes(self) -> int | None:
        """`head_memory` in bytes."""
        return None if self.head_memory is None else parse_bytes(self.head_memory, "head_memory")

    def __post_init__(self) -> None:
        valid_fields(self)
        if self.computed_gradients is True:
            raise ConfigError(
                'computed_gradients=True is not supported. Use "auto" (the default), which computes the loss from '
                "tiles of logits. To save more memory, use 12-bit weights (fused: {weight_format: int12}) or a smaller "
                "batch (per_device_train_batch_size)"
            )
        _ = self.head_bytes  # raises if it is not an amount of memory


def parse_bytes(text: str, option: str) -> int:
    """Parses an amount of memory such as 24GiB, 80 GB or 512MiB; raises `ConfigError` for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text.strip()) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ConfigError(f"{option}={text!r} is not an amount of memory; write it like 24GiB, 80GB or 512MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))


def _without_match(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group without the expression that selects its parameters."""
    return {key: value for key, value in group.items() if key != "match"}
