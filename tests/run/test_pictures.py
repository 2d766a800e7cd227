"""What the pictures of a run show, from invented records."""

import math

import pytest

from lowmem.run import pictures

PNG = b"\x89PNG\r\n\x1a\n"
MEMORY = {"memory": 3 * 2**30, "peak_memory": 4 * 2**30, "weight_bytes": 2**30}


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


def test_the_pictures_are_png(records):
    drawn = pictures.draw(records, "one")
    assert list(drawn) == ["loss.png", "memory.png"]
    assert all(png.startswith(PNG) for png in drawn.values())


# --- Loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_picture_shows_training_evaluation_norm_and_rate(records):
    figure = pictures.loss_picture(records, "one")
    loss, norm, rate = figure.axes
    labels = [line.get_label() for line in loss.lines]
    assert labels == ["training", "training, smoothed", "evaluation"]
    raw, smooth, evaluation = ([float(y) for y in line.get_ydata()] for line in loss.lines)
    assert math.isnan(raw[8]) and not math.isnan(smooth[8])
    assert evaluation == [0.3, 0.15]
    assert (norm.get_ylabel(), rate.get_ylabel(), rate.get_xlabel()) == ("gradient norm", "learning rate", "step")
    assert figure.get_size_inches().tolist() == [9, 7]


def test_smoothing_keeps_a_constant_and_passes_over_gaps():
    assert pictures._smoothed([2.0, math.nan, *[2.0] * 30]) == pytest.approx([2.0] * 32)
    middle = pictures._smoothed([0.0] * 20 + [1.0] + [0.0] * 20)
    assert middle.argmax() == 20 and middle.max() < 0.5


def test_the_clip_coefficient_has_a_panel_where_it_was_logged_and_skipped_steps_are_gaps():
    figure = pictures.loss_picture(steps(4, clip_coef=[0.25, 0.0, None, 1.0]), "one")
    _, _, rate, clip = figure.axes
    assert (clip.get_ylabel(), clip.get_xlabel(), rate.get_xlabel()) == ("clip coefficient", "step", "")
    assert clip.get_ylim() == (0, 1.05)
    assert clip.lines[0].get_ydata() == pytest.approx([0.25, math.nan, math.nan, 1.0], nan_ok=True)
    assert figure.get_size_inches()[1] > 7


def test_the_loss_scale_has_a_panel_that_marks_skipped_steps():
    scales, counts = [8.0, 8.0, 4.0, 4.0, 2.0], [0, 1, 1, 3, 3]
    logged = steps(5, clip_coef=[1.0] * 5, loss_scale=scales, nonfinite_steps=counts)
    logged.insert(2, {"step": 2, "eval_loss": 1.0, **MEMORY})
    *_, clip, scale = pictures.loss_picture(logged, "one").axes
    assert (clip.get_xlabel(), scale.get_xlabel(), scale.get_ylabel()) == ("", "step", "loss scale")
    assert scale.get_yscale() == "log" and scale.yaxis.get_transform().base == 2
    assert scale.get_ylim() == (1, 16)
    line, skipped = scale.lines
    assert line.get_ydata().tolist() == scales
    assert skipped.get_xydata().tolist() == [[2, 8], [4, 4]]
    assert [text.get_text() for text in scale.get_legend().get_texts()] == ["skipped step"]


def test_without_skipped_steps_there_is_no_legend_for_them():
    *_, scale = pictures.loss_picture(steps(2, loss_scale=[8.0, 8.0], nonfinite_steps=[0, 0]), "one").axes
    assert len(scale.lines) == 1 and scale.get_legend() is None


def test_new_nonfinite_steps_are_differences_of_the_count():
    counts = [{"nonfinite_steps": count} for count in (2, 2, 5, 6, 6)]
    assert pictures.new_nonfinite_steps([{}, *counts, {}]) == [2, 0, 3, 1, 0]


# --- Memory -------------------------------------------------------------------------------------------------------


def test_the_memory_picture_names_peak_and_weights(records):
    (axes,) = pictures.memory_picture(records, "one").axes
    assert {"peak: 4.00 GiB", "weights: 1.00 GiB"} <= {line.get_label() for line in axes.lines}
    assert axes.get_ylabel() == "memory (GiB)" and axes.get_ylim()[0] == 0
