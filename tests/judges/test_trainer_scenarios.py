"""User code and custom models with transformers' trainer and with the fused trainer.

The cases are the most important ones of transformers' trainer tests. Each is a function of a trainer class. Its results
must be bitwise equal for both classes.
"""

import random
import re

import numpy as np
import pytest
import torch
import transformers as hf
from judged import EQUAL, REFUSED, judge, report
from safetensors.torch import load_file, save_file
from support.products import FULL
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from lowmem.trainer import FusedTrainer

ROWS = 24


class Line(nn.Module):
    """Two scalars without a configuration. Returns a tuple, as models of transformers once did."""

    def __init__(self, outputs=1):
        super().__init__()
        self.slope, self.offset, self.outputs = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(())), outputs

    def forward(self, x, labels=None):
        y = x * self.slope + self.offset
        return (*(() if labels is None else (F.mse_loss(y, labels),)), *[y] * self.outputs)


class Catalogue(nn.Module):
    """Two embeddings that are not input embeddings, a buffer and dropout. Returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(60, 8)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3)

    def forward(self, user, item, labels=None):
        logits = self.head(self.dropout(self.norm(torch.cat([self.users(user), self.items(item)], -1))))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class Diary(nn.Module):
    """A class with a custom loading method, because one of its buffers grows."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x, labels=None):
        self.seen = torch.cat([self.seen, x.detach()])
        return {"loss": F.mse_loss(self.line(x[:, None])[:, 0], labels)}

    def load_state_dict(self, state_dict, strict=True):
        self.seen = torch.empty_like(state_dict["seen"])
        return super().load_state_dict(state_dict, strict)


def points(count=ROWS, seed=0):
    source = np.random.default_rng(seed)
    x = source.normal(size=count).astype(np.float32)
    y = (2 * x + 3 + source.normal(scale=0.1, size=count)).astype(np.float32)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def purchases(count=ROWS, seed=0):
    source = random.Random(seed)
    return [
        {"user": source.randrange(40), "item": source.randrange(60), "labels": source.randrange(3)}
        for _ in range(count)
    ]


def line():
    return Line()


def catalogue():
    torch.manual_seed(0)
    return Catalogue()


def trainer_of(trainer, folder, model, rows, evaluated=None, keywords=None, **options):
    args = hf.TrainingArguments(**{
        "output_dir": str(folder), "learning_rate": 0.1, "per_device_train_batch_size": 4, "logging_steps": 1,
        "num_train_epochs": 2, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "optim": "adamw_torch", **options,
    })  # fmt: skip
    return trainer(model, args, train_dataset=rows, eval_dataset=evaluated, **(keywords or {}))


def outcome(trainer):
    """Returns all tensors of a trainer's model, and its log without times and norms."""
    exact = ("loss", "learning_rate", "epoch", "step", "train_loss")
    logs = [
        {name: value for name, value in entry.items() if name in exact or name in ("eval_loss", "eval_near")}
        for entry in trainer.state.log_history
    ]
    return [tensor.detach().clone() for tensor in trainer.model.state_dict().values()], logs


def trained(trainer, folder, model, rows, **options):
    made = trainer_of(trainer, folder, model, rows, **options)
    start = outcome(made)[0]
    made.train()
    assert not all(map(torch.equal, start, outcome(made)[0]))
    return outcome(made)


def near(prediction):
    return {"near": float((abs(prediction.predictions - prediction.label_ids) < 2).mean())}


# -- scenarios ---------------------------------------------------------------------------------------------------------


def a_seed_reproduces_a_training(trainer, folder):
    runs = [trained(trainer, folder, line(), points(), seed=seed) for seed in (42, 42, 314)]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])
    return runs


def a_model_without_a_configuration(trainer, folder):
    return [trained(trainer, folder, catalogue(), purchases(), max_grad_norm=norm) for norm in (0.0, 1.0)]


def accumulated_gradients(trainer, folder):
    halves = trained(
        trainer, folder, line(), points(), gradient_accumulation_steps=2, per_device_train_batch_size=2, seed=1
    )
    whole = trained(trainer, folder, line(), points(), seed=1)
    torch.testing.assert_close(halves[0], whole[0])
    return halves


def another_line_of_data(trainer, folder):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(points())

    class TwoLoaders(trainer):
        def get_train_dataloader(self):
            return [*super().get_train_dataloader(), *super().get_train_dataloader()]

    return trained(trainer, folder, line(), Stream(), max_steps=5), trained(TwoLoaders, folder, line(), points())


