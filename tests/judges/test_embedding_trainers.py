"""Third-party trainers of embeddings, rankers and taggers give bitwise the same results with the mixin.

Their classes choose the optimizer and its groups, and load checkpoints.
"""

import copy
import functools
import importlib
from importlib import metadata

import pytest
import torch
import transformers as hf
from datasets import Dataset
from judged import judge, report
from support.products import in_turn
from support.trainers import SENTENCES, SIZES, bert, fused, special, tokenizer

WAYS = {
    "immediate": {"max_grad_norm": 0.0},
    "two_pass": {"max_grad_norm": 0.1},
    "deferred": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
}
ARGUMENTS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "optim": "adamw_torch", "dataloader_pin_memory": False,
    "weight_decay": 0.1,
}  # fmt: skip
PAIRS = {"anchor": SENTENCES, "positive": SENTENCES[::-1]}
SCORED = {**PAIRS, "label": [float(n % 2) for n in range(len(SENTENCES))]}


def saved(head, folder, **options):
    """Saves a tiny BERT with this head and its tokenizer."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokenizer()), "max_position_embeddings": 64, **special()}
    head(hf.BertConfig(**sizes, **options)).save_pretrained(folder)
    plain = copy.deepcopy(tokenizer())
    plain.chat_template = None
    plain.save_pretrained(folder)
    return str(folder)


def sentence_transformers():
    return importlib.import_module("sentence_transformers")


def bi_encoder(wrap, folder, loss="MultipleNegativesRankingLoss", data=PAIRS, keywords=(), **arguments):
    st = sentence_transformers()
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model = st.SentenceTransformer(saved(hf.BertModel, folder / "bert"), device="cpu")
    torch.manual_seed(0)
    return wrap(st.SentenceTransformerTrainer)(
        model, st.SentenceTransformerTrainingArguments(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(data), eval_dataset=Dataset.from_dict(data),
        loss=getattr(losses, loss)(model, **dict(keywords)),
    )  # fmt: skip


def bi_encoder_with_rates(wrap, folder, **arguments):
    return bi_encoder(wrap, folder, learning_rate_mapping={r"embeddings": 1e-3, r"query|key": 2e-2}, **arguments)


def cross_encoder(wrap, folder, **arguments):
    st = sentence_transformers()
    model = st.CrossEncoder(
        saved(hf.BertForSequenceClassification, folder / "bert", num_labels=1), device="cpu", max_length=16
    )
    losses = importlib.import_module("sentence_transformers.cross_encoder.losses")
    torch.manual_seed(0)
    trainer, options = st.CrossEncoderTrainer, st.CrossEncoderTrainingArguments
    return wrap(trainer)(
        model, options(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(SCORED), loss=losses.BinaryCrossEntropyLoss(model),
    )  # fmt: skip


def sparse_encoder(wrap, folder, **arguments):
    st = sentence_transformers()
    losses = importlib.import_module("sentence_transformers.sparse_encoder.losses")
    model = st.SparseEncoder(saved(hf.BertForMaskedLM, folder / "bert"), device="cpu")
    inner = losses.SparseMultipleNegativesRankingLoss(model)
    torch.manual_seed(0)
    return wrap(st.SparseEncoderTrainer)(
        model, st.SparseEncoderTrainingArguments(**ARGUMENTS | {"output_dir": str(folder)} | arguments),
        train_dataset=Dataset.from_dict(PAIRS),
        loss=losses.SpladeLoss(model, inner, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3),
    )  # fmt: skip


def setfit(wrap, folder, **arguments):
    """SetFit's trainer creates the trainer of sentence-transformers, which it looks up by name in its module."""
    package = importlib.import_module("setfit")
    module, st = importlib.import_module("setfit.trainer"), sentence_transformers()
    body = st.SentenceTransformer(saved(hf.BertModel, folder / "bert"), device="cpu")
    head = importlib.import_module("sklearn.linear_model").LogisticRegression()
    model = package.SetFitModel(model_body=body, model_head=head)
    args = package.TrainingArguments(
        output_dir=str(folder), batch_size=4, max_steps=4, body_learning_rate=1e-2, report_to="none", logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_dict({"text": SENTENCES, "label": [n % 2 for n in range(len(SENTENCES))]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BCSentenceTransformersTrainer", wrap(module.BCSentenceTransformersTrainer))
        outer = package.Trainer(model, args, train_dataset=rows)
    trainer = outer.st_trainer
    for name, value in {"optim": "adamw_torch", "disable_tqdm": True, **arguments}.items():
        setattr(trainer.args, name, value)
    return trainer, functools.partial(outer.train_embeddings, rows["text"], rows["label"], args)


def flag_embedding(wrap, folder, **arguments):
    module = importlib.import_module("FlagEmbedding.finetune.embedder.encoder_only.base")
    model = module.BiEncoderOnlyEmbedderModel(bert(hf.BertModel), tokenizer=tokenizer(), temperature=0.1)

    def collate(rows):
        columns = {"queries": "anchor", "passages": "positive"}
        return {
            name: tokenizer()([row[column] for row in rows], padding=True, return_tensors="pt")
            for name, column in columns.items()
        }

    options = ARGUMENTS | {"output_dir": str(folder), "remove_unused_columns": False} | arguments
    rows = Dataset.from_dict(PAIRS)
    torch.manual_seed(0)
    return wrap(module.EncoderOnlyEmbedderTrainer)(
        model=model, args=hf.TrainingArguments(**options), train_dataset=rows, data_collator=collate,
        processing_class=tokenizer(),
    )  # fmt: skip


def gliner(wrap, folder, **arguments):
    """GLiNER has two learning rates and weight decays, which it sets in a custom method."""
    package, configs = importlib.import_module("gliner.training"), importlib.import_module("gliner.config")
    sizes = {"hidden_size": 16, "max_width": 3, "max_len": 16, "max_types": 4, "num_rnn_layers": 0}
    config = configs.UniEncoderSpanConfig(model_name=saved(hf.BertModel, folder / "bert"), dropout=0.1, **sizes)
    torch.manual_seed(0)
    model = importlib.import_module("gliner.model").UniEncoderSpanGLiNER(config, backbone_from_pretrained=True)
    model.data_processor.transformer_tokenizer.add_tokens(model._get_special_tokens(), special_tokens=True)
    model.resize_embeddings()
    options = ARGUMENTS | {"others_lr": 5e-3, "others_weight_decay": 0.05, "remove_unused_columns": False} | arguments
    return wrap(package.Trainer)(
        model=model, args=package.TrainingArguments(output_dir=str(folder), **options),
        train_dataset=[{"tokenized_text": s.split(), "ner": [[2, 2, "animal"], [1, 2, "thing"]]} for s in SENTENCES],
        data_collator=model._create_data_collator(), processing_class=model.data_processor.transformer_tokenizer,
    )  # fmt: skip


TRAINERS = {
    bi_encoder: "sentence_transformers", bi_encoder_with_rates: "sentence_transformers",
    cross_encoder: "sentence_transformers", sparse_encoder: "sentence_transformers", setfit: "setfit",
    gliner: "gliner", flag_embedding: "FlagEmbedding",
}  # fmt: skip


def trained(build, wrap, folder, resume=None, **options):
    """Returns the weights and the log of a training, and its trainer."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    built = build(wrap, folder, **options)
    trainer, train = built if isinstance(built, tuple) else (built, built.train)
    start = [param.detach().clone() for param in trainer.model.parameters()]
    train(**({} if resume is None else {"resume_from_checkpoint": str(folder / resume)}))
    assert not all(map(torch.equal, start, trainer.model.parameters()))
    exact = ("loss", "embedding_loss", "learning_rate", "eval_loss")
    logs = [{name: entry[name] for name in exact if name in entry} for entry in trainer.state.log_history]
    return [param.detach().clone() for param in trainer.model.parameters()], logs, trainer


def equal(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


def as_it_is(cls):
    return cls


@pytest.mark.parametrize(("build", "way"), in_turn(TRAINERS, WAYS))
def test_a_trainer_that_chooses_its_optimizer_trains_as_without_the_mixin(build, way, tmp_path):
    pytest.importorskip(TRAINERS[build])
    plain = trained(build, as_it_is, tmp_path / "plain", **WAYS[way])
    ours = trained(build, fused, tmp_path / "fused", **WAYS[way])
    assert ours[2].optimizer.policy == way
    verdict = {f"{build.__name__}, {way}": judge(lambda: equal(plain, ours))}
    report(f"{TRAINERS[build]} {metadata.version(TRAINERS[build])}", verdict, at_least=1)


@pytest.mark.parametrize("build", [bi_encoder, gliner], ids=lambda build: build.__name__)
def test_a_trainer_that_loads_in_its_own_way_resumes_as_without_the_mixin(build, tmp_path):
    """Their checkpoints name weights differently from the model, or have different files."""
    pytest.importorskip(TRAINERS[build])
    runs = []
    for name, wrap in {"plain": as_it_is, "fused": fused}.items():
        for checkpoint in (None, "checkpoint-2"):
            runs.append(trained(build, wrap, tmp_path / name, checkpoint, save_strategy="steps", save_steps=2))
    assert equal(runs[0], runs[2])
    assert equal(runs[1], runs[3])


def test_the_best_model_is_loaded_in_the_way_of_its_class(tmp_path):
    pytest.importorskip("sentence_transformers")
    options = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    plain, ours = (trained(bi_encoder, wrap, tmp_path / wrap.__name__, **options) for wrap in (as_it_is, fused))
    assert equal(plain, ours)
    assert 0 < ours[2].state.best_global_step < 4
