"""Full-parameter fine-tuning of language models at the memory of their weights.

Every parameter is updated the moment its gradient exists, inside backward, by any optimizer.
"""

from lowmem import rules
from lowmem.errors import LowmemError
from lowmem.optimizer import FusedOptimizer
from lowmem.options import FusedConfig
from lowmem.step.loss_scaler import DynamicScale
from lowmem.step.report import LastStep

__version__ = "0.1.0"
__all__ = ["DynamicScale", "FusedConfig", "FusedOptimizer", "LastStep", "LowmemError", "rules"]
