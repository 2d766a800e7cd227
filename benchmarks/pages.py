"""Writes the tables of recorded results into pages, and draws their pictures.

    python -m benchmarks.pages

In a page, a table is between `<!-- begin: COMMAND -->` and `<!-- end -->`. COMMAND measures the results, and writes the
table if `--out` is `benchmarks/results`. This command rewrites all tables and redraws all pictures from the JSON files,
without measuring anything.
"""

import hashlib
import importlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The COMMAND `python -m MODULE`, or `python -m MODULE, TABLE` for one of several tables
BLOCK = re.compile(
    r"(?P<begin><!-- begin: python -m (?P<module>[\w.]+)(?:, (?P<table>[^\n]+))? -->\n)"
    r"(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)

Row = Mapping[str, str]  # column → text
Picture = Callable[[Any], Any]  # draws the figure of a report


class Source(NamedTuple):
    """A module with a function `tables(report)` and optional `PICTURES`, both by name."""

    module: str

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.module.rpartition('.')[2]}.json"

    def tables(self) -> dict[str, str]:
        """Returns the tables of the recorded results by name, each followed by a line about the machine."""
        report = json.loads(self.file.read_text())
        tables = _code(self).tables(report)
        return {name: f"{table}\n{about(report)}\n" for name, table in tables.items()}

    @property
    def pictures(self) -> Mapping[str, Picture]:
        return getattr(_code(self), "PICTURES", {})  # type: ignore[no-any-return]


def _code(source: Source) -> Any:
    return importlib.import_module("studies.tables" if source.module == "studies" else source.module)


def grouped(column: str, cells: Mapping[str, Row]) -> str:
    """Returns a table in Markdown in which names with equal cells share a row. column: heading of the names."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        names.setdefault(tuple(row.values()), []).append(name)
    columns = [column, *next(iter(cells.values()))]
    return markdown([dict(zip(columns, ("; ".join(same), *row), strict=True)) for row, same in names.items()])


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def about(report: Mapping[str, Any]) -> str:
    """Describes the machine, version, date and commit of a measurement, or the date at which an old file was added."""
    added = f"recorded {report['recorded']}" if "recorded" in report else ""
    if "environment" in report:  # from `gpu_check`
        known = {row["what"]: row["measured"] for row in report["environment"]["rows"]}
        parts = known["device"], f"torch {known['torch']}", added
    else:
        machine, settings = report["machine"], report["settings"]
        device = [machine["gpu"]] if machine.get("gpu") else [machine.get("cpu")]
        if not machine.get("gpu"):
            device += [f"{machine[key]} {key}" for key in ("threads", "cores") if key in machine][:1]
        commit = f"commit {machine['commit'][:9]}" if "commit" in machine else ""
        parts = (*device, f"torch {machine['torch']}", settings.get("dtype"), machine.get("date", added), commit)
    return f"*{', '.join(part for part in parts if part)}.*".replace(" 1 threads", " 1 thread")


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return BLOCK.finditer(page.read_text())


def sources() -> list[Source]:
    """Returns the modules whose tables are shown on pages."""
    return sorted({Source(block["module"]) for page in PAGES for block in blocks(page)})


def write(file: Path | None = None) -> None:
    """Writes the tables of one JSON file, or of all files, into the pages that show them."""

    def written(block: re.Match[str]) -> str:
        source = Source(block["module"])
        if file not in (None, source.file):
            return block[0]
        return f"{block['begin']}{source.tables()[block['table'] or '']}{block['end']}"

    for page in PAGES:
        text = page.read_text()
        if (new := BLOCK.sub(written, text)) != text:
            page.write_text(new)


def checksum(file: Path) -> str:
    """Returns the checksum of a JSON file. Pictures contain it as the metadata `Source`."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def panels(title: str, size: tuple[float, float], columns: int, rows: int = 1, **layout: Any) -> tuple[Any, Any]:
    """Returns a matplotlib figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, **layout)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure, axes


def draw(file: Path, pictures: Mapping[str, Picture]) -> None:
    """Draws the pictures of a JSON file as PNG files in the same directory."""
    from lowmem.files import write_file  # imports packages that `gpu_check` does not require

    for name, picture in pictures.items():
        png = io.BytesIO()
        picture(json.loads(file.read_text())).savefig(png, dpi=150, metadata={"Source": checksum(file)})
        write_file(file.with_name(f"{name}.png"), png.getvalue())


def main() -> None:
    write()
    for source in sources():
        draw(source.file, source.pictures)


if __name__ == "__main__":
    main()
