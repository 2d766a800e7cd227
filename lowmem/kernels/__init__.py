"""Kernels for a GPU, one launch per pass over any number of parameters, written in Triton from the trace of an update.

    graphs of `lowmem.tiles.traced` ─► lines (printing) ─► source (passes, between) ─► launches (kernels, tables)

Triton is imported when the first kernels are made.
"""

from lowmem.kernels.kernels import Batch, Kernels, Result, Values, try_compiler
from lowmem.kernels.source import is_line
from lowmem.kernels.tables import Member

__all__ = ["Batch", "Kernels", "Member", "Result", "Values", "is_line", "try_compiler"]
