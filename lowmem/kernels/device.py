"""Hand-written Triton functions that all kernels share."""
# ruff: noqa: ANN001, ANN201 (Triton has no types)

import triton
import triton.language as tl
from triton.language.extra.libdevice import pow as power

__all__ = ["fold", "larger", "largest", "power", "smaller"]


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(value, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Returns the maximum along an axis, or NaN if an element is NaN."""
    return tl.reduce(value, axis, larger, keep_dims=keep_dims)


@triton.jit(do_not_specialize=["programs", "jobs", "pieces", "work"])
def fold(programs, jobs, pieces, work, LARGEST: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Sums partial sums (or takes their maximum) of rows, columns or tiles, in an order that depends only on shapes.

    Args:
        programs: the job of each program.
        jobs: [jobs, 5] first program, offset of the result, its length, index of the first piece, number of pieces.
        pieces: [pieces, 4] offset, number of lines, start in the result, length of a line.
        work: the workspace, with the partial sums and the results.
        LARGEST: whether maxima are computed instead of sums.
        LINES, BLOCK: number of lines and columns of partial sums that a program processes at a time.
    """
    job = jobs + tl.load(programs + tl.program_id(0)) * 5
    target, length, piece = tl.load(job + 1), tl.load(job + 2), pieces + tl.load(job + 3) * 4
    block, down = tl.arange(0, BLOCK)[None, :], tl.arange(0, LINES)[:, None]
    at = (tl.program_id(0) - tl.load(job)) * BLOCK + block
    single = length == 1  # then all threads sum lines
    step = tl.where(single, LINES * BLOCK, LINES)
    total = tl.full([LINES, BLOCK], float("-inf") if LARGEST else 0.0, tl.float32)
    for _ in range(tl.load(job + 4)):
        source, lines, start, width = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        inside = single | ((at >= start) & (at < start + width))
        for first in range(0, lines, step):
            line = first + tl.where(single, down * BLOCK + block, down)
            address = work + source + line * width + tl.where(single, 0, at - start)
            part = tl.load(address, mask=inside & (line < lines), other=float("-inf") if LARGEST else 0.0)
            total = larger(total, part) if LARGEST else total + part
        piece += 4
    result = largest(total, 0, True) if LARGEST else tl.sum(total, 0, keep_dims=True)
    if single:
        result = tl.broadcast_to(largest(result, 1, True) if LARGEST else tl.sum(result, 1, keep_dims=True), [1, BLOCK])
    tl.store(work + target + at, result, mask=at < length)
