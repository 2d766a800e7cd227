"""scripts/stacks.py: what a report of pytest comes to, and where it is written."""

import json

from scripts import stacks

REPORT = """<testsuites><testsuite>
<testcase classname="tests.hf.test_weights" name="test_a[x|y]"/>
<testcase classname="tests.placements.test_zero3" name="test_b"><skipped message="no libaio"/></testcase>
<testcase classname="tests.step.test_loops" name="test_c"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.step.test_loops" name="test_d"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


def test_a_run_is_counted_by_part_of_the_package_and_replaces_that_of_its_stack(tmp_path, monkeypatch):
    page, report, results = (tmp_path / name for name in ("page.md", "report.xml", "stacks.json"))
    page.write_text(f"before\n{stacks.MARKS[0]}{stacks.MARKS[1]}\nafter\n")
    report.write_text(REPORT)
    monkeypatch.setattr(stacks, "PAGE", page)
    monkeypatch.setattr(stacks, "RESULTS", results)
    for stack in ("floor", "today", "floor"):
        stacks.main(stack, report)
    runs, text = json.loads(results.read_text()), page.read_text()
    assert [run["stack"] for run in runs] == ["today", "floor"]
    assert (runs[0]["trainers"], runs[0]["engine"]) == ({"passed": 1, "skipped": 1}, {"failed": 2})
    assert runs[0]["skipped"] == {"no libaio": 1}
    assert runs[0]["failed"] == {"test_loops::test_c": "assert 1 == 2", "test_loops::test_d": "no fixture"}
    assert text.startswith("before\n<!-- stacks -->\n| stack |") and text.endswith("\n<!-- /stacks -->\nafter\n")
    assert text.count("| 1 / 0 / 1 | 0 / 2 / 0 |") == 2
