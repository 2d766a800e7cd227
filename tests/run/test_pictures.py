"""What the picture of a run shows, from invented records."""

import json
import math

import pytest

from lowmem.run import pictures
from lowmem.run.metrics import write_metrics

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


def steps(count, **metrics):
    """Records of `count` logged steps; a metric is a list with a value for each."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    assert len(rows) == count
    return [{"step": n, "loss": 1.0, **row, **MEMORY} for n, row in enumerate(rows, start=1)]


def test_a_picture_is_drawn(records, tmp_path):
    for logged in ([{"step": 1, "train_loss": 1.0}], [{"step": 0, "loss": 6.0}, *records]):
        pictures.draw(tmp_path, logged)
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        (tmp_path / "loss.png").unlink()


def test_a_line_of_metrics_is_json(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "loss": math.nan, "path": tmp_path}, {"step": 2, "loss": 0.5}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [{"step": 1, "loss": None, "path": str(tmp_path)}, {"step": 2, "loss": 0.5}]


def test_the_loss_picture_shows_training_evaluation_norm_and_rate(records):
    figure = pictures.loss_picture(records, "one")
    loss, norm, rate = figure.axes
    labels = [line.get_label() for line in loss.lines]
    assert labels == ["training", "training, smoothed", "evaluation"]
    raw, smooth, evaluation = ([float(y) for y in line.get_ydata()] for line in loss.lines)
    assert math.isnan(raw[8]) and not math.isnan(smooth[8])
    assert evaluation == [0.3, 0.15]
    assert (norm.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()) == ("gradient norm", "learning rate", "step")


def test_a_run_with_one_line_of_metrics_is_shown_as_points(records):
    for axes in pictures.loss_picture(records[:1], "one").axes:
        drawn = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert drawn and all(line.get_marker() == "o" for line in drawn)


def test_the_picture_of_a_reward_shows_it_and_the_loss_below():
    records = steps(3, reward=[0.1, None, 0.3], kl=[0.0, 0.1, 0.2])
    records.append({"step": 3, "eval_loss": 0.0, "eval_reward": 0.4, "eval_rewards/f/mean": 1.0, **MEMORY})
    reward, *others = pictures.loss_picture(records, "one").axes
    assert (reward.get_ylabel(), reward.get_title()) == ("reward", "one: reward")
    assert [line.get_label() for line in reward.lines] == ["training", "evaluation"]
    assert reward.lines[0].get_ydata() == pytest.approx([0.1, math.nan, 0.3], nan_ok=True)
    assert [axes.get_ylabel() for axes in others] == ["loss", "KL divergence"]


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        ({"rewards/accuracies": [0.5, 1.0], "rewards/margins": [0.0, 9.0]}, ["accuracy", "reward margin"]),
        ({"accuracy": [0.5, 1.0], "margin": [0.0, 9.0]}, ["accuracy", "reward margin"]),
        ({"mean_token_accuracy": [0.5, 1.0]}, []),
    ],
)
def test_preferences_have_panels_and_no_axis_a_unit_that_the_loss_may_not_have(metrics, labels):
    loss, *others = pictures.loss_picture(steps(2, **metrics), "one").axes
    assert loss.get_ylabel() == "loss"
    assert [axes.get_ylabel() for axes in others] == labels


def test_smoothing_keeps_a_constant_and_passes_over_gaps():
    assert pictures._smoothed([2.0, math.nan, *[2.0] * 30]) == pytest.approx([2.0] * 32)
    middle = pictures._smoothed([0.0] * 20 + [1.0] + [0.0] * 20)
    assert middle.argmax() == 20 and middle.max() < 0.5


def test_the_clip_coefficient_has_a_panel_where_it_was_logged():
    _, clip = pictures.loss_picture(steps(4, clip_coef=[0.25, 0.0, None, 1.0]), "one").axes
    assert (clip.get_ylabel(), clip.get_xlabel()) == ("clip coefficient", "step")
    assert clip.lines[0].get_ydata() == pytest.approx([0.25, 0.0, math.nan, 1.0], nan_ok=True)


def test_the_loss_scale_has_a_panel_which_shows_skipped_steps():
    scales = [8.0, 8.0, 4.0, 4.0, 2.0]
    logged = steps(5, clip_coef=[1.0] * 5, loss_scale=scales)
    logged.insert(2, {"step": 2, "eval_loss": 1.0, **MEMORY})
    *_, clip, scale = pictures.loss_picture(logged, "one").axes
    assert (clip.get_xlabel(), scale.get_xlabel(), scale.get_ylabel()) == ("", "step", "loss scale")
    assert scale.get_yscale() == "log" and scale.lines[0].get_ydata().tolist() == scales
