"""GPU kernels, generated in Triton from the trace of an update: one launch per pass, for any number of parameters.

    graphs of `lowmem.tiles.traced` ─► lines (printing) ─► source (passes, between) ─► launches (kernels, tables)

Triton is imported when the first kernels are created.
"""

from lowmem.kernels.kernels import Batch, Kernels, try_compiler
from lowmem.kernels.tables import Member

__all__ = ["Batch", "Kernels", "Member", "try_compiler"]
