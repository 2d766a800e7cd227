#!/usr/bin/env python3
"""What only a GPU can tell, in one command under nine minutes on a bare machine with torch and transformers.

    python scripts/gpu_check.py [--out gpu_check.json] [--small]

Correctness of the compiled sweep against eager, host syncs in the hot path, seconds and bytes of an update, policies
and stores against each other, a training step beside its peers, and 8B random weights under each policy. Each part
stands alone: one that fails is reported as its error and the others go on. `--small` shrinks everything, so that the
script itself can be tried without a GPU.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import lowmem

ROUNDINGS = ("nearest", "stochastic", "compensated")
RULES = [row.name for row in lowmem.rules.table()]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call, after three that warm up."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        run()
        sync()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak(run: Callable[[], object]) -> int:
    """Most bytes allocated during a call, above what was allocated before it."""
    if not GPU:
        return 0
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    sync()
    return torch.cuda.max_memory_allocated() - before


def single(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Callable[[], None]:
    """One update of one parameter through the engine, its gradient made anew by a clone."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    param = torch.nn.Parameter(torch.randn(size, generator=generator, device=DEVICE).to(dtype))
    grad = torch.randn(size, generator=generator, device=DEVICE).to(dtype)
    opt = lowmem.FusedOptimizer([("w", param)], **settings)

    def run() -> None:
        torch.autograd.backward(param, grad)

    run.param, run.opt = param, opt  # type: ignore[attr-defined]
    return run


def environment(small: bool) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0) if GPU else None
    return {
        "device": properties.name if properties else platform.processor() or "cpu",
        "memory_bytes": properties.total_memory if properties else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "lowmem": lowmem.__version__,
    }


def compiled_against_eager(small: bool) -> dict[str, float]:
    """Largest difference of weights after three updates, relative to the largest weight."""
    found = {}
    for rule, rounding in [*((rule, "nearest") for rule in RULES), *(("adalomo", name) for name in ROUNDINGS[1:])]:
        for size in ((300, 517), (4, 128, 96), (20_000,)):
            dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
            weights = []
            for compile in (False, True):
                run = single(size, dtype, rule=rule, lr=1e-2, rounding=rounding, compile=compile)
                for _ in range(3):
                    run()
                weights.append(run.param.detach().float())  # type: ignore[attr-defined]
            scale = weights[0].abs().max().clamp(min=1e-30)
            found[f"{rule}, {rounding}, {list(size)}"] = float((weights[0] - weights[1]).abs().max() / scale)
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "immediate": {"policy": "immediate"},
    "two_pass": {"policy": "two_pass", "clip_norm": 1.0},
    "deferred, host": {"policy": "deferred", "store": "host", "clip_norm": 1.0},
    "deferred, device": {"policy": "deferred", "store": "device", "clip_norm": 1.0},
}


def no_host_sync(small: bool) -> str:
    """Updates by every rule under every policy, of a large parameter and a stack of small ones, where torch raises at a
    host sync.
    """
    for rule, policy in itertools.product(RULES, POLICIES.values()):
        drawn = [torch.randn(size, device=DEVICE).bfloat16() for size in ((256, 256), (64,), (64,))]
        params = [torch.nn.Parameter(value) for value in drawn]
        compile = GPU and rule == "adalomo"
        settings = {"rule": rule, "lr": 1e-3, "rounding": "stochastic", "loss_scale": "dynamic", "compile": compile}
        opt = lowmem.FusedOptimizer(params, **settings, **policy)
        for step in range(4):
            loss = torch.stack([param.float().square().sum() for param in params]).sum()
            if GPU and step:  # the first one compiles
                torch.cuda.set_sync_debug_mode("error")
            try:
                opt.backward(loss)
            finally:
                if GPU:
                    torch.cuda.set_sync_debug_mode("default")
        opt.remove()
    return "none"


