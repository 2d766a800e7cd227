"""README and docs: code blocks run, commands and YAML files parse, and tables list all options.

Comments before a block control its test. After `<!-- needs: GPU -->`, a block is parsed but not run. The Python code in
`<!-- setup: ... -->` is run before the block. Blocks after `<!-- examples -->` include files of examples/.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
import transformers
import trl
import yaml
from datasets import Dataset
from support.runs import assistant, user
from torch import nn

import lowmem
from lowmem.cli import _inspect_options, _parser, _plan_options
from lowmem.hf import TESTED
from lowmem.rules import resolve
from lowmem.run import recipe, yaml_file
from scripts import stacks
from scripts.make_model import make_model, train_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (?P<marker>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(*languages):
    """Returns (page, marker, code) of every fenced block in these languages, by its location."""
    cases = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match["language"] in languages:
                line = text[: match.start("code")].count("\n")
                name = f"{page.relative_to(ROOT)}:{line}"
                cases.append(pytest.param(page, match["marker"] or "", match["code"], id=name))
    return cases


def test_files_of_other_tools_are_converted(tmp_path):
    """The input is a list, or one row per line. Unicode line separators must not end a row."""
    page = ROOT / "docs" / "how-to" / "convert.md"
    code = next(match["code"] for match in BLOCK.finditer(page.read_text()) if "def convert(" in match["code"])
    names = {}
    exec(code, names)
    rows = [{"conversations": [{"from": "human", "value": "a\u2028b"}]}, {"instruction": "c", "output": "d"}]
    expected = [{"messages": user("a\u2028b")}, {"messages": user("c") + assistant("d")}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for name in ("a.json", "b.jsonl"):
        names["convert"](str(tmp_path / name), str(tmp_path / "out"))
        assert list(map(json.loads, (tmp_path / "out").read_text().split("\n")[:-1])) == expected


# -- Python ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    make_model(folder, train_tokenizer([(ROOT / "README.md").read_text()], 300), num_key_value_heads=2, **sizes)
    return folder


def names(folder):
    """Returns names that the blocks of a page may use without defining them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(24).view(2, 12) + 10
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    pairs = [{"prompt": user("Why?"), "chosen": assistant("So."), "rejected": assistant("No.")}] * 4
    chats = Dataset.from_list([{"messages": user("Why?") + assistant("So.")}] * 4)
    return {
        "torch": torch, "nn": nn, "lowmem": lowmem, "model": model, "loader": [batch, batch], "path": str(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder), "pairs": Dataset.from_list(pairs),
        "held_out": Dataset.from_list(pairs), "train": chats,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "marker", "code"), blocks("python"))
def test_python(page, marker, code, model_folder, tmp_path, monkeypatch):
    if marker == "examples":
        assert (ROOT / re.search(r'"(.*)"', code)[1]).exists()  # MkDocs includes this snippet
        return
    tree = compile(code, page.name, "exec", ast.PyCF_ONLY_AST)
    if marker.startswith("needs: "):
        return
    monkeypatch.chdir(tmp_path)
    namespace = {**names(model_folder), "__name__": page.stem}
    if page.stem == "peft":
        namespace["held_out"] = namespace["train"]
    try:
        exec(marker.removeprefix("setup: ") if marker else "", namespace)
        exec(compile(tree, page.name, "exec"), namespace)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


# -- commands and configurations ---------------------------------------------------------------------------------------


def parse_yaml(text, tmp_path, command="sft", *options):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return recipe.parse(command, ["--config", str(file), "--output_dir", str(tmp_path), *options])


@pytest.mark.parametrize(("page", "marker", "code"), blocks("yaml"))
def test_yaml(page, marker, code, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = parse_yaml(code, tmp_path)
    assert {name.partition(".")[0] for name in parsed.values} >= set(yaml.safe_load(code))


MORE = {"plan": _plan_options, "inspect": _inspect_options}


def commands(code):
    """Returns the commands of a shell block as lists of words."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition("|")[0], comments=True)
        yield from [words] if words else []


@pytest.mark.parametrize(("page", "marker", "code"), blocks("sh"))
def test_sh(page, marker, code, tmp_path, monkeypatch):
    """Scripts and modules must exist, and lowmem's arguments must parse. Empty files replace missing configurations."""
    subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    monkeypatch.chdir(ROOT)
    (tmp_path / "empty.yaml").write_text("dtype: bfloat16\n")
    for words in commands(code):
        for word in words:
            if word.startswith(("scripts/", "examples/", "configs/")):
                assert (ROOT / word).exists(), word
            if word.startswith("benchmarks."):
                assert importlib.util.find_spec(word), word
        if "lowmem" not in words or words[0] in ("git", "pip", "docker"):
            continue
        rest = [word if not word.endswith(".yaml") or Path(word).exists() else str(tmp_path / "empty.yaml")
                for word in words[words.index("lowmem") + 1 :]]  # fmt: skip
        command, rest = _parser().parse_known_args(rest)
        if "training" not in command:
            assert not rest, words
        elif more := MORE.get(words[words.index("lowmem") + 1]):
            recipe.parse(command.training, rest, device="gpu", more=more)
        else:
            recipe.parse(command.training, rest)


# -- data --------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig), "reward": (trl.RewardTrainer, trl.RewardConfig),
}  # fmt: skip


