"""Measures the time and memory of one update of one large parameter, with every rule and its peers.

    python -m benchmarks.update [--size 4096 --rounds 3] [--only adalomo]

Times are relative to torch's fused AdamW and to the nearest peer, which computes the same update or has states of the
same size. Temporary memory is the peak of the bytes that an update allocates.
"""

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import lowmem
from benchmarks import reports
from benchmarks.engine import update_one
from benchmarks.measurement import peak_of_temporaries
from benchmarks.methods import Method, import_lomo_optim
from benchmarks.pages import Row, markdown
from benchmarks.processes import Figures, alone
from benchmarks.reports import command, ratio

BASE = "AdamW(fused=True)"
WIDE, EAGER = ", float32 weights", ", eager"
RULES = [row.name for row in lowmem.rules.table()]

# (function that updates the parameter, function that returns its optimizer-state tensors)
Update = tuple[Callable[[], object], Callable[[], list[Tensor]]]


@dataclass(frozen=True)
class UpdateMethod(Method):
    """A method of updating one parameter: `make(param, grad)` returns an `Update`.

    Attributes:
        nearest: a peer that computes the same update, or otherwise has states of the same size.
        dtype: dtype of the weights, or None for the dtype of `--dtype`.
    """

    nearest: str | None = None
    dtype: Literal["bfloat16", "float32"] | None = None


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def lowmem_update(param: Tensor, grad: Tensor, rule: str, **options: Any) -> Update:
    options = {"lr": 1e-3, "rounding": "nearest", "compile": True, "batching": False, **options}  # rounds like peers
    opt = lowmem.FusedOptimizer([("weight", param)], rule=rule, **options)
    return lambda: update_one(opt, param, grad), lambda: state_tensors(opt)


def torch_update(param: Tensor, grad: Tensor, cls: Callable[..., torch.optim.Optimizer], **options: Any) -> Update:
    optimizer = cls([param], lr=1e-3, **options)
    param.grad = grad
    return optimizer.step, lambda: state_tensors(optimizer)


def optimi_update(param: Tensor, grad: Tensor, name: str, **options: Any) -> Update:
    return torch_update(param, grad, getattr(importlib.import_module("optimi"), name), **options)


def lomo_optim_update(param: Tensor, grad: Tensor) -> Update:
    optimizer = import_lomo_optim().AdaLomo(torch.nn.ParameterDict({"weight": param}), lr=1e-3, loss_scale=0)
    optimizer.lr = 1e-3

    def update() -> None:
        optimizer.step_num += 1
        param.grad = grad  # the update modifies it, which does not affect its time
        optimizer.grad_func(0)

    return update, lambda: [states["weight"] for states in (optimizer.exp_avg_sq_row, optimizer.exp_avg_sq_col)]


def lowmem_method(rule: str, nearest: str | None = None, dtype: Any = None, **options: Any) -> UpdateMethod:
    options = {"state_storage": "float32", **options}
    return UpdateMethod(partial(lowmem_update, rule=rule, **options), "lowmem", nearest=nearest, dtype=dtype)


def torch_method(cls: Callable[..., torch.optim.Optimizer], dtype: Any = None, **options: Any) -> UpdateMethod:
    return UpdateMethod(partial(torch_update, cls=cls, **options), dtype=dtype)


