"""Models of images and text on the command line: trained, and what answers, counts and plans them."""

import shlex

import pytest
from support import runs, vision


@pytest.fixture(scope="module", params=vision.IMAGES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return vision.save(tmp_path_factory.mktemp("model") / kind, kind)


@pytest.fixture
def write(model, tmp_path):
    """A function: a YAML file with the model, and rows with images or other rows."""

    def of(command="sft", rows=None, **changes):
        file = runs.write_rows(tmp_path / "rows.jsonl", rows or vision.rows(tmp_path, command=command))
        data = [{"path": "json", "data_files": str(file)}]
        return runs.write(tmp_path, command, model_name_or_path=str(model), datasets=data, **changes)

    return of


def test_the_printed_generate_command_answers_with_and_without_an_image(write, tmp_path):
    ended = runs.train(tmp_path, "sft", "--config", write())
    assert ended.status == 0, ended.err
    words = [*shlex.split(ended.out.partition("try it")[2])[1:], "--max-new-tokens", 4, "--system", "be brief"]
    for image in ([], ["--image", tmp_path / "1.png"], ["--image", tmp_path / "1.png", "--image", tmp_path / "2.png"]):
        answer = runs.lowmem(*words, *image)
        assert (answer.status, answer.err) == (0, ""), answer
    nothing = runs.lowmem(*words, "--image", tmp_path / "none.png")
    assert nothing.status == 2 and "--image: " in nothing.err and "none.png" in nothing.err


def test_only_models_that_generate_are_asked(tmp_path):
    scores = runs.lowmem("generate", runs.assets() / "scores", "hello")
    assert scores.status == 2 and "its model, LlamaForSequenceClassification, does not generate text" in scores.err
    text = runs.lowmem("generate", runs.assets() / "model", "hello", "--image", tmp_path)
    assert text.status == 2 and "no chat template with images. Omit --image" in text.err


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_positions_of_images_do_not_limit_texts(write, tmp_path):
    """The tower has 17 of them."""
    ended = runs.train(tmp_path, "sft", "--config", write(rows=[{"text": "the old cat sat " * 20}] * 2))
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_rewards_of_images_are_refused_without_a_list_of_classes(write, tmp_path):
    ended = runs.train(tmp_path, "reward", "--config", write("reward", runs.FILES["preferences.jsonl"]))
    assert ended.status == 2 and "Use a language model of text, such as Llama" in ended.err and len(ended.err) < 500
