"""Tables and figures in the documentation match the JSON files of the results."""

import json
import re

import pytest
from PIL import Image

from benchmarks import memory, pages
from benchmarks.pages import PAGES, RESULTS, ROOT, Source, blocks, sources
from scripts import stacks

BLOCKS = [(page, block) for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page.name}: {block['begin'][11:-5]}" for page, block in BLOCKS]
)
def test_tables_show_their_results(page, block):
    assert block["body"] == Source(block["module"]).tables()[block["table"] or ""]


def test_every_result_is_shown():
    assert {source.file for source in sources()} == {*RESULTS.glob("*.json")} - {stacks.RESULTS}


def test_pictures_are_shown_and_drawn_from_their_results():
    """Each contains the checksum of its JSON file."""
    drawn = {name: source.file for source in sources() for name in source.pictures}
    assert drawn.keys() == {path.stem for path in RESULTS.glob("*.png")}
    for name, file in drawn.items():
        assert any(f"results/{name}.png)" in page.read_text() for page in PAGES), name
        source = Image.open(RESULTS / f"{name}.png").text["Source"]
        assert source == pages.checksum(file), "python -m benchmarks.pages"


TASKS = ("search", "chats", "docstrings")
PLANNED = {
    "`adalomo`": "adalomo",
    "`adalomo`, `weight_format: int12`": "adalomo, int12",
    "`adafactor`, `beta1: 0.9`, `state_storage: 8bit`": "adafactor, 8-bit momentum",
    "`adamw`, `state_storage: 8bit`": "adamw, 8-bit states",
    "the same with `rounding: compensated8`": "adamw, 8-bit states, compensated8",
    "`adamw`": "adamw",
    "`lion`": "lion",
    "`lomo` with `max_grad_norm: 1`": "lomo, clipped",
}


def cells(text):
    """Returns the cells of all table rows."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def plans():
    return json.loads((RESULTS / "memory.json").read_text())["plans"]


def test_the_memory_of_rules_equals_the_plan():
    """Checks the table in README.md."""
    planned = {row[0]: row[2] for row in cells((ROOT / "README.md").read_text()) if row[0] in PLANNED}
    assert planned.keys() == PLANNED.keys()
    for name, text in planned.items():
        sizes = plans()[memory.arguments_of(memory.EIGHT_BILLION, PLANNED[name])]
        assert int(re.match(r"(\d+) GiB", text)[1]) == round(sum(sizes.values()) / 2**30), name


def test_the_distances_of_rules_to_adamw_are_measured():
    """Checks the distances in README.md, without their deviations, and on the page about choosing a rule."""
    tables = Source("studies").tables()
    last = [{row[0]: row[-1].replace("-", "−") for row in cells(tables[task])} for task in TASKS]

    def distances(method):
        return [of_methods.get(method, "") for of_methods in last]

    shown = {row[0]: row[3] for row in cells((ROOT / "README.md").read_text()) if row[0] in PLANNED}
    methods = {"`adalomo`": "adalomo", "`lion`": "lion", "`lomo` with `max_grad_norm: 1`": "lomo"}
    methods |= {"`adafactor`, `beta1: 0.9`, `state_storage: 8bit`": "adafactor, momentum"}
    for name, method in methods.items():
        assert shown[name] == " / ".join(text.split(" ")[0] or "not run" for text in distances(method)), name
    # LoRA is in the recorded ablations instead
    shown = {row[0]: row[1:] for row in cells((ROOT / "docs" / "how-to" / "choosing.md").read_text())}
    methods = {"AdaLomo": "adalomo", "Adafactor with momentum": "adafactor, momentum", "LANS": "lans"}
    methods |= {"ScaledAdam": "scaled_adam", "LOMO with `clip_norm=1`": "lomo", "Lion": "lion"}
    for name, method in methods.items():
        assert shown[name] == distances(method), name


FIRST = {
    "AdaLomo, 12-bit weights": "adalomo, int12",
    "AdaLomo": "adalomo",
    "Adafactor with 8-bit momentum": "adafactor, 8-bit momentum",
    "AdamW with 8-bit states": "adamw, 8-bit states",
    "AdamW": "adamw",
    "without lowmem: AdamW in bfloat16": "AdamW, all in bfloat16",
    "without lowmem: AdamW in mixed precision": "AdamW, mixed precision",
}


def test_the_first_table_is_planned_or_computed():
    text, bars = (ROOT / "README.md").read_text(), memory.bars(plans())
    rows = {row[0]: row[1:] for row in cells(text)}
    for name, method in FIRST.items():
        sizes = bars.get(method) or plans()[memory.arguments_of(memory.EIGHT_BILLION, method)]
        shown, card, _ = rows[name]
        assert shown.strip("*") == f"{memory.gib(sizes):.1f}"
        assert card.endswith(f" {memory.card(sizes) or 141} GB card")
    seventy = {rule: plans()[memory.arguments_of("llama-3.1-70b", rule, 8)] for rule in ("adalomo", "adamw")}
    for name, sizes in zip(("AdaLomo", "AdamW"), seventy.values(), strict=True):
        assert rows[name][2] == f"{memory.gib(sizes):.1f} ({memory.card(sizes)} GB cards)"
    for name, width in (("AdamW in bfloat16", 8), ("AdamW in mixed precision", 16)):
        ordinary = memory.gib(seventy["adalomo"]) + (width - 2) * 70.55e9 / 8 / memory.GIB
        assert rows[f"without lowmem: {name}"][2] == f"{ordinary:.0f}"
    one, other = (round(memory.gib(bars[name])) for name in ("adalomo", "AdamW, all in bfloat16"))
    assert f"takes {one} GiB (planned), against {other} GiB" in text
