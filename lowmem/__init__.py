"""Full-parameter fine-tuning of language models at the memory of their weights.

Every parameter is updated the moment its gradient exists, inside backward, by any optimizer.
"""

from lowmem import rules
from lowmem.errors import LowmemError
from lowmem.last_step import LastStep
from lowmem.optimizer import FusedOptimizer
from lowmem.scaling import DynamicScale
from lowmem.settings import FusedConfig

__version__ = "0.1.0"
__all__ = ["DynamicScale", "FusedConfig", "FusedOptimizer", "LastStep", "LowmemError", "rules"]
