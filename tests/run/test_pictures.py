"""The picture of a run, from invented records."""

import math

import pytest

from lowmem.run import pictures

PNG = b"\x89PNG\r\n\x1a\n"
MEMORY = {"tokens": 100, "memory": 3 * 2**30, "peak_memory": 4 * 2**30, "weight_bytes": 2**30}


@pytest.fixture
def records():
    """Forty logged steps, two evaluations and a loss that was not finite."""
    lines = []
    for step in range(1, 41):
        loss = None if step == 9 else 5 / step
        lines.append({"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, **MEMORY})
        if step % 20 == 0:
            lines.append({"step": step, "eval_loss": 6 / step, **MEMORY})
    return lines


def test_a_picture_is_drawn(records, tmp_path):
    for logged in ([{"step": 1, "train_loss": 1.0}], [{"step": 0, "loss": 6.0}, *records]):
        pictures.draw(tmp_path, logged)
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        (tmp_path / "loss.png").unlink()


def test_the_loss_picture_shows_training_evaluation_norm_and_rate(records):
    loss, norm, rate = pictures.loss_picture(records, "one").axes
    assert [line.get_label() for line in loss.lines] == ["training", "training, smoothed", "evaluation"]
    raw, smooth, evaluation = ([float(y) for y in line.get_ydata()] for line in loss.lines)
    assert math.isnan(raw[8]) and not math.isnan(smooth[8])
    assert evaluation == [0.3, 0.15]
    assert (norm.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()) == ("gradient norm", "learning rate", "step")
    for axes in pictures.loss_picture(records[:1], "one").axes:  # a single step is shown as a point
        assert any(len(line.get_xdata()) == 1 and line.get_marker() == "o" for line in axes.lines)


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        ({"rewards/accuracies": 0.5, "rewards/margins": 9.0}, ["loss", "accuracy", "reward margin"]),
        ({"reward": 0.1, "kl": 0.0}, ["reward", "loss", "KL divergence"]),
    ],
)
def test_the_metric_a_method_improves_has_a_panel(metrics, labels):
    steps = [{"step": step, "loss": 1.0, **metrics, **MEMORY} for step in (1, 2)]
    assert [axes.get_ylabel() for axes in pictures.loss_picture(steps, "one").axes] == labels