def evaluation_and_prediction(trainer, folder):
    """Evaluates and predicts before and after training, for one and two outputs, named datasets, and uneven rows."""
    uneven = [{"x": np.full(n // 4 + 1, n, np.float32), "labels": np.ones(n // 4 + 1, np.float32)} for n in range(8)]
    sets = {"one": points(7, seed=1), "other": points(9, seed=2)}
    found = []
    for outputs in (1, 2):
        keywords = {"compute_metrics": near} if outputs == 1 else None
        made = trainer_of(
            trainer, folder, Line(outputs), points(), sets, keywords,
            eval_strategy="epoch", per_device_eval_batch_size=4, eval_accumulation_steps=outputs,
        )  # fmt: skip
        for _ in range(2):
            metrics = {name: value for name, value in made.evaluate().items() if "loss" in name or "near" in name}
            found += [metrics, made.predict(sets["one"])[:2]]
            made.compute_metrics, metric = None, made.compute_metrics
            found.append(made.predict(uneven)[:2])
            made.compute_metrics = metric
            made.train()
        found.append(outcome(made))
    return found


def smoothed_labels(trainer, folder):
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=3))
    source = torch.Generator().manual_seed(0)
    rows = [{"pixel_values": torch.randn(3, 16, 16, generator=source), "labels": n % 3} for n in range(8)]
    return trained(trainer, folder, model, rows, label_smoothing_factor=0.2, weight_decay=0.1)


def a_training_that_is_resumed(trainer, folder):
    """Resumes in the first and in the second epoch, with a buffer and a frozen parameter."""
    found = []
    for frozen in (False, True):
        straight = None
        for step in (None, 2, 8):
            model = catalogue()
            model.users.requires_grad_(not frozen)
            made = trainer_of(trainer, folder, model, purchases(), save_strategy="steps", save_steps=2)
            made.train(resume_from_checkpoint=None if step is None else str(folder / f"checkpoint-{step}"))
            tensors, logs = outcome(made)
            straight = straight or (tensors, logs)
            assert same(tensors, straight[0])
            assert [entry.get("loss") for entry in logs] == [entry.get("loss") for entry in straight[1]]
        found.append(straight)
    return found


def a_class_that_loads_itself(trainer, folder):
    options = {"save_strategy": "steps", "save_steps": 2}
    torch.manual_seed(0)
    straight = trained(trainer, folder, Diary(), points(), **options)
    made = trainer_of(trainer, folder, Diary(), points(), **options)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert same(outcome(made)[0], straight[0])
    return straight


def weights_that_were_split_by_hand(trainer, folder):
    """The removed file's checksum has to be removed, too. Checkpoints of transformers have no checksums."""
    straight = trained(trainer, folder, catalogue(), purchases(), save_strategy="steps", save_steps=2)
    saved = folder / "checkpoint-2"
    names = {}
    for number, (name, tensor) in enumerate(load_file(saved / "model.safetensors").items()):
        names[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, saved / names[name])
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text(str({"metadata": {}, "weight_map": names}).replace("'", '"'))
    if (sums := saved / "checksums.txt").exists():
        sums.write_text("".join(row for row in sums.read_text().splitlines(True) if "  model.safetensors" not in row))
    made = trainer_of(trainer, folder, catalogue(), purchases())
    made.train(resume_from_checkpoint=str(saved))
    assert same(outcome(made)[0], straight[0])
    return straight


def the_best_model_and_an_early_end(trainer, folder):
    made = trainer_of(
        trainer, folder, line(), points(), points(8, seed=3), {"compute_metrics": near}, num_train_epochs=20,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="near",
        save_total_limit=2, learning_rate=0.3,
    )  # fmt: skip
    made.add_callback(hf.EarlyStoppingCallback(2, 1e-4))
    made.train()
    assert 0 < made.state.global_step < 20 * ROWS // 4
    kept = sorted(path.name for path in folder.iterdir())
    return outcome(made), made.state.best_global_step, made.state.best_metric, kept, made.evaluate()["eval_near"]


def a_model_for_each_training(trainer, folder):
    made = trainer_of(trainer, folder, None, purchases(), keywords={"model_init": Catalogue})
    found = []
    for seed in (42, 42, 314):
        made.args.seed = seed
        made.train()
        found.append(outcome(made)[0])
    assert same(found[0], found[1])
    assert not same(found[0], found[2])
    return found


def the_same_trainer_twice(trainer, folder):
    made = trainer_of(trainer, folder, catalogue(), purchases())
    made.train()
    first = outcome(made)
    made.train()
    return first, outcome(made)


def the_events_of_callbacks(trainer, folder):
    events = []

    class Recorder(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    def record(name):
        return lambda self, args, state, control, **kwargs: events.append((name, state.global_step))

    for name in vars(hf.TrainerCallback):
        if name.startswith("on_") and name != "on_step_end":
            setattr(Recorder, name, record(name))
    made = trainer_of(
        trainer, folder, line(), points(), points(4), {"callbacks": [Recorder()]}, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4,
    )  # fmt: skip
    made.train()
    assert made.state.global_step == 5
    return events


def schedules(trainer, folder):
    rows = [
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-3}),
        ("reduce_lr_on_plateau", {"patience": 0, "factor": 0.5}),
        ("greedy", {"patience": 1, "factor": 0.5}),
    ]
    return [
        trained(
            trainer, folder, line(), points(), evaluated=points(4), lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs,
            warmup_steps=0 if "min" not in kind else 2, num_train_epochs=4, eval_strategy="epoch",
            metric_for_best_model="eval_loss", learning_rate=0.5,
        )
        for kind, kwargs in rows
    ]  # fmt: skip


