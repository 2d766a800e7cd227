"""The options of layers, declared once: trainers and YAML files use this dataclass."""

import re
from dataclasses import dataclass
from typing import Literal

from lowmem.errors import ConfigError
from lowmem.rules import require


@dataclass(frozen=True)
class LayersConfig:
    """Options that avoid materializing full gradients and activations.

    Attributes:
        computed_gradients: "auto" computes the loss from tiles of logits. The gradients of the output head and the
            embedding are tensors, which takes least time. With True the optimizer computes them, block by block, as it
            reads them: on one device, for rules of lowmem, and for micro-batches of up to a quarter as many tokens as
            the vocabulary has. Under ZeRO-3, they are computed and reduced block by block, so a rank has only its shard
            of them. Otherwise they are tensors. False uses TRL's losses.
        head_memory: additional memory for computing the loss and these gradients, such as "1GiB". More is faster. None
            is 128 MiB on a CPU and 512 MiB on a GPU. The logits of one token are the least.
        mlp_tile: tokens that an MLP computes at a time. Backward computes them once more. None computes all at once.

    Raises:
        ConfigError: a value is out of range.
    """

    computed_gradients: bool | Literal["auto"] = "auto"
    head_memory: str | None = None
    mlp_tile: int | None = None

    @property
    def head_bytes(self) -> int | None:
        """`head_memory` in bytes."""
        return None if self.head_memory is None else parse_bytes(self.head_memory, "head_memory")

    def __post_init__(self) -> None:
        require.flag_or_auto("computed_gradients", self.computed_gradients)
        _ = self.head_bytes  # raises if it is not an amount
        require.number(">= 1", whole=True, optional=True)("mlp_tile", self.mlp_tile)


def parse_bytes(text: str, option: str) -> int:
    """Parses an amount of memory such as 24GiB, 80 GB or 512MiB; raises `ConfigError` for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text.strip()) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ConfigError(f"{option}={text!r} is not an amount of memory; write it like 24GiB, 80GB or 512MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
