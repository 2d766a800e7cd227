"""What is printed. Under a launcher only rank 0 prints, except that any rank reports its own failure."""

import os

from rich.console import Console

RANK = int(os.environ.get("RANK", 0))
out = Console(quiet=RANK > 0, highlight=False)
err = Console(quiet=RANK > 0, highlight=False, stderr=True)


def command() -> str:
    """The command that starts lowmem with as many processes as now."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return "lowmem" if processes == 1 else f"torchrun --nproc_per_node {processes} -m lowmem"


def print_topics(topics: dict[str, str]) -> None:
    for topic, text in topics.items():
        out.print(f"{topic:10} {text}", soft_wrap=True)


def warn(message: str) -> None:
    err.print(message, style="yellow", soft_wrap=True)
