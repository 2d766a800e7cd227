"""The picture of a run, from invented records."""

import math

import pytest

from lowmem.run import pictures

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def records():
    """Forty logged steps, two evaluations and a loss that was not finite."""
    lines = []
    for step in range(1, 41):
        loss = None if step == 9 else 5 / step
        lines.append({"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3})
        if step % 20 == 0:
            lines.append({"step": step, "eval_loss": 6 / step})
    return lines


def steps(count, **metrics):
    """Records of `count` logged steps; a metric is a list with a value for each."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    assert len(rows) == count
    return [{"step": n, "loss": 1.0, **row} for n, row in enumerate(rows, start=1)]


def test_a_picture_is_drawn(records, tmp_path):
    for logged in ([{"step": 1, "train_loss": 1.0}], [{"step": 0, "loss": 6.0}, *records]):
        pictures.draw(tmp_path, logged)
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        (tmp_path / "loss.png").unlink()


def test_the_loss_picture_shows_training_evaluation_norm_and_rate(records):
    loss, norm, rate = pictures.loss_picture(records, "one").axes
    training, evaluation = loss.lines
    assert (training.get_label(), evaluation.get_label()) == ("loss", "eval_loss")
    assert math.isnan(training.get_ydata()[8]) and evaluation.get_ydata().tolist() == [0.3, 0.15]
    assert (norm.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()) == ("grad norm", "learning rate", "step")


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        (
            {"rewards/accuracies": [0.5, 1.0], "rewards/margins": [0.0, 9.0]},
            ["loss", "rewards/accuracies", "rewards/margins"],
        ),
        ({"accuracy": [0.5, 1.0], "margin": [0.0, 9.0]}, ["loss", "accuracy", "margin"]),
        ({"mean_token_accuracy": [0.5, 1.0]}, ["loss"]),
        ({"reward": [0.1, None], "kl": [0.0, 0.1]}, ["reward", "loss", "kl"]),
    ],
)
def test_the_metric_a_method_improves_has_a_panel(metrics, labels):
    axes = pictures.loss_picture(steps(2, **metrics), "one").axes
    assert [each.get_ylabel() for each in axes] == labels


def test_clip_coefficient_and_loss_scale_have_panels():
    scales, coefs = [8.0, 8.0, 4.0, 4.0], [0.25, 0.0, None, 1.0]
    *_, clip, scale = pictures.loss_picture(steps(4, clip_coef=coefs, loss_scale=scales), "one").axes
    assert (clip.get_ylabel(), scale.get_ylabel(), scale.get_xlabel()) == ("clip coef", "loss scale", "step")
    assert clip.lines[0].get_ydata() == pytest.approx([0.25, 0.0, math.nan, 1.0], nan_ok=True)
    assert scale.lines[0].get_ydata().tolist() == scales