def groups_and_rates(trainer, folder):
    model = catalogue()
    made = trainer_of(trainer, folder, model, purchases(), weight_decay=0.1, learning_rate=1e-3)
    with pytest.raises(ValueError, match="optimizer"):
        made.get_learning_rates()
    made.create_optimizer()
    names = {param: name for name, param in model.named_parameters()}
    groups = [([names[p] for p in group["params"]], group["weight_decay"]) for group in made.optimizer.param_groups]
    assert model.users.weight in set(made.get_optimizer_group(model.users.weight)["params"])
    return groups, made.get_learning_rates(), made.get_num_trainable_parameters()


def a_step_without_a_training(trainer, folder):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    made = trainer_of(trainer, folder, catalogue(), purchases(), keywords={"compute_loss_func": loss})
    batch = made.data_collator(purchases(4))
    losses = [made.training_step(made.model, dict(batch), 4) for _ in range(2)]
    gradients = [param.grad.clone() for param in made.model.parameters()]
    made.model.zero_grad()
    made.train()
    return losses, gradients, outcome(made)


def an_optimizer_of_ones_own(trainer, folder):
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return trained(trainer, folder, model, points(), keywords={"optimizers": (optimizer, schedule)})


def a_batch_size_that_is_searched(trainer, folder):
    return trained(trainer, folder, line(), points(), auto_find_batch_size=True)


SCENARIOS = [
    a_seed_reproduces_a_training, a_model_without_a_configuration, accumulated_gradients, another_line_of_data,
    evaluation_and_prediction, smoothed_labels, a_training_that_is_resumed, a_class_that_loads_itself,
    weights_that_were_split_by_hand, the_best_model_and_an_early_end, a_model_for_each_training,
    the_same_trainer_twice, the_events_of_callbacks, schedules, groups_and_rates, a_step_without_a_training,
]  # fmt: skip
REFUSALS = {
    an_optimizer_of_ones_own: r"optimizers=\(SGD, ...\): a fused trainer needs a FusedOptimizer",
    a_batch_size_that_is_searched: "auto_find_batch_size=True: it retries after a backward that ran out of memory",
}


def same(one, other):
    """Returns whether two results are bitwise equal. NaN equals NaN."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def verdict_on(scenario, tmp_path):
    folders = tmp_path / "plain", tmp_path / "fused"
    for folder in folders:
        folder.mkdir()
    name = scenario.__name__.replace("_", " ")
    verdict = judge(lambda: same(scenario(hf.Trainer, folders[0]), scenario(FusedTrainer, folders[1])))
    report(f"{name}, transformers {hf.__version__}", {name: verdict}, at_least=0)
    return verdict


@pytest.mark.parametrize("scenario", SCENARIOS if FULL else SCENARIOS[1::2], ids=lambda scenario: scenario.__name__)
def test_a_scenario_ends_as_with_the_trainer(scenario, tmp_path):
    assert verdict_on(scenario, tmp_path)[0] == EQUAL


@pytest.mark.parametrize("scenario", REFUSALS, ids=lambda scenario: scenario.__name__)
def test_a_scenario_is_refused_with_its_reason(scenario, tmp_path):
    verdict, reason = verdict_on(scenario, tmp_path)
    assert verdict == REFUSED
    assert re.match(REFUSALS[scenario], reason)
