"""Kernels in Triton's interpreter match the eager sweep bit for bit. These tests need TRITON_INTERPRET=1."""

import itertools
import threading

import numpy as np
import pytest
import torch
from support.interpreted import INTERPRETED
from support.products import FULL
from support.updated import Parameter, batches_of, run, update

from lowmem.kernels.arguments import TileSize
from lowmem.kernels.kernels import Launch
from lowmem.tiles.layout import Layout
from lowmem.tiles.sweep import Reading

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in tests/test_parts.py, in Triton's interpreter")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Matrices that take several programs, with partial tiles in both dimensions; experts, a convolution, vectors.
SHAPES = [(35, 70), (33, 1), (1, 80), (3, 18, 30), (2, 3, 5, 5), (1100,), ()]
NO_CONVOLUTION = [shape for shape in SHAPES if len(shape) < 4]
GROUPED = [(35, 128), (3, 9, 64), (576,)]  # their rows consist of complete groups
NUMBERS = Reading(inverse_scale=torch.tensor(0.37), limit=torch.tensor(0.01), clip_coef=torch.tensor(0.77))
HEURISTIC = {"min_dim_size_to_factor": 2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """With small tiles, several programs update a matrix. The interpreter takes the same time."""
    monkeypatch.setattr("lowmem.kernels.source.MATRIX_TILE", TileSize(8, 64, 2))
    monkeypatch.setattr("lowmem.kernels.source.LINE_TILE", TileSize(1, 256, 2))


def make_parameters(rule, dtype=F32, rounding="nearest", storage="float32", options=None, shapes=SHAPES, **more):
    return [
        Parameter(rule, shape, dtype, rounding, storage, options=options or {}, name=str(shape), **more)
        for shape in shapes
    ]


def cases(*rows, sample=1):
    """Parametrizes a test with the first `sample` cases, or with all of them if LOWMEM_FULL=1."""
    rows = rows if FULL else rows[:sample]
    return pytest.mark.parametrize("case", rows, ids=lambda case: " ".join(map(str, case)).replace("torch.", ""))


def assert_exact(differences):
    assert differences
    assert {key: different for key, (different, _) in differences.items() if different} == {}


def assert_close(differences, dtype=F32):
    """A different summation order may change the last bit of a float32 number, and so a later rounding to 16 bits."""
    assert differences
    assert {key: off for key, (_, off) in differences.items() if off > (2e-6 if dtype == F32 else 1e-2)} == {}


@cases(("adamw", BF16, "stochastic", "bfloat16"), ("lion",), ("adamw",), ("lomo", BF16))
def test_elementwise_rules(case):
    assert_exact(update(make_parameters(*case)))


@cases(
    ("adalomo", F32), ("scaled_adam", BF16, "stochastic"),
    ("adafactor_t2t", F32, "nearest", "float32", {"simulated_quantize_bits": 8, "beta1": 0.9}),
    ("lans", BF16, "master", "float32", {"variant": "step", "lower_bound": 0.1, "clip_gradient": 0.3}),
    ("adalomo", BF16, "stochastic"), ("lans", F32), ("adafactor_t2t", BF16), sample=3,
)  # fmt: skip
def test_rules_that_sum(case):
    assert_close(update(make_parameters(*case), steps=5 if case[0] == "scaled_adam" else 2), case[1])


@cases(
    ("adafactor", BF16, "stochastic", "bfloat16", {"beta1": 0.9, "variant": "op_by_op", "max_parameter_scale": 0.5}),
    ("adafactor", F32, "nearest", "float32", {"beta1": 0.9, "skip_nan_updates": True}),
)
def test_options_of_adafactor(case):
    *case, options = case
    assert_close(update(make_parameters(*case, HEURISTIC | options, NO_CONVOLUTION)), case[1])


@cases(("N R C", (4, 20, 30)), ("C B R", (20, 3, 30)), ("N B R C", (2, 3, 20, 30)), ("B R C C", (3, 5, 2, 4)), sample=2)
def test_stacks_of_adafactor(case):
    dimensions, shape = case
    names = {"N": "NONE", "B": "BATCH", "R": "ROW", "C": "COLUMN"}
    rule = tuple(names[dimension] for dimension in dimensions.split())
    options = HEURISTIC | {"factor_map": [(".*", rule)]}
    assert_close(update(make_parameters("adafactor", options=options, shapes=[shape])))


@cases(
    ("lion", F16, "stochastic", "float16"), ("lion", BF16, "compensated", "bfloat16"), ("lion", F16, "compensated"),
    ("lion", BF16, "compensated8"), ("lion", BF16, "master"), sample=2,
)  # fmt: skip
def test_storages(case):
    assert_exact(update(make_parameters(*case, shapes=[(35, 70), (7,), ()])))


@cases(
    ("adamw", BF16, "int12", "8bit"), ("lion", BF16, "int10", "8bit_nearest"), ("adamw", F32, "nearest", "8bit_64"),
    ("lion", BF16, "int8"),
)  # fmt: skip
def test_storages_in_groups(case):
    assert_exact(update(make_parameters(*case, shapes=GROUPED), reading=NUMBERS))


def test_quantized_weights_of_a_rule_that_sums():
    assert_close(update(make_parameters("adalomo", BF16, "int12", shapes=GROUPED)), BF16)


def test_aligned_tensors_and_tensors_that_are_not():
    aligned = make_parameters("lion", BF16, "stochastic", "bfloat16", shapes=[(17, 272), (3, 16, 32)])
    assert all(param.member().is_aligned for param in aligned)
    assert_exact(update(aligned, aligned=True))
    skewed = make_parameters("lion", BF16, "stochastic", "bfloat16", shapes=[(17, 272)], skewed=1)
    assert not skewed[0].member().is_aligned
    assert_exact(update(skewed))
    scales = make_parameters("adalomo", BF16, "int12", shapes=[(3, 1, 64), (3, 8, 64)])  # 2 and 16 bytes per slice
    assert [param.member().is_aligned for param in scales] == [False, True]


@pytest.mark.parametrize("rule", ["adalomo", "lion"])
def test_a_gradient_that_is_not_finite_leaves_its_parameter_unchanged(rule):
    shapes = [(3, 20, 40), (3, 7, 9)]
    before = make_parameters(rule, shapes=shapes)
    assert_close(update(before, steps=1, spoil="(3, 20, 40)"))
    moved = [bool(param.tensors["param", 0].ne(old.tensors["param", 0]).any()) for param, old in pairs(before, rule)]
    assert moved == [False, True]
    assert not any(bool(state.any()) for state in before[0].small.values())


def launches_of(batch):
    return sum(isinstance(step, Launch) for step in batch.steps)


def pairs(parameters, rule):
    torch.manual_seed(0)
    return zip(parameters, make_parameters(rule, shapes=[param.shape for param in parameters]), strict=True)


@pytest.mark.parametrize("rule", ["adalomo", "adamw"])
def test_a_decided_step_is_read_by_member(rule):
    decided = Reading(finite=torch.tensor([True, False]), square_sums=torch.tensor([4.0, 5.0], dtype=torch.float64))
    parameters = make_parameters(rule, shapes=[(30, 40), (20, 30)])
    ((_, batch),) = batches_of(parameters, decided)
    assert launches_of(batch) == {"adalomo": 6, "adamw": 2}[rule]
    assert_close(update(parameters, reading=decided))
    assert [bool(param.small[key].any()) for param in parameters for key in [next(iter(param.small))]] == [True, False]


@pytest.mark.parametrize("rule", ["adalomo", *(["lans"] if FULL else [])])
def test_a_parameter_has_the_same_bits_alone_and_together(rule):
    results = []
    for groups in ([[0, 1, 2]], [[2], [1], [0]], [[1, 2], [0]]):
        torch.manual_seed(0)
        parameters = make_parameters(rule, shapes=[(35, 20), (9, 70), (12, 5)])
        grads = [param.gradient(1) for param in parameters]
        for group in groups:
            members = [parameters[n] for n in group]
            ((_, batch),) = batches_of(members, Reading())
            run(batch, members, [grads[n] for n in group], 1, Reading())
        results.append([tensor for param in parameters for tensor in (*param.tensors.values(), *param.small.values())])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@cases(("adalomo", F32), ("adamw", BF16, "stochastic", "8bit"), ("adafactor_t2t", BF16))
def test_programs_of_a_launch_write_to_places_of_their_own(case, monkeypatch):
    """The order of programs does not matter either, and nothing outside of the tensors is written."""
    from triton.runtime import interpreter

    from lowmem.kernels import Kernels

    stored, executor = [], interpreter.interpreter_builder
    masked, launch, turn = executor.create_masked_store, Kernels.launch, executor.set_grid_idx

    def store(ptrs, value, mask, *rest):
        places = np.asarray(ptrs.data).ravel()
        stored.append(places[np.broadcast_to(np.asarray(mask.data).ravel(), places.shape)])
        return masked(ptrs, value, mask, *rest)

    def watched(self, step, args):
        stored.clear()
        launch(self, step, args)
        places = np.concatenate(stored)
        assert len(np.unique(places)) == len(places) > 0
        known = [*tensors, *(tensor for tensor in args if tensor.dtype in (F32, torch.float64))]
        bounds = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in known]
        assert sum(((places >= start) & (places < end)).sum() for start, end in bounds) >= len(places)

    results = []
    monkeypatch.setattr(executor, "create_masked_store", store)
    monkeypatch.setattr(Kernels, "launch", watched)
    for shuffled in (False, True):
        if shuffled:
            monkeypatch.setattr(executor, "set_grid_idx", lambda x, y, z: turn(executor.grid_dim[0] - 1 - x, y, z))
        torch.manual_seed(0)
        parameters = make_parameters(*case, shapes=GROUPED)
        tensors = [tensor for param in parameters for tensor in (*param.tensors.values(), *param.small.values())]
        for members, batch in batches_of(parameters, Reading()):
            for step in (1, 2):
                run(batch, members, [param.gradient(step) for param in members], step, Reading())
        assert all(param.is_intact() for param in parameters)
        results.append(tensors)
    assert all(map(torch.equal, *results))


