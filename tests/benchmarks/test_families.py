"""A small part of what `benchmarks.families` examines."""

import pytest

from benchmarks import families


@pytest.mark.parametrize(("kind", "packs"), [("gemma2", "yes"), ("gpt_oss", "refused"), ("deepseek_v3", "yes")])
def test_a_family_trains_resumes_generates_and_is_planned(kind, packs, tmp_path):
    outcomes = families.examine(kind, tmp_path)
    assert outcomes.pop("packs").partition(":")[0] == packs
    assert outcomes == {"trains": "as TRL", "resumes": "yes", "generates": "yes", "plan": "0"}
