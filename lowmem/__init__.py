"""Full-parameter fine-tuning of language models at the memory of their weights.

Every parameter is updated inside backward, as soon as its gradient is complete, by a rule of lowmem or `torch.optim`.
"""

from lowmem import rules
from lowmem.errors import LowmemError
from lowmem.layers.quantize import dequantize_, quantize_
from lowmem.optimizer import FusedOptimizer
from lowmem.options import DynamicScale, FusedConfig, LayersConfig
from lowmem.placements.streamed import stream
from lowmem.step.report import LastStep
from lowmem.tiles import storage

__version__ = "0.1.0"
__all__ = [
    "DynamicScale",
    "FusedConfig",
    "FusedOptimizer",
    "LastStep",
    "LayersConfig",
    "LowmemError",
    "dequantize_",
    "quantize_",
    "rules",
    "storage",
    "stream",
]
