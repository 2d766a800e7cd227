"""Long sequences: the memory that each option of layers saves, and the time that it takes.

    python -m benchmarks.long_context [--only planned --only measured --only time] [--tokens 131072 --rounds 3]

`planned` predicts the peak of a step on a GPU, up to `--tokens`. `measured` compares real steps of a small Llama on
the CPU with their plans, up to `--measured`. `time` is CPU time of a step on one thread; its ratios are medians of
rounds in which the options take turns.
"""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import long_context_plans, reports
from benchmarks.long_context_plans import DEFAULTS, OFF, SHORTEST
from benchmarks.measurement import peak_of_tensors
from benchmarks.processes import alone
from benchmarks.reports import command, headline, print_table
from benchmarks.runs import Configuration, configuration, planned, step_of

# Part `measured`: a Llama whose head may need as small a part of the memory as that of a large one.
SMALL = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 224,
         "num_hidden_layers": 4, "num_attention_heads": 1}  # fmt: skip
MEASURED: dict[str, dict[str, Any]] = {
    OFF: {"computed_gradients": False},
    DEFAULTS: {},
    "tiled MLP": {"mlp_tile": 512},
}

# Part `time`: a quarter of the layers of Llama-3.1-8B and a quarter of its vocabulary, relative to the hidden size, so
# that the head has the same part in a step. A sequence of half the hidden size is to it what 2,048 tokens are to 8B.
PROPORTIONED = {"model_type": "llama", "vocab_size": 4008, "hidden_size": 512, "intermediate_size": 1792,
                "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1}  # fmt: skip
SHORT, LONG = 256, 2048


def timed(tokens: int) -> dict[str, dict[str, Any]]:
    """Options of layers by what they change."""
    heads: dict[str, dict[str, Any]] = {OFF: {"computed_gradients": False}, DEFAULTS: {}}
    tiles = {f"tiled MLP, {size:,} tokens": {"mlp_tile": size} for size in (tokens // 2, tokens // 8)}
    return heads if tokens == SHORT else {**heads, **tiles}


# -- measured ----------------------------------------------------------------------------------------------------------


def real_step(config: Configuration) -> dict[str, float]:
    """Bytes of tensors at the peak of a step on the CPU, and the seconds that measuring it takes."""
    step, start = step_of(config), time.perf_counter()
    return {"real": peak_of_tensors(step), "seconds": time.perf_counter() - start}


def measured(options: Any) -> None:
    """Real steps on the CPU against their plans."""
    lengths = [SHORTEST << n for n in range(32) if SHORTEST << n <= options.measured]
    results: dict[str, dict[int, dict[str, float]]] = {setting: {} for setting in MEASURED}
    for tokens in lengths:
        for setting, layers in MEASURED.items():
            options_of_layers = {"head_memory": "1MiB", **layers}
            config = partial(configuration, SMALL, tokens, dtype=options.dtype, layers=options_of_layers, compile=False)
            expected = planned(config(), "cpu").peak
            results[setting][tokens] = {"planned": expected, **alone(real_step, config())}
    print(f"Peak of tensors in MiB: real / planned; {headline(options.dtype)}\n")
    rows = [
        (setting, *(f"{row[n]['real'] / 2**20:.2f} / {row[n]['planned'] / 2**20:.2f}" for n in lengths))
        for setting, row in results.items()
    ]
    print_table(("setting", *(f"{n // 1024}k" for n in lengths)), rows)
    settings = {"model": SMALL, "dtype": options.dtype, "layers": MEASURED, "head_memory": "1MiB"}
    reports.save(options.out / "long_context_measured.json", settings, results=results)


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(tokens: int, dtype: str, rounds: int) -> dict[str, dict[str, Any]]:
    """CPU seconds of a step under each setting, in turn, and their ratios to the defaults in the same round."""
    steps = {
        setting: step_of(configuration(PROPORTIONED, tokens, dtype=dtype, layers=layers, compile=True))
        for setting, layers in timed(tokens).items()
    }
    for step in steps.values():  # compiles, and allocates
        step()
    times: dict[str, list[float]] = {setting: [] for setting in steps}
    for _ in range(rounds):
        for setting, step in steps.items():
            start = time.process_time()
            step()
            times[setting].append(time.process_time() - start)
    base = times[DEFAULTS]
    ratios = {setting: [t / b for t, b in zip(row, base, strict=True)] for setting, row in times.items()}
    return {
        setting: {"seconds": times[setting], "ratios": row, "ratio": statistics.median(row)}
        for setting, row in ratios.items()
    }


def timings(options: Any) -> None:
    """Ratios of CPU time of steps."""
    torch.set_num_threads(1)
    results, load = {}, [os.getloadavg()[0]]
    print(f"CPU time of a step over that with the defaults, one thread; {headline(options.dtype)}\n", flush=True)
    for tokens, dtype in itertools.product((SHORT, LONG), dict.fromkeys((options.dtype, "float32"))):
        results[f"{dtype}, {tokens} tokens"] = seconds(tokens, dtype, options.rounds)
        load.append(os.getloadavg()[0])
        settings = {"model": PROPORTIONED, "rounds": options.rounds, "load": load}
        reports.save(options.out / "long_context_time.json", settings, results=results)  # each case takes minutes
    rows = [
        (case, setting, f"{statistics.median(row['seconds']):.2f}", f"{row['ratio']:.3f}",
         f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}")
        for case, times in results.items() for setting, row in times.items()
    ]  # fmt: skip
    print_table(("step", "setting", "s", "× defaults", "rounds"), rows)
    print(f"\nload of the machine through it: {', '.join(f'{value:.1f}' for value in load)}")


PARTS = {"planned": long_context_plans.run, "measured": measured, "time": timings}


@command
def main(argv: Sequence[str] | None = None) -> None:
    counts = {
        "tokens": (131072, "longest planned sequence"),
        "measured": (16384, "longest measured sequence"),
        "rounds": (5, "timed steps per setting"),
    }
    parser = reports.make_parser(__doc__, counts)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; repeatable")
    options = parser.parse_args(argv)
    with reports.output(options.out, "long_context*"):
        for name in options.only or PARTS:
            PARTS[name](options)
            print(flush=True)


if __name__ == "__main__":
    main()
