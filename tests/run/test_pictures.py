"""Tests the plot of a run with artificial records."""

import math

import pytest

from lowmem.run import report


@pytest.fixture
def records():
    """Returns forty logged steps, two evaluations and a non-finite loss."""
    lines = []
    for step in range(1, 41):
        loss = None if step == 9 else 5 / step
        lines.append({"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3})
        if step % 20 == 0:
            lines.append({"step": step, "eval_loss": 6 / step})
    return lines


def test_a_picture_is_drawn(records, tmp_path):
    for logged in ([{"step": 1, "train_loss": 1.0}], [{"step": 0, "loss": 6.0}, *records]):
        run = report.RunReport(tmp_path)
        run.records = logged
        run.on_save()
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        (tmp_path / "loss.png").unlink()


def test_the_loss_picture_shows_training_evaluation_norm_and_rate(records):
    loss, norm, rate = report.loss_picture(records, "one").axes
    training, evaluation = loss.lines
    assert (training.get_label(), evaluation.get_label()) == ("loss", "eval_loss")
    assert math.isnan(training.get_ydata()[8]) and evaluation.get_ydata().tolist() == [0.3, 0.15]
    assert (norm.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()) == ("grad norm", "learning rate", "step")


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        ({"rewards/accuracies": 0.5, "rewards/margins": 9.0}, ["loss", "rewards/accuracies", "rewards/margins"]),
        ({"reward": 0.1, "kl": 0.0}, ["reward", "loss", "kl"]),
    ],
)
def test_the_metric_a_method_improves_has_a_panel(metrics, labels):
    steps = [{"step": step, "loss": 1.0, **metrics} for step in (1, 2)]
    assert [axes.get_ylabel() for axes in report.loss_picture(steps, "one").axes] == labels