class Ranks:
    """Simulates ranks by threads, of which one runs at a time."""

    def __init__(self, count):
        self.turn, self.meeting, self.given = threading.Lock(), threading.Barrier(count), []
        self.calls = 0

    def all_reduce(self, tensors, *, largest=False):
        self.given.append(tensors[0].clone())
        self.turn.release()
        self.meeting.wait(60)
        result = torch.stack(self.given).amax(0) if largest else torch.stack(self.given).sum(0)
        if self.meeting.wait(60) == 0:
            self.given.clear()
            self.calls += 1
        self.meeting.wait(60)
        self.turn.acquire()
        return [result]


def shard_of(full, start, stop):
    """Returns a rank's parameter, which has the elements from `start` to `stop`."""
    options = {"options": full.options, "name": full.name}
    shard = Parameter(full.rule, full.shape, full.dtype, full.rounding, full.storage, **options)
    shard.layout = Layout.of(full.shape, full.spec.view, start, stop)
    for (name, n), tensor in full.tensors.items():
        group = full.storages[name].parts[n].group
        shard.tensors[name, n] = tensor.reshape(-1)[start // group : stop // group].clone()
    return shard


@cases(
    ("adalomo", BF16, "stochastic", "float32", {}, (3, 6, 64)), ("lion", BF16, "stochastic", "8bit", {}, (20, 96)),
    ("adafactor_t2t", F32, "nearest", "float32", {"simulated_quantize_bits": 8}, (20, 96)),
    ("adalomo", F32, "nearest", "float32", {}, (20, 96)), sample=2,
)  # fmt: skip
def test_shards_of_ranks(case):
    """Flat shards contain the end of a row, whole rows and the start of a row. One shard is empty."""
    *case, shape = case
    (full,), ranks, failures = make_parameters(*case, shapes=[shape]), Ranks(4), []
    grad, bounds = full.gradient(1), [0, 480, 992, full.tensors["param", 0].numel(), full.tensors["param", 0].numel()]
    shards = [shard_of(full, *at) for at in itertools.pairwise(bounds)]

    def train(shard, at):
        try:
            with ranks.turn:
                ((_, batch),) = batches_of([shard], Reading(), ranks=ranks)
                run(batch, [shard], [grad.reshape(-1)[slice(*at)].clone()], 1, Reading())
        except BaseException as error:
            failures.append(error)
            ranks.meeting.abort()

    pairs = zip(shards, itertools.pairwise(bounds), strict=True)
    threads = [threading.Thread(target=train, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    full.expect(grad, 1, Reading())
    for key, tensor in full.tensors.items():
        tensor.copy_(torch.cat([shard.tensors[key] for shard in shards]).view(tensor.shape))
    for shard in shards:
        full.small = shard.small
        assert_close(full.differences(), case[1])
    assert ranks.calls == {"adalomo": 2, "lion": 1, "adafactor_t2t": 3}[full.rule]
