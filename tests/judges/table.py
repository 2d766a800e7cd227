"""Writes the table in docs/reference/rules.md: the optimizer classes that run, by package, and why others do not.

python tests/judges/table.py
"""

import re
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from judged import EQUAL, REFUSED
from test_classes import EQUAL as PACKAGES
from test_classes import judged
from test_sharded_classes import judged_early

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"
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


def entry(package):
    """Returns a row of the table and a line of the list of unsupported classes, which may be empty."""
    verdicts = {name.removesuffix("()"): verdict for name, verdict in judged(package, share=0).items()}
    found = [name for name, (verdict, _) in verdicts.items() if verdict == EQUAL]
    sharded = [cls.__name__ for cls, (verdict, _) in judged_early(package).items() if verdict == EQUAL]
    refused = {}
    for name, (verdict, reason) in verdicts.items():
        if verdict == REFUSED:
            said = next((words for key, words in REASONS.items() if key in reason), None)
            refused.setdefault(
                said or f"`{re.sub(r'.*(is not accepted by [^:]*|does not run): ', '', reason)[:80]}`", []
            ).append(name)
    why = "; ".join(f"{words}: {', '.join(names)}" for words, names in sorted(refused.items()))
    version = metadata.version(DISTRIBUTIONS.get(package, package.partition(".")[0]))
    flat = len(set(found) & set(sharded))
    return f"| `{package}` {version} | {len(found)} of {len(verdicts)} | {flat} |", why and f"- `{package}`: {why}"


if __name__ == "__main__":
    rows, unsupported = zip(*map(entry, PACKAGES), strict=True)
    table = ["| classes of | same weights | also sharded |", "| --- | --- | --- |", *rows]
    table += ["", "Unsupported classes, by reason:", "", *filter(None, unsupported)]
    begin, end = "<!-- judges -->\n", "<!-- /judges -->"
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(f"{before}{begin}{chr(10).join(table)}\n{end}{after}")
