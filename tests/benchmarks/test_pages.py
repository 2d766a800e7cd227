"""Pages show what the JSON files of the results have, and pictures are drawn from them."""

import json
import re

import pytest
from PIL import Image

from benchmarks import memory_bars, pages
from benchmarks.pages import PAGES, RESULTS, ROOT, Source, blocks
from scripts import stacks

BLOCKS = [(page, block) for page in PAGES for block in blocks(page)]
PICTURES = sorted(RESULTS.glob("*.png"))


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page.name}: {block['begin'][11:-5]}" for page, block in BLOCKS]
)
def test_tables_show_their_results(page, block):
    assert block["body"] == Source(block["module"]).tables()[block["table"] or ""]


def test_every_marker_is_one_of_a_table():
    for page in PAGES:
        assert page.read_text().count("<!-- begin: ") == len(list(blocks(page))), page
        assert page.read_text().count("<!-- end -->") == len(list(blocks(page))), page


def test_every_result_is_shown():
    shown = {Source(block["module"]).file for _, block in BLOCKS}
    assert {file for file in shown if file.exists()} == {*RESULTS.glob("*.json")} - {stacks.RESULTS}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_shown_and_drawn_from_its_results(picture):
    """Its command wrote into it the checksum of the JSON file that it was drawn from; a drawing has none."""
    assert any(f"results/{picture.name})" in page.read_text() for page in PAGES)
    results = picture.with_suffix(".json")
    if results.exists():
        assert Image.open(picture).text["Source"] == pages.checksum(results), "python -m benchmarks.pages"
    else:
        assert (ROOT / "benchmarks" / f"{picture.stem}.py").exists()


PLANNED = {
    "`adalomo`": "adalomo",
    "`adalomo`, `weight_format: int12`": "adalomo, int12",
    "`adafactor`, `beta1: 0.9`, `state_storage: 8bit`": "adafactor, 8bit momentum",
    "`adamw`, `state_storage: 8bit`": "adamw, 8bit states, clipped",
    "`adamw`": "adamw, bfloat16 states",
    "`lion`": "lion",
    "`lomo` with `max_grad_norm: 1`": "lomo, clipped",
}


def test_the_memory_of_rules_equals_the_plan():
    """The table of README.md, whose other columns are words."""
    plans = json.loads((RESULTS / "memory_bars.json").read_text())["planned"]["llama-3.1-8b"]
    text = (ROOT / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    cells = {row[1]: row[3] for row in rows if len(row) > 4 and row[1] in PLANNED}
    assert cells.keys() == PLANNED.keys()
    for name, text in cells.items():
        assert int(re.match(r"(\d+) GiB", text)[1]) == round(sum(plans[PLANNED[name]].values()) / 2**30), name


def test_the_first_screen_has_the_figures_of_the_bars():
    report = json.loads((RESULTS / "memory_bars.json").read_text())
    ours, ordinary = (
        round(sum(memory_bars.bars(report)[name].values()) / 2**30) for name in ("adalomo", "AdamW, all in bfloat16")
    )
    assert f"takes {ours} GiB (planned), against {ordinary} GiB" in (ROOT / "README.md").read_text()
