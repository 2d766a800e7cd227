"""Checks `model.config`: keys and values by name, then a model that is built from it without memory."""

import contextlib
import copy
import json
import re
from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from lowmem.errors import ConfigError
from lowmem.run.checks import Whole, mapping, within
from lowmem.run.source import reason

_MAX_LAYERS = 2_000  # building more takes minutes, and no model has them
_LAYERS_BUILT = 2


def _range(kind: Any, low: float, high: float, words: str) -> Any:
    return within(kind, lambda value: low <= value < high, words)


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


_SIZE = _range(Whole, 1, 2**40, "at least 1, and below 2^40") | list[int] | None
_RATE = _range(float, 0, 1, "at least 0 and less than 1") | None
_EPS = _range(float, 0, 1, "at least 0 and less than 1")
_LAYERS = _range(Whole, 1, _MAX_LAYERS + 1, f"1 to {_MAX_LAYERS}")
_TYPES = {
    r"num_hidden_layers|n_layers?|num_layers": _LAYERS,
    r"(hidden|intermediate|vocab)_size|head_dim|num_(attention|key_value)_heads|max_position_embeddings|n_embd|n_head"
    r"|n_positions|d_model|d_ff|d_kv|ffn_dim": _SIZE,
    r".*(dropout|pdrop|drop_rate)(_rate|_prob)?": _RATE,
    r".*_(eps|epsilon)": _EPS,
    r"initializer_range": _range(float, 0, 1e6, "at least 0"),
    "rope_theta": _range(float, 1e-30, 1e30, "greater than 0"),
    r".*limit": Any,  # infinity is no limit
}
_ANY = within(Any, _is_finite, "finite")


def types(kind: str) -> Any:
    """The keys of a configuration of this `model_type`, since transformers ignores those that are misspelt."""
    cls = CONFIG_MAPPING[kind]
    rope = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # become part of rope_parameters
    known = {"model_type", *rope, *cls.attribute_map, *(f.name for f in fields(cls) if f.init)} - {"dtype"}
    return mapping({}, {name: _type(name) for name in sorted(known)})


def _type(name: str) -> Any:
    return next((kind for pattern, kind in _TYPES.items() if re.fullmatch(pattern, name)), _ANY)


def check(raw: dict[str, Any], vocab_size: int | None) -> None:
    """Builds the first layers of the model and runs them on the meta device, which takes neither memory nor long.

    Raises:
        ConfigError: with what transformers says.
    """
    values = raw if vocab_size is None or "vocab_size" in raw else {**raw, "vocab_size": vocab_size}
    try:
        config = _made(values)
        with contextlib.suppress(Exception):  # such as a list with an element per layer, which has to fit
            name = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
            _run(_made({**values, name: min(getattr(config, "num_hidden_layers", _LAYERS_BUILT), _LAYERS_BUILT)}))
            return
        _run(config)
    except Exception as error:  # model classes document none
        if not isinstance(error, NotImplementedError) and not re.search("meta (tensor|device)", str(error), re.I):
            raise ConfigError(f"model.config can't make a {raw['model_type']} model: {reason(error)}") from error
        # numbers decide how to go on, and tensors on the meta device have none


def _run(config: Any) -> None:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        # kernels have conditions of their own, which depend on the device and the dtype
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        ids = torch.ones(1, 2, dtype=torch.int64)
        model.train()(input_ids=ids, attention_mask=ids, use_cache=False)


def _made(values: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**copy.deepcopy(values))  # some classes change the values that they are given
