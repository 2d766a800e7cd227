"""What the pictures of a run show, from invented records."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb

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


def norms(**parameters):
    """Records with the norm of each parameter at each step."""
    count = len(next(iter(parameters.values())))
    return steps(count, **{f"grad_norm/{name}": values for name, values in parameters.items()})


def test_the_pictures_are_png_and_norms_are_drawn_where_they_were_logged(records):
    drawn = pictures.draw(records, "one")
    assert list(drawn) == ["loss.png", "memory.png"]
    assert all(png.startswith(PNG) for png in drawn.values())
    records[0]["grad_norm/a"] = 1.0
    assert list(pictures.draw(records, "one")) == ["loss.png", "memory.png", "norms.png"]


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


# --- Norms --------------------------------------------------------------------------------------------------------


def heat_map(records):
    """Axes, color bar and cells [parameters, columns] of the picture of norms."""
    axes, bar = pictures.norms_picture(records, "one").axes
    (mesh,) = axes.collections
    return axes, bar, mesh


def test_the_norms_are_drawn_by_parameter_and_step():
    records = norms(**{"model.b.weight": [1.0, 10.0], "model.a.bias": [0.01, 100.0]})
    records.append({"step": 3, "train_loss": 1.0, **MEMORY})
    axes, bar, mesh = heat_map(records)
    assert mesh.get_array().tolist() == [[0, 1], [-2, 2]]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-2, 2)
    assert axes.get_title() == "one: gradient norm of each parameter"
    assert (axes.get_xlabel(), bar.get_ylabel()) == ("step", "log$_{10}$ of the norm")
    assert axes.get_yticks().tolist() == [0, 1] and axes.yaxis_inverted()  # the first parameter is at the top
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a.bias"]
    assert axes.get_legend() is None


def test_norms_that_are_not_finite_zero_or_missing_stand_out():
    records = norms(bad=[1.0, None], zero=[0.0, 1.0], late=[1.0, 1.0])
    del records[0]["grad_norm/late"]
    axes, _, mesh = heat_map(records)
    shown = mesh.to_rgba(mesh.get_array())[..., :3]
    red, white = to_rgb(pictures._EVAL[0]), to_rgb("white")
    finite = shown[0, 0].tolist()
    assert finite not in (list(red), list(white))
    assert np.allclose(shown, [[finite, red], [white, finite], [white, finite]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["not finite", "zero, or no gradient"]


@pytest.mark.parametrize("values", [[None, None], [0.0, None], [1.0, 1.5]])
def test_the_colors_span_at_least_a_decade(values):
    _, _, mesh = heat_map(norms(a=values))
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 1)


def test_columns_stand_at_their_steps():
    records = norms(a=[1.0, 1.0, 1.0])
    for record, step in zip(records, (10, 20, 60), strict=True):
        record["step"] = step
    _, _, mesh = heat_map(records)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [5, 15, 40, 80]
    _, _, mesh = heat_map(records[:1])
    assert mesh.get_coordinates()[0, :, 0].tolist() == [9.5, 10.5]


def test_of_many_steps_the_largest_norm_is_shown_and_none_that_is_not_finite_is_lost():
    values = [1.0] * 5000
    values[1234], values[4321] = 10.0, None
    _, _, mesh = heat_map(norms(a=values))
    (cells,) = np.ma.filled(mesh.get_array(), math.nan)
    assert len(cells) <= pictures._COLUMNS
    assert (cells == 1).sum() == 1 and np.isnan(cells).sum() == 1
    edges = mesh.get_coordinates()[0, :, 0]
    at = int(np.isnan(cells).argmax())
    assert edges[at] < 4322 < edges[at + 1] and (edges[0], edges[-1]) == (0.5, 5000.5)


def layers(count):
    """Names like those of a language model."""
    parts = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "norm_1", "norm_2")
    blocks = [f"model.layers.{n}.{part}.weight" for n in range(count) for part in parts]
    return ["model.embed_tokens.weight", *blocks, "model.norm.weight", "lm_head.weight"]


def test_few_rows_are_labelled_each_and_long_names_shortened():
    labels = pictures._row_labels([*layers(4), "transformer.h." + "very_long_name." * 5 + "projection.weight"])
    assert [row for row, _ in labels] == list(range(40))
    assert labels[1] == (1, "layers.0.attn.q") and labels[38] == (38, "lm_head")
    assert labels[39][1].startswith("h.very_") and labels[39][1].endswith(".projection")
    assert all(len(label) <= 34 for _, label in labels)


def test_many_rows_are_labelled_by_block():
    labels = pictures._row_labels(layers(32))
    assert labels[:3] == [(0, "embed_tokens"), (5, "layers.0"), (14, "layers.1")]
    assert (284, "layers.31") in labels


@pytest.mark.parametrize(
    "names", [layers(32), layers(80), [f"p{n}" for n in range(500)]], ids=["32", "80", "no blocks"]
)
def test_labels_never_run_into_each_other(names):
    labels = pictures._row_labels(names)
    assert 20 <= len(labels) <= 40
    rows = [row for row, _ in labels]
    assert min(np.diff(rows)) >= 0.6 * len(names) / 40


def test_the_picture_grows_with_its_rows_up_to_a_page():
    runs = [norms(**{f"p{n}": [1.0] for n in range(count)}) for count in (2, 40, 400)]
    small, full, largest = (pictures.norms_picture(records, "one").get_size_inches()[1] for records in runs)
    assert small < full == largest
