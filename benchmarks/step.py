"""A whole training step, peers side by side in one run: seconds, and memory over that of the weights.

    python benchmarks/step.py [--layers 8 --hidden 768 --tokens 128 --batch 1] [--out benchmarks/results]

The figures are ratios to `floor`, which drops every gradient the moment it exists and updates nothing. Peers that are
not installed are left out.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence

import torch
from side_by_side import Loss, Step, draw, drop_gradients, measure, options_of, ordinary, rounds, save, tell

import lowmem


def fused(rule: object, **settings: object) -> Callable[[torch.nn.Module], Step]:
    def make(model: torch.nn.Module) -> Step:
        opt = lowmem.FusedOptimizer(model.named_parameters(), rule=rule, **settings)

        def step(losses: Sequence[Loss]) -> None:
            (loss,) = losses
            opt.backward(loss)

        return step

    return make


def lomo_optim(model: torch.nn.Module) -> Step:
    from lomo_optim import AdaLomo

    torch.Tensor.cuda = lambda self: self  # it names the device in its code
    optimizer = AdaLomo(model, lr=1e-3)

    def step(losses: Sequence[Loss]) -> None:
        (loss,) = losses
        optimizer.fused_backward(loss(), 1e-3)

    return step


CONTENDERS = {
    "floor": drop_gradients,
    "lowmem adalomo": fused("adalomo", lr=1e-3),
    "lowmem adalomo, stochastic rounding": fused("adalomo", lr=1e-3, rounding="stochastic"),
    "lowmem AdamW": fused(torch.optim.AdamW, lr=1e-4, foreach=False),
    "AdamW": ordinary(torch.optim.AdamW, lr=1e-4),
    "AdamW(fused=True)": ordinary(torch.optim.AdamW, lr=1e-4, fused=True),
    "torch Adafactor": ordinary(torch.optim.Adafactor),
    "lomo_optim AdaLomo": lomo_optim,
}
NEEDS = {"lomo_optim AdaLomo": "lomo_optim"}


def main() -> None:
    options = options_of(__doc__, tokens=128, batch=1, rounds=3)
    if options.one:
        print(json.dumps(measure(CONTENDERS[options.one], options, micro_batches=1)))
        return
    names = [n for n in CONTENDERS if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
    results = rounds(names, options.rounds)
    tell(results, options, "floor")
    save(results, options, "step")
    colors = ["#2a8f7c" if name.startswith("lowmem") else "#c9ced6" if name != "floor" else "#e6e6e6" for name in names]
    draw(results, colors, options, "floor", "step")


if __name__ == "__main__":
    main()
