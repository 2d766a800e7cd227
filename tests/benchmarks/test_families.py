"""A small part of what `benchmarks.families` examines."""

from benchmarks import families


def test_a_family_trains_resumes_generates_and_is_planned(tmp_path):
    outcomes = families.examine("gpt_oss", tmp_path)
    assert outcomes.pop("packs").partition(":")[0] == "refused"
    assert outcomes == {"trains": "as TRL", "resumes": "yes", "generates": "yes", "plan": "0"}