def rows():
    """Returns (command, row) for each JSON block of the page on data."""
    text, cases = (ROOT / "docs" / "reference" / "data.md").read_text(), []
    for match in re.finditer(r"```json\n(.*?)```", text, re.DOTALL):
        command = re.findall(r"`lowmem (\w+)`", text[: match.start()])[-1]  # the last heading before the block
        cases.append((command, json.loads(match[1])))
    return cases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("command", "row"), rows())
def test_rows(command, row, model_folder, tmp_path):
    """TRL must accept each row. GRPO's rows need a reward function and belong to the example."""
    if command == "rloo":
        assert row.keys() >= {"prompt"}
        return
    if "tools" in row:
        assert trl.data_utils.is_conversational(row)
        return
    cls, config = CONFIGS[command]
    cls(
        model=str(model_folder),
        args=config(output_dir=str(tmp_path), bf16=False, report_to="none"),
        train_dataset=Dataset.from_list([row] * 2),
        processing_class=transformers.AutoTokenizer.from_pretrained(model_folder),
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def table(text, heading):
    """Returns the cells of the first table after a heading, without its header."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def plain(default):
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("config", [lowmem.FusedConfig, lowmem.LayersConfig])
def test_options(config):
    text = (ROOT / "docs" / "reference" / "options.md").read_text()
    heading = "fused" if config is lowmem.FusedConfig else "layers"
    listed = {row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in table(text, heading)}
    assert listed == {f.name: plain(f.default) for f in fields(config) if f.default is not MISSING}


def test_rules():
    text = (ROOT / "docs" / "reference" / "options.md").read_text()
    rates = {row[0].strip("`"): (float(row[1]), yaml.safe_load(row[2].strip("`"))) for row in table(text, "Rules")}
    hyper = yaml.load(re.search(r"(?s)```yml\n(.*?)```", text)[1], yaml_file.Loader)
    defaults = {
        info.name: {name: plain(value) for name, value in info.defaults.items()}
        for info in lowmem.rules.table()
        if type(resolve(info.name)).__module__.startswith("lowmem.")  # not registered by a test
    }
    assert rates == {name: (resolve(name).usual_lr[0], of_rule.pop("lr")) for name, of_rule in defaults.items()}
    assert hyper.keys() == defaults.keys()  # each with some of its hyperparameters
    assert hyper == {rule: {name: defaults[rule][name] for name in of_rule} for rule, of_rule in hyper.items()}


def test_versions():
    """The table of limits must list the supported versions, except for Python."""
    text = (ROOT / "docs" / "reference" / "limits.md").read_text()
    rows = [(row[0].partition(",")[0].lower(), row[1]) for row in table(text, "Versions")[1:]]
    assert {package: tuple(re.findall(r"[0-9.]+", known)) for package, known in rows} == TESTED


def pins(stack):
    lines = (ROOT / "constraints" / f"{stack}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_tested_versions():
    """The page lists the recorded runs, and lowmem knows the versions that stacks pin. Every change tests `floor`."""
    runs = json.loads(stacks.RESULTS.read_text())
    written = re.search(f"(?s){stacks.MARKS[0]}(.*){stacks.MARKS[1]}", stacks.PAGE.read_text())[1]
    assert written.splitlines() == "\n".join(stacks.tables(runs)).splitlines()
    assert {run["stack"] for run in runs} <= {path.stem for path in (ROOT / "constraints").iterdir()}
    for run in runs:
        expected = {**pins("today"), **pins(run["stack"])} if run["stack"] != "newest" else run["versions"]
        assert run["versions"] == {package: expected[package] for package in TESTED}
    tested = [pins("floor"), *(run["versions"] for run in runs)]
    for package, (oldest, newest) in TESTED.items():
        versions = [tuple(map(int, each[package].split(".")[:2])) for each in tested]
        assert ".".join(map(str, min(versions))) == oldest
        assert max(versions) <= tuple(map(int, newest.split(".")))


# -- links -------------------------------------------------------------------------------------------------------------


def headings(page):
    """Returns the headings of a page in the form in which links refer to them."""
    names = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md", ROOT / "configs" / "README.md"],
    ids=lambda page: page.name,
)
def test_links(page):
    for target, heading in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked), f"{target}#{heading}"
    for name in re.findall(r"`((?:tests|scripts|benchmarks|configs|examples|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name
