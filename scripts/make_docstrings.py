"""Writes instruction data from the installed Python standard library: signatures and docstring summaries.

    python scripts/make_docstrings.py --out data/docstrings.jsonl --limit 5000 --seed 0

Each line is a chat in the format of `lowmem sft` and `trl sft`: `{"prompt": [{"role": "user", "content": "Document
this function of json:\ndef loads(s, ...)"}], "completion": [{"role": "assistant", "content": "Deserialize ..."}]}`.
The same Python version, limit and seed give the same file. Tests, idlelib and lib2to3 are excluded.
"""

import argparse
import ast
import json
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
LONGEST_SIGNATURE = 160  # characters
SHORTEST_OUTPUT = 20  # characters
LONGEST_OUTPUT = 160

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
    question: str
    answer: str


def source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Yields every function and method with the name of its class, except functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{inside}.{node.name}" if inside else node.name)
        elif isinstance(node, Function):
            yield inside, node
        elif isinstance(node, ast.If | ast.Try):
            yield from functions(node, inside)


def signature(function: Function) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    prefix = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {function.name}({ast.unparse(function.args)}){returns}"


def summary(docstring: str) -> str:
    """Returns the first paragraph on one line, or as many of its sentences as fit."""
    text = re.sub(r"\s+", " ", docstring.strip().split("\n\n")[0]).strip()
    if len(text) <= LONGEST_OUTPUT:
        return text
    return text[: text.rfind(". ", 0, LONGEST_OUTPUT) + 1]


def is_prose(text: str) -> bool:
    words = re.findall(r"[A-Za-z]{2,}", text)
    return (
        SHORTEST_OUTPUT <= len(text) <= LONGEST_OUTPUT
        and text.isascii()
        and len(words) >= 4
        and not text.endswith(":")
        and ">>>" not in text
        and "::" not in text
    )


def pairs(path: Path, module: str) -> Iterator[Pair]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the library contains broken files for its own tests
        return
    for inside, function in functions(tree):
        head = signature(function)
        output = summary(ast.get_docstring(function) or "")
        if output.startswith(f"{function.name}("):  # the docstring repeats the signature
            continue
        if is_prose(output) and head.isascii() and len(head) <= LONGEST_SIGNATURE:
            kind = f"method of {module}.{inside}" if inside else f"function of {module}"
            yield Pair(f"Document this {kind}:\n{head}", output)


def chat(pair: Pair) -> dict[str, list[dict[str, str]]]:
    """Returns a pair in TRL's format."""
    return {
        "prompt": [{"role": "user", "content": pair.question}],
        "completion": [{"role": "assistant", "content": pair.answer}],
    }


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def collect(root: Path) -> tuple[list[Pair], int]:
    """Returns all pairs in `root`, without duplicate questions or answers, and the number of their modules."""
    unique: list[Pair] = []
    seen: set[str] = set()
    modules = 0
    for path in source_files(root):
        before = len(unique)
        for pair in pairs(path, module_name(path, root)):
            if seen.isdisjoint(pair):
                seen.update(pair)
                unique.append(pair)
        modules += len(unique) > before
    return unique, modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--limit", type=int, help="the maximum number of pairs to write (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit is {arguments.limit}; it must be at least 1")

    all_pairs, modules = collect(Path(sysconfig.get_path("stdlib")))
    random.Random(arguments.seed).shuffle(all_pairs)
    chosen = all_pairs[: arguments.limit]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = arguments.out.with_name(f"{arguments.out.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(chat(pair)) + "\n" for pair in chosen), encoding="utf-8")
    temporary.replace(arguments.out)
    print(f"{arguments.out}: {len(chosen)} of {len(all_pairs)} pairs from {modules} modules")


if __name__ == "__main__":
    main()
