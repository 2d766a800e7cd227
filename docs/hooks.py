"""MkDocs hook: files from outside of docs/ are pages of the site, with links that work there and in the repository.

README.md is the first page. Links are written for the repository, relative to the file that they are in.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FILES = {  # file of the repository -> its place in the site
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md",
                               "configs/README.md", "studies/ablations.md", "tests/golden/README.md",
                               "tests/judges/classes.md")},
    **{f"benchmarks/results/{path.name}": f"benchmarks/results/{path.name}"
       for path in (ROOT / "benchmarks" / "results").glob("*.png")},
}  # fmt: skip
ORIGIN = {place: name for name, place in FILES.items()}


def on_files(files: Any, config: Any) -> Any:
    for name, place in FILES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    folder = Path(ORIGIN.get(here, f"docs/{here}")).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        name = os.path.normpath(folder / target)
        if name not in FILES and not name.startswith("docs/"):  # code, which is not in the site
            return text[1:-1] if text.startswith("[") else match[0]
        place = FILES.get(name, name.removeprefix("docs/"))
        return f"{text}({os.path.relpath(place, Path(here).parent)}{anchor or ''})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)
