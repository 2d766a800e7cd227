"""scripts/stacks.py: what a report of pytest comes to, and where it is written."""

import json

import pytest

from scripts import stacks

REPORT = """<testsuites><testsuite>
<testcase classname="tests.hf.test_weights" name="test_a[x|y]"/>
<testcase classname="tests.placements.test_zero3" name="test_b"><skipped message="no libaio"/></testcase>
<testcase classname="tests.step.test_loops" name="test_c"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.step.test_loops" name="test_d"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A page between whose marks nothing is, a report, and a function: what a run of a stack makes of them."""
    page, report = tmp_path / "page.md", tmp_path / "report.xml"
    page.write_text(f"before\n{stacks.MARKS[0]}{stacks.MARKS[1]}\nafter\n")
    report.write_text(REPORT)
    monkeypatch.setattr(stacks, "PAGE", page)
    monkeypatch.setattr(stacks, "RESULTS", tmp_path / "stacks.json")

    def run(stack):
        stacks.main(stack, report)
        return page.read_text(), json.loads(stacks.RESULTS.read_text())

    return run


def test_a_report_is_counted_by_part_of_the_package(written):
    _, [run] = written("floor")
    assert (run["trainers"], run["engine"]) == ({"passed": 1, "skipped": 1}, {"failed": 2})
    assert run["skipped"] == {"no libaio": 1}
    assert run["failed"] == {"test_loops::test_c": "assert 1 == 2", "test_loops::test_d": "no fixture"}


def test_a_run_replaces_that_of_its_stack_alone(written):
    for stack in ("floor", "today", "floor"):
        page, runs = written(stack)
    assert [run["stack"] for run in runs] == ["today", "floor"]
    assert page.startswith("before\n<!-- stacks -->\n| stack |") and page.endswith("\n<!-- /stacks -->\nafter\n")
    assert page.count("| 1 / 0 / 1 | 0 / 2 / 0 |") == 2
    assert page.count("`test_loops::test_d`") == 2
