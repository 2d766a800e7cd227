"""Makes Triton's interpreter compute like the eager sweep, to test kernels on a CPU (TRITON_INTERPRET=1).

Triton 3.6's interpreter truncates to bfloat16, does not support fused multiply-add and libdevice, loops over elements
in custom reductions, and uses arrays as indices, which NumPy 2.4 does not support. torch's square root is not correctly
rounded on a CPU, so the interpreter must use the same one.
"""

import dataclasses
import os

import numpy as np

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _narrow(value):
    """Rounds float32 to the nearest bfloat16 (as uint16), with ties to even."""
    bits = value.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(value), 0x7FC0, rounded).astype(np.uint16)


def install():
    """Replaces functions of the interpreter. Must be called before lowmem's kernels are imported."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter as module

    builder, handle = module.InterpreterBuilder, module.TensorHandle

    def fma(self, x, y, z):
        """Computes in float64, where the product is exact. Double rounding of the sum matters once in 2²⁹ cases."""
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return handle(wide.astype(z.data.dtype), z.dtype.scalar)

    def casts(before):
        def cast(self, src, dst_type, *rest):
            source, target = src.dtype.scalar, dst_type.scalar
            if source == tl.bfloat16 and target == tl.float32:
                return handle((src.data.astype(np.uint32) << 16).view(np.float32), target)
            if source == tl.float32 and target == tl.bfloat16:
                return handle(_narrow(src.data), target)
            return before(self, src, dst_type, *rest)

        return cast

    def root(self, arg):
        import torch

        if arg.data.dtype != np.float32:
            return handle(np.sqrt(arg.data), arg.dtype.scalar)
        return handle(torch.from_numpy(np.ascontiguousarray(arg.data)).sqrt().numpy(), arg.dtype.scalar)

    def patch_tensor(tensor, scope, before=module._patch_lang_tensor):
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def reduce(self, value, before=module.ReduceOps.apply_impl):
        if getattr(self.combine_fn, "__name__", "") == "larger":
            return self.min_max(value[0], val_reduce_op=np.max)
        return before(self, value)

    def power(base, exponent):
        return tl.tensor(handle(np.power(base.handle.data, exponent.handle.data), tl.float64), base.type)

    builder.create_fma, module._patch_lang_tensor, module.ReduceOps.apply_impl = fma, patch_tensor, reduce
    for name in ("create_fp_trunc", "create_fp_ext", "create_fp_to_fp"):
        setattr(builder, name, casts(getattr(builder, name)))

    def call(self, *args, before=module.InterpretedFunction.__call__, **kwargs):
        """Skips patching the language for functions of lowmem, because the calling kernel has already patched it."""
        patched = self.fn.__module__.startswith("lowmem.")
        return self.rewrite()(*args, **kwargs) if patched else before(self, *args, **kwargs)

    module.InterpretedFunction.__call__ = call
    options = module.interpreter_builder.options
    module.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)  # random bits overflow
    builder.create_precise_sqrt, libdevice.pow = root, power