def update(small: bool) -> dict[str, dict[str, float]]:
    """Seconds and temporary bytes of one update of a bfloat16 matrix."""
    side = 512 if small else 4096
    contenders: dict[str, dict[str, Any]] = {
        **{rule: {"rule": rule, "lr": 1e-3} for rule in RULES},
        "adalomo, stochastic": {"rule": "adalomo", "rounding": "stochastic"},
        "adalomo, compensated": {"rule": "adalomo", "rounding": "compensated"},
        "adalomo, eager": {"rule": "adalomo", "compile": False},
        "AdamW(fused=True)": {"rule": torch.optim.AdamW, "fused": True, "lr": 1e-3},
    }
    found = {}
    for name, settings in contenders.items():
        run = single((side, side), **{"compile": settings["rule"] in RULES, **settings})
        found[name] = {"seconds": seconds(run), "temporary_bytes": peak(run)}
    data = torch.empty(6 * side * side, dtype=torch.bfloat16, device=DEVICE)  # 3 gradient reads, 2 reads and 1 write
    found["copying as many bytes"] = {
        "seconds": seconds(lambda: data[: data.numel() // 2].copy_(data[data.numel() // 2 :]))
    }
    return found


def llama(layers: int, hidden: int, inner: int, vocab: int, heads: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def policies_agree(small: bool) -> dict[str, float]:
    """Largest difference of weights from those of `two_pass`, after four steps that are clipped."""
    weights = {}
    for name, policy in {
        **POLICIES,
        "deferred, disk": {"policy": "deferred", "store": "disk", "clip_norm": 1.0},
    }.items():
        if name == "immediate":
            continue
        torch.manual_seed(0)
        model = llama(4, 256, 512, 8192, 4).float()
        opt = lowmem.FusedOptimizer(model.named_parameters(), lr=1e-3, **policy)
        for _ in range(4):
            ids = torch.randint(0, 8192, (2, 64), device=DEVICE)
            opt.backward(model(input_ids=ids, labels=ids).loss)
        weights[name] = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {name: float((value - weights["two_pass"]).abs().max()) for name, value in weights.items()}


def train(
    model: torch.nn.Module, tokens: int, step: Callable[[torch.Tensor], object], repeats: int
) -> dict[str, float]:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)

    def run() -> None:
        step(model(input_ids=ids, labels=ids).loss)

    taken = seconds(run, repeats)
    above = peak(run) + (torch.cuda.memory_allocated() - weights if GPU else 0)
    return {"seconds": taken, "tokens_per_second": tokens / taken, "weights": weights, "peak_above_weights": above}


def steps_beside_peers(small: bool) -> dict[str, dict[str, float]]:
    """A whole step of a 1B Llama: gradients dropped, AdaLomo fused, AdamW ordinary with everything resident."""
    size = (2, 64, 128, 512, 4) if small else (16, 2048, 8192, 128256, 32)

    def floor(model: torch.nn.Module) -> Callable[[torch.Tensor], object]:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        return torch.Tensor.backward

    def fused(model: torch.nn.Module) -> Callable[[torch.Tensor], object]:
        return lowmem.FusedOptimizer(model.named_parameters(), rounding="stochastic").backward

    def adamw(model: torch.nn.Module) -> Callable[[torch.Tensor], object]:
        opt = torch.optim.AdamW(model.parameters(), fused=True)

        def step(loss: torch.Tensor) -> None:
            loss.backward()
            opt.step()
            opt.zero_grad()

        return step

    found = {}
    for name, make in (("floor", floor), ("adalomo", fused), ("AdamW(fused=True)", adamw)):
        model = llama(*size)
        found[name] = train(model, 64 if small else 2048, make(model), 8)
        del model
        if GPU:
            torch.cuda.empty_cache()
    return found


def eight_billion(small: bool) -> dict[str, dict[str, float]]:
    """AdaLomo on 8B random weights, 2,048 tokens a step, checkpointing, in the hook and clipped by norm."""
    model = llama(*((2, 64, 128, 512, 4) if small else (32, 4096, 14336, 128256, 32)))
    found = {}
    for name in ("immediate", "two_pass", "deferred, host"):
        opt = lowmem.FusedOptimizer(model.named_parameters(), rounding="stochastic", **POLICIES[name])
        found[name] = train(model, 64 if small else 2048, opt.backward, 4)
        opt.remove()
    return found


def steps_of_policies(small: bool) -> dict[str, dict[str, float]]:
    """The step of a 1B Llama at 2,048 tokens under each policy, the clipped ones clipping by norm."""
    found = {}
    for name, policy in POLICIES.items():
        model = llama(*((2, 64, 128, 512, 4) if small else (16, 2048, 8192, 128256, 32)))
        opt = lowmem.FusedOptimizer(model.named_parameters(), rounding="stochastic", **policy)
        found[name] = train(model, 64 if small else 2048, opt.backward, 8)
        found[name]["over_immediate"] = found[name]["seconds"] / found["immediate"]["seconds"]
        del model, opt
        if GPU:
            torch.cuda.empty_cache()
    return found


PARTS = (
    environment,
    compiled_against_eager,
    no_host_sync,
    update,
    policies_agree,
    steps_beside_peers,
    steps_of_policies,
    eight_billion,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--small", action="store_true", help="sizes that any machine can try")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for part in PARTS:
        start = time.perf_counter()
        try:
            found[part.__name__] = part(options.small)
        except Exception as error:  # one part must not take the others with it; the report says what failed
            traceback.print_exc()
            found[part.__name__] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{part.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    sys.exit(any(isinstance(result, dict) and "error" in result for result in found.values()))


if __name__ == "__main__":
    main()
