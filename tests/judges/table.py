"""Writes the tables in docs/reference/rules.md: the optimizer classes that run, by package, and why others do not.

python tests/judges/table.py
"""

import os
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["LOWMEM_FULL"] = "1"  # every class, instead of a third

from judged import EQUAL, REFUSED
from test_classes import EQUAL as PACKAGES
from test_classes import judged
from test_sharded_classes import judged_early

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"
LARGEST = "pytorch_optimizer.optimizer"  # has its own column in the second table
DISTRIBUTIONS = {"optimi": "torch-optimi"}
REASONS = {
    "combines parameters": "combine parameters inside `step()`",
    "draws random numbers": "draw one random number for all parameters",
    "wraps other optimizers": "drive other optimizers",
    "takes a whole model": "take a whole model",
    "closure": "need a closure",
    "process group": "need a separate process group",
    "CUDA": "need a GPU",
    "does not require grad": "need gradients with a graph",
}
OWN_ERROR = "raise an error themselves"


def entry(package):
    """Returns a row of the first table, and the unsupported classes of a package by reason."""
    verdicts = {name.removesuffix("()"): verdict for name, verdict in judged(package, share=0).items()}
    found = [name for name, (verdict, _) in verdicts.items() if verdict == EQUAL]
    sharded = [cls.__name__ for cls, (verdict, _) in judged_early(package).items() if verdict == EQUAL]
    refused = {}
    for name, (verdict, reason) in verdicts.items():
        if verdict == REFUSED:
            words = next((words for key, words in REASONS.items() if key in reason), OWN_ERROR)
            refused.setdefault(words, []).append(name)
    version = metadata.version(DISTRIBUTIONS.get(package, package.partition(".")[0]))
    flat = len(set(found) & set(sharded))
    return f"| `{package}` {version} | {len(found)} of {len(verdicts)} | {flat} |", refused


def unsupported(packages):
    """Yields the rows of the second table: a reason, and the classes of every package."""
    for words in (*REASONS.values(), OWN_ERROR):
        classes = {name: ", ".join(refused[words]) for name, refused in packages.items() if words in refused}
        if classes:
            largest = classes.pop(LARGEST, "")
            yield f"| {words} | {largest} | {'; '.join(f'`{name}`: {listed}' for name, listed in classes.items())} |"


if __name__ == "__main__":
    entries = {package: entry(package) for package in PACKAGES}
    lines = ["| classes of | same weights | also sharded |", "| --- | --- | --- |"]
    lines += [row for row, _ in entries.values()]
    lines += ["", f"| unsupported, because they | `{LARGEST}` | other packages |", "| --- | --- | --- |"]
    lines += unsupported({package: refused for package, (_, refused) in entries.items()})
    begin, end = "<!-- judges -->\n", "<!-- /judges -->"
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{begin}{chr(10).join(lines)}\n{end}{after}")
