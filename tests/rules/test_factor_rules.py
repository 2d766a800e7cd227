"""Tests how `factor_map` selects the dimensions that adafactor factors, and invalid values of it."""

import warnings

import pytest
import torch

import lowmem
from lowmem.errors import ConfigError


def make_optimizer(shape, **options):
    param = torch.nn.Parameter(torch.randn(shape))
    return param, lowmem.FusedOptimizer([("block/w", param)], rule="adafactor", lr=0.1, **options)


def state_shapes(give_gradients, shape, **options):
    """Returns the shapes of the states after one step."""
    param, opt = make_optimizer(shape, **options)
    give_gradients(opt, (param, torch.randn(shape)))
    return {name: tuple(state.shape) for name, state in opt.named_state_dict()["state"]["block/w"].items()}


def rule(*roles):
    return {"factor_map": [("w", roles)]}


@pytest.mark.parametrize(
    ("shape", "options", "want"),
    [
        # the heuristic: COLUMN is a matrix's larger dimension, or the second one if they are equal
        ((4, 6), {}, {"v": (4, 6)}),
        ((4, 6), {"min_dim_size_to_factor": 4}, {"v_row": (4,), "v_col": (6,)}),
        ((6, 4), {"min_dim_size_to_factor": 4}, {"v_row": (4,), "v_col": (6,)}),
        ((128, 127), {}, {"v": (128, 127)}),
        ((128, 129), {}, {"v_row": (128,), "v_col": (129,)}),
        # experts: the size of the first dimension does not matter
        ((2, 6, 4), {"min_dim_size_to_factor": 4}, {"v_row": (2, 4), "v_col": (2, 6)}),
        ((9, 3, 4), {"min_dim_size_to_factor": 4}, {"v": (9, 3, 4)}),
        # explicit roles apply to any size: BATCH, NONE, then ROW or COLUMN
        ((4, 2, 3), rule("col", "Row", "column"), {"v_row": (2,), "v_col": (4, 3)}),
        ((2, 3, 4, 5), rule("COLUMN", "NONE", "ROW", "BATCH"), {"v_row": (5, 3, 4), "v_col": (5, 3, 2)}),
        ((2, 3, 4, 5), rule("unfactorized", "none", "batch", "NONE"), {"v": (2, 3, 4, 5)}),
        # the first expression that matches anywhere in the name wins
        ((4, 2, 3), {"factor_map": [("^w", None), ("ck/", ["ROW", "COLUMN", "COLUMN"]), ("w", None)]}, {"v_row": (4,)}),
        ((4, 2, 3), {"factor_map": {"ck/w$": None, "w": ["ROW", "COLUMN", "COLUMN"]}}, {"v": (4, 2, 3)}),
    ],
)
def test_dimensions_that_are_factored(give_gradients, shape, options, want):
    """test_references.py draws further rules for a single parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes = state_shapes(give_gradients, shape, **options)
    assert want.items() <= shapes.items()
    assert shapes.keys() == ({"v"} if "v" in want else {"v_row", "v_col"})


@pytest.mark.parametrize(
    ("shape", "options", "roles"),
    [
        ((6, 4), rule("ROW", "COLUMN"), r"\['ROW', 'COLUMN'\]"),
        ((6, 4), rule("NONE", "COLUMN"), r"\['NONE', 'COLUMN'\]"),
        ((6,), rule("ROW"), r"\['ROW'\]"),
        # factored nevertheless, since it is large enough
        ((6, 4), rule("NONE", "NONE"), r"\['NONE', 'NONE'\]"),
    ],
)
def test_an_ignored_rule_warns(give_gradients, shape, options, roles):
    """As in T5X, vectors and matrices follow the heuristic. The warning names the parameter."""
    with pytest.warns(UserWarning, match=rf"'block/w' of shape \[6(, 4)?\]: .* heuristic is used .*{roles}"):
        shapes = state_shapes(give_gradients, shape, **options, min_dim_size_to_factor=4)
    assert shapes == ({"v": (6,)} if len(shape) == 1 else {"v_row": (4,), "v_col": (6,)})


WHERE = r"'block/w' of shape \[2, 3, 4\]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (rule("ROW", "COLUMN"), rf"{WHERE}.*\['ROW', 'COLUMN'\] has 2 roles for 3 dimensions"),
        ({"factor_map": [("bias", None)]}, rf"{WHERE}: factor_map has no rule for it; end the map with \('\.\*', "),
        ({"factor_map": [("w", None)], "factored": False}, "factor_map=.*None where factored=False"),
        ({"factor_map": [("(", None)]}, r"factor_map: '\(' is not a regular expression"),
        ({"factor_map": [("w", None, None)]}, r"factor_map=.*\(regular expression, value\)"),
        ({"factor_map": "standard"}, "factor_map='standard'.*a list of"),
        (rule("ROW", "COLUMN", "DIAGONAL"), "factor_map=.*'DIAGONAL'.*row, col, column, batch, none, unfactorized"),
        ({"factor_map": [("w", "ROW")]}, "factor_map='ROW'.*'HEURISTIC'"),
        ({"factor_map": [("never", "ROWS"), ("w", None)]}, "factor_map='ROWS'"),
        ({"multiply_by_parameter_scale": [("bias", True)]}, rf"{WHERE}: multiply_by_parameter_scale has no rule"),
        ({"multiply_by_parameter_scale": [("w", 1.0)]}, "multiply_by_parameter_scale=1.0.*True or False"),
        ({"multiply_by_parameter_scale": [("[", True)]}, r"multiply_by_parameter_scale: '\[' is not a regular"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer((2, 3, 4), **options)


@pytest.mark.parametrize("options", [{}, {"factor_map": [(".*", "HEURISTIC")]}])
def test_four_dimensions_need_a_rule(options):
    with pytest.raises(ConfigError, match=r"'block/w' of shape \[2, 3, 4, 5\]: rule HEURISTIC.*in factor_map"):
        make_optimizer((2, 3, 4, 5), **options)
