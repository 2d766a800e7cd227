"""The texts of the tasks: code, docstrings and language reference of the installed Python."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from scripts.make_docstrings import functions, module_name, source_files

TABLES = {"encodings", "pydoc_data", "turtledemo"}  # modules that contain data rather than code
LONGEST = 40_000  # maximum number of characters per module


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def parsed() -> Iterator[tuple[str, Path, ast.Module]]:
    """Yields the name, path and syntax tree of each module in the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files(root):
        try:
            yield module_name(path, root), path.relative_to(root), ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library contains broken files for its own tests
            continue


def modules() -> Iterator[tuple[str, str]]:
    """Yields two texts per module: its code without docstrings and comments, and all of its docstrings."""
    for name, path, tree in parsed():
        if TABLES.isdisjoint(path.parts):
            docstrings = [ast.get_docstring(tree), *(ast.get_docstring(function) for _, function in functions(tree))]
            code = ast.unparse(_WithoutDocstrings().visit(tree))
            yield f"# {name}\n{code}"[:LONGEST], "\n\n".join(text for text in docstrings if text)


def documented_functions() -> Iterator[tuple[str, str, str]]:
    """Yields the module, the first paragraph of the docstring, and the code of each documented function."""
    for name, path, tree in parsed():
        for _, function in functions(tree) if TABLES.isdisjoint(path.parts) else ():
            docstring = ast.get_docstring(function) or ""
            if len(docstring) > 15 and len(function.body) > 1:
                yield name, docstring.split("\n\n")[0], ast.unparse(_WithoutDocstrings().visit(function))


def paragraphs() -> Iterator[tuple[str, str]]:
    """Yields the first sentence and the remaining text of each longer paragraph in the language reference."""
    for name in sorted(topics):
        for paragraph in re.split(r"\n\n(?=[A-Z])", topics[name]):
            first, *rest = re.split(r"(?<=\.)\s+(?=[A-Z])", re.sub(r"\s+", " ", paragraph).strip(), maxsplit=1)
            if rest and min(len(first), len(rest[0])) > 40 and "::=" not in paragraph:
                yield first, rest[0]