NEAREST = {
    "lomo": "SGD(fused=True)", "adalomo": "lomo_optim AdaLomo", "adafactor": "torch Adafactor",
    "adafactor_t2t": "torch Adafactor", "lion": "optimi Lion",
}  # fmt: skip
IN_BFLOAT16 = {  # rule, nearest peer and options of methods that are measured only with bfloat16 weights
    "adamw, bfloat16 moments": ("adamw", BASE, {"state_storage": "bfloat16"}),
    "adamw, bfloat16 moments, stochastic": ("adamw", BASE, {"state_storage": "bfloat16", "rounding": "stochastic"}),
    "adamw, 8-bit moments": ("adamw", BASE, {"state_storage": "8bit"}),
    "adamw, 8-bit moments, stochastic": ("adamw", BASE, {"state_storage": "8bit", "rounding": "stochastic"}),
    "adamw, 8-bit moments, compensated8": ("adamw", BASE, {"state_storage": "8bit", "rounding": "compensated8"}),
    **{
        f"adalomo, {rounding}": ("adalomo", "lomo_optim AdaLomo", {"rounding": rounding})
        for rounding in ("stochastic", "compensated", "compensated8")
    },
}
METHODS = {
    **{rule: lowmem_method(rule, NEAREST.get(rule, "AdamW")) for rule in RULES},
    **{name: lowmem_method(rule, peer, "bfloat16", **options) for name, (rule, peer, options) in IN_BFLOAT16.items()},
    f"adamw{WIDE}": lowmem_method("adamw", f"{BASE}{WIDE}", "float32"),
    f"adalomo{WIDE}": lowmem_method("adalomo", f"{BASE}{WIDE}", "float32"),
    **{f"{rule}{EAGER}": lowmem_method(rule, compile=False) for rule in RULES},
    BASE: torch_method(torch.optim.AdamW, fused=True),
    f"{BASE}{WIDE}": torch_method(torch.optim.AdamW, "float32", fused=True),
    "AdamW": torch_method(torch.optim.AdamW),
    "SGD(fused=True)": torch_method(torch.optim.SGD, fused=True),
    "torch Adafactor": torch_method(torch.optim.Adafactor),
    "lomo_optim AdaLomo": UpdateMethod(lomo_optim_update, package="lomo-optim"),
    "optimi Lion": UpdateMethod(partial(optimi_update, name="Lion"), package="torch-optimi"),
}


def methods(dtype: str) -> dict[str, UpdateMethod]:
    """Returns the methods for this `--dtype`. With float32, `WIDE` methods are omitted, since others are the same."""
    allowed = (None, "float32", "bfloat16") if dtype == "bfloat16" else (None,)
    return {name: method for name, method in METHODS.items() if method.dtype in allowed}


def measure(name: str, size: int, dtype: str) -> Figures:
    """Measures one method in this process: `seconds`, bytes of `temporary` memory, and bytes of `state` per weight."""
    torch.manual_seed(0)
    method = METHODS[name]
    kind = getattr(torch, method.dtype or dtype)
    param = torch.nn.Parameter(torch.randn(size, size).to(kind))
    update, state = method.make(param, torch.randn(size, size).to(kind))
    with torch.no_grad():
        update()  # compiles
        timer = Timer("update()", globals={"update": update}, num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=0.5).median
        gc.collect()
        temporary = peak_of_temporaries(update)
    states = sum(tensor.nbytes for tensor in state())
    return {"seconds": seconds, "temporary": temporary, "state": states / param.numel()}


def tables(report: Any) -> dict[str, str]:
    """Returns a table of rules and peers, and tables of other formats and of updates that are not compiled."""
    results = report["results"]
    rows: dict[str, list[Row]] = {"": [], "formats": [], "eager": []}
    for name, figures in results.items():
        table = "formats" if name in IN_BFLOAT16 or name.endswith(WIDE) else ""
        table = "eager" if name.endswith(EAGER) else table
        nearest = METHODS[name].nearest
        row = {"method": name, "ms": f"{figures['seconds'] * 1e3:.3g}", "× fused AdamW": ratio(results, name, BASE)}
        if table != "eager":
            peer = nearest if nearest in results else ""
            row |= {"× nearest peer": ratio(results, name, nearest), "nearest peer": peer}
        row |= {"temporary, MiB": f"{figures['temporary'] / 2**20:.2f}"}
        row |= {"state, bytes per weight": f"{figures['state']:.3g}"}
        rows[table].append(row)
    return {table: markdown(cells) for table, cells in rows.items() if cells}


@command
def main(argv: Sequence[str] | None = None) -> None:
    rounds = (3, "number of measurements of each method")
    counts = {"size": (4096, "rows and columns of the parameter"), "rounds": rounds}
    options = reports.make_parser(__doc__, counts, only="method").parse_args(argv)
    settings = {key: getattr(options, key) for key in (*counts, "dtype")}

    def measure_one(name: str, folder: Path) -> Figures:
        return alone(measure, name, options.size, options.dtype)

    reports.compare(methods(options.dtype), options, "update", settings, tables, measure_one)


if __name__ == "__main__":
    main()
