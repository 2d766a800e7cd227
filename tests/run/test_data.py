"""Data: the loss is on exactly the answers, and what the trainer tokenizes has a fingerprint."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from chats import CHATS, INSTRUCTIONS, assistant, user, write
from datasets import Dataset, List, Value, concatenate_datasets
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from lowmem import FusedConfig
from lowmem.errors import DataError
from lowmem.run import data
from lowmem.run.data import DataConfig, check_tokenized, fingerprint, for_tokenizer, load, segments, sft_arguments
from lowmem.trainer import FusedSFTTrainer

pytestmark = pytest.mark.usefixtures("empty_cache")


def tiny_llama(tokenizer, **settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    )


def prepared(config, tokenizer, cls=SFTTrainer, **model_settings):
    """The trainer, and the data set that was given to it."""
    train = for_tokenizer(load(config)[0], config, tokenizer)
    args = SFTConfig("out", bf16=False, use_cpu=True, report_to="none", **sft_arguments(config, train))
    model = tiny_llama(tokenizer, **model_settings)
    return cls(model, args, train_dataset=train, processing_class=tokenizer), train


def answers_of(ids, tokenizer):
    """Labels found in another way: everything after `<|assistant|>`, up to and with the `<|end|>` that follows."""
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    labels, inside = [], False
    for token in ids:
        labels.append(token if inside else -100)
        inside = token == begin or (inside and token != end)
    return labels


def test_eval_fraction_splits_the_data_by_the_seed():
    config = DataConfig(write("d.jsonl", [{"text": str(n)} for n in range(20)]), eval_fraction=0.25)
    train, held_out = load(config)
    assert len(train) == 15 and len(held_out) == 5
    assert {*train["text"], *held_out["text"]} == {str(n) for n in range(20)}
    assert load(config)[1]["text"][:] == held_out["text"][:]
    assert set(load(replace(config, seed=1))[1]["text"]) != set(held_out["text"])


def test_eval_path_is_read_as_held_out_data():
    train, held_out = load(DataConfig(write("a.jsonl", [{"text": "a"}]), eval_path=write("b.jsonl", [{"text": "b"}])))
    assert (train["text"][:], held_out["text"][:]) == (["a"], ["b"])


def test_held_out_data_of_another_kind_is_refused():
    config = DataConfig(write("a.jsonl", [{"text": "a"}]), eval_path=write("b.jsonl", CHATS))
    with pytest.raises(DataError, match=r"b\.jsonl has messages but a\.jsonl has text"):
        load(config)


def test_texts_yields_every_string():
    config = DataConfig(write("d.jsonl", CHATS[:1]))
    assert list(data.texts(load(config)[0])) == ["what is 0 plus 0?", "it is 0", "thanks", "welcome"]
    assert list(data.texts(load(DataConfig(write("t.jsonl", [{"text": "x"}])))[0])) == ["x"]


# -------------------------------------------------------------------------------------- what the loss is taken on


@pytest.mark.parametrize("records", [CHATS, INSTRUCTIONS], ids=["messages", "instruction"])
def test_only_answers_are_trained_on(records, tokenizer):
    trainer, train = prepared(DataConfig(write("d.jsonl", records)), tokenizer)
    assert len(trainer.train_dataset) == 6
    for row in trainer.train_dataset:
        assert row["labels"] == answers_of(row["input_ids"], tokenizer)
        assert any(label != -100 for label in row["labels"])
    counts = check_tokenized(trainer.train_dataset, train, DataConfig("d.jsonl"))
    labels = [label for row in trainer.train_dataset for label in row["labels"]]
    assert (counts.samples, counts.tokens) == (6, len(labels))
    assert counts.trained_tokens == sum(label != -100 for label in labels)
    assert (counts.dropped, counts.at_max_length, counts.without_target) == ((), 0, 0)


def test_every_answer_of_a_chat_is_trained_on_where_the_template_has_no_marks(tokenizer, markless):
    config = DataConfig(write("d.jsonl", CHATS))
    marked, _ = prepared(config, tokenizer)
    labelled, train = prepared(config, markless)
    assert train.column_names == ["source", "input_ids", "labels"]
    for ours, trls in zip(labelled.train_dataset, marked.train_dataset, strict=True):
        assert ours["input_ids"] == trls["input_ids"]
        assert ours["labels"] == trls["labels"] == answers_of(ours["input_ids"], tokenizer)
        assert tokenizer.decode([label for label in ours["labels"] if label != -100]).count("<|end|>") == 2


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "llama3_1", "gemma3", "phi3"])
def test_well_known_templates_are_trained_on_answers_and_their_end(name, markless):
    markless.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    trainer, _ = prepared(DataConfig(write("d.jsonl", CHATS)), markless)
    trained = [part.text for part in segments(trainer.train_dataset[1], markless) if part.trained]
    bare = [re.sub(r"<think>\n\n</think>\n\n|(\s*<[|\w]+>)+\n?$", "", text) for text in trained]
    assert bare == ["it is 2", "welcome"]
    assert all(re.search(r"<(end_of_turn|\|\w+\|)>\s*$", text) for text in trained)


def test_plain_strings_are_trained_on_their_completion_and_end(tokenizer):
    trainer, _ = prepared(DataConfig(write("d.jsonl", [{"prompt": "what is 1?", "completion": " it is 1"}])), tokenizer)
    parts = segments(trainer.train_dataset[0], tokenizer)
    assert [(part.text, part.trained) for part in parts] == [("<|begin|>what is 1?", False), (" it is 1<|end|>", True)]


@pytest.mark.parametrize("record", [CHATS[0], INSTRUCTIONS[0], {"prompt": "a", "completion": "b"}, {"text": "a b"}])
def test_everything_is_trained_on_where_that_is_asked(record, tokenizer):
    trainer, _ = prepared(DataConfig(write("d.jsonl", [record]), answer_only=False), tokenizer)
    assert trainer.train_dataset[0]["labels"] == trainer.train_dataset[0]["input_ids"]


def test_packed_rows_give_the_loss_of_their_samples(tokenizer):
    """Also that samples of a row don't see each other: large weights make the loss depend on all that is seen."""
    config = DataConfig(write("d.jsonl", CHATS), max_length=64)
    alone, _ = prepared(config, tokenizer, initializer_range=1.0)
    packed, train = prepared(replace(config, packing=True), tokenizer, initializer_range=1.0)
    assert len(packed.train_dataset) < len(alone.train_dataset)

    def loss_sum(trainer):
        total = 0.0
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            targets = (batch["labels"][:, 1:] != -100).sum()
            total += (trainer.model.eval()(**batch).loss * targets).item()
        return total

    assert loss_sum(packed) == pytest.approx(loss_sum(alone), rel=1e-5)
    counts = [check_tokenized(trainer.train_dataset, train, config) for trainer in (alone, packed)]
    assert counts[0] == counts[1]
    parts = segments(packed.train_dataset[0], tokenizer)
    assert all(part.text.endswith("<|end|>") for part in parts if part.trained)
    assert sum(part.tokens for part in parts) == len(packed.train_dataset[0]["input_ids"])


def test_packed_text_loses_no_token(tokenizer):
    path = write("d.jsonl", [{"text": "what is 12345 plus 67890? " * 10}] * 3)
    config = DataConfig(path, max_length=32, packing=True)
    trainer, train = prepared(config, tokenizer)
    ids = tokenizer(train[0]["text"] + "<|end|>")["input_ids"]
    assert sum(len(row["input_ids"]) for row in trainer.train_dataset) == 3 * len(ids)
    assert check_tokenized(trainer.train_dataset, train, config).tokens == 3 * len(ids)


def test_samples_cut_before_their_answer_are_listed(tokenizer):
    long = [user("what is " * 40), assistant("it is")]
    config = DataConfig(write("d.jsonl", [*CHATS[:2], {"messages": long}]), max_length=32)
    trainer, train = prepared(config, tokenizer)
    assert check_tokenized(trainer.train_dataset, train, config).dropped == ("d.jsonl, record 3",)

    packing = replace(config, packing=True)
    trainer, train = prepared(packing, tokenizer)
    counts = check_tokenized(trainer.train_dataset, train, packing)
    assert (counts.samples, counts.without_target, counts.at_max_length) == (3, 1, 1)


@pytest.mark.parametrize("packing", [False, True])
def test_data_without_any_target_is_refused(tokenizer, packing):
    config = DataConfig(write("d.jsonl", CHATS), max_length=4, packing=packing)
    trainer, train = prepared(config, tokenizer)
    with pytest.raises(DataError, match=r"data\.max_length"):
        check_tokenized(trainer.train_dataset, train, config)


def test_the_first_token_which_nothing_predicts_is_not_trained_on(tokenizer):
    config = DataConfig(write("d.jsonl", [{"text": "it is"}] * 2))
    trainer, train = prepared(config, tokenizer)
    assert segments(trainer.train_dataset[0], tokenizer) == [("<|begin|>", False, 1), ("it is<|end|>", True, 4)]
    counts = check_tokenized(trainer.train_dataset, train, config)
    assert (counts.tokens, counts.trained_tokens) == (10, 8)


# ------------------------------------------------------------------------------------------------------ fingerprint

ROWS = {"input_ids": [[1, 2, 3], [4], [5, 6]], "labels": [[-100, 2, 3], [4], [-100, 6]]}


def changed(name, row, column, value):
    rows = {name: [list(ids) for ids in lists] for name, lists in ROWS.items()}
    rows[name][row][column] = value
    return rows


def test_a_fingerprint_does_not_depend_on_how_the_rows_are_held():
    tokenized = Dataset.from_dict(ROWS)
    chunked = concatenate_datasets([Dataset.from_dict({name: [row] for name, row in zip(ROWS, pair, strict=True)})
                                    for pair in zip(*ROWS.values(), strict=True)])  # fmt: skip
    others = {
        "another column": tokenized.add_column("source", ["a", "b", "c"]),
        "chunks": chunked,
        "a slice": concatenate_datasets([tokenized, tokenized]).select(range(3, 6)),
        "indices": tokenized.select([2, 0, 1]).select([1, 2, 0]),
        "a filter": tokenized.filter(lambda row: True),
        "32 bits": tokenized.cast_column("input_ids", List(Value("int32"))),
        "another order of columns": tokenized.select_columns(["labels", "input_ids"]),
    }  # fmt: skip
    assert {name: fingerprint(other) for name, other in others.items()} == dict.fromkeys(others, fingerprint(tokenized))


def test_whatever_trains_something_else_has_another_fingerprint():
    tokenized = Dataset.from_dict(ROWS)
    packed = {"input_ids": [[1, 2, 3, 4, 5, 6]], "labels": [[-100, 2, 3, 4, -100, 6]]}
    others = {
        "rows": tokenized,
        "a token": Dataset.from_dict(changed("input_ids", 1, 0, 7)),
        "a label": Dataset.from_dict(changed("labels", 0, 0, 1)),
        "order": tokenized.select([1, 0, 2]),
        "fewer": tokenized.select(range(2)),
        "again": concatenate_datasets([tokenized, tokenized]),
        "other rows of the same tokens": Dataset.from_dict(packed),
        "packed": Dataset.from_dict(packed | {"seq_lengths": [[3, 1, 2]]}),
        "packed otherwise": Dataset.from_dict(packed | {"seq_lengths": [[3, 3]]}),
        "exchanged": Dataset.from_dict({"input_ids": ROWS["labels"], "labels": ROWS["input_ids"]}),
    }
    assert len({fingerprint(other) for other in others.values()}) == len(others)


def test_the_same_records_have_the_same_fingerprint_wherever_they_are(tokenizer):
    lines = [f"{r['instruction']},{r['input']},{r['output']}\n" for r in INSTRUCTIONS]
    Path("d.csv").write_text("instruction,input,output\n" + "".join(lines))
    prints = [fingerprint(prepared(DataConfig(path), tokenizer)[0].train_dataset)
              for path in (write("d.jsonl", INSTRUCTIONS), "d.csv", write("folder/e.jsonl", INSTRUCTIONS))]  # fmt: skip
    assert prints[0] == prints[1] == prints[2]
    other = prepared(DataConfig(write("d.jsonl", [*INSTRUCTIONS[1:], INSTRUCTIONS[0]])), tokenizer)[0].train_dataset
    assert fingerprint(other) != prints[0]


@pytest.mark.parametrize("kind", ["messages", "text"])
def test_packed_rows_do_not_depend_on_the_number_of_processes(kind, tokenizer, tmp_path, monkeypatch):
    texts = [" ".join(["what is"] * (1 + n * 7 % 9)) for n in range(12)]
    records = {"text": [{"text": text} for text in texts],
               "messages": [{"messages": [user(text), assistant("it is")]} for text in texts]}  # fmt: skip
    prints = set()
    for workers in (None, 2):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / str(workers))  # else the rows of the first
        config = DataConfig(write("d.jsonl", records[kind]), packing=True, max_length=40, workers=workers)
        trainer, _ = prepared(config, tokenizer, partial(FusedSFTTrainer, fused=FusedConfig(rule="lion", lr=1e-4)))
        prints.add(fingerprint(trainer.train_dataset))
    assert len(prints) == 1


def test_weights_do_not_depend_on_the_number_of_processes(tokenizer, tmp_path, monkeypatch):
    weights = []
    for workers, loaders in ((None, 0), (2, 2)):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / str(workers))
        config = DataConfig(write("d.jsonl", CHATS), workers=workers)
        train = for_tokenizer(load(config)[0], config, tokenizer)
        args = SFTConfig("out", bf16=False, use_cpu=True, report_to="none", max_steps=4, learning_rate=1e-2,
                         save_strategy="no", max_grad_norm=0, per_device_train_batch_size=2,
                         dataloader_num_workers=loaders, dataloader_pin_memory=False,
                         **sft_arguments(config, train))  # fmt: skip
        model = tiny_llama(tokenizer, attention_dropout=0.1)
        fused = FusedConfig(rule="lion")
        FusedSFTTrainer(model, args, train_dataset=train, processing_class=tokenizer, fused=fused).train()
        weights.append(model.state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


# ------------------------------------------------------------------------------------- templates that cannot be used


def refused(records, tokenizer, **settings):
    config = DataConfig(write("d.jsonl", records), **settings)
    with pytest.raises(DataError) as caught:
        for_tokenizer(load(config)[0], config, tokenizer)
    return str(caught.value)


def test_a_chat_needs_a_template(markless):
    markless.chat_template = None
    for records in (CHATS, INSTRUCTIONS):
        message = refused(records, markless)
        assert "d.jsonl, record 1" in message and "model.chat_template" in message


def test_text_needs_an_end_token(markless):
    markless.eos_token = None
    assert "eos_token" in refused([{"text": "a"}], markless)


def test_a_template_that_rewrites_earlier_turns_is_refused(markless):
    markless.chat_template = "{{ messages | length }}" + markless.chat_template
    message = refused(CHATS[:3], markless)
    assert "d.jsonl, record 1: the chat template rewrites earlier turns (message 2)" in message
    assert "data.answer_only" in message


def test_a_template_that_prompts_differently_than_it_answers_is_refused(markless):
    markless.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    assert "rewrites earlier turns (message 2)" in refused(CHATS, markless)


def test_a_chat_that_begins_with_an_answer_needs_marks(tokenizer, markless):
    record = {"messages": [assistant("hello"), user("hi"), assistant("well?")]}
    assert "record 2: the chat begins with an answer" in refused([CHATS[0], record], markless)
    trainer, _ = prepared(DataConfig("d.jsonl"), tokenizer)
    assert [part.text for part in segments(trainer.train_dataset[1], tokenizer) if part.trained] == [
        "hello<|end|>",
        "well?<|end|>",
    ]


def test_marks_around_the_wrong_text_are_refused(markless):
    markless.chat_template = "{% generation %}" + markless.chat_template + "{% endgeneration %}"
    assert "trains on a 'user' message" in refused(CHATS, markless)


def test_a_template_for_messages_of_parts_drops_plain_ones_and_is_refused(markless):
    markless.chat_template = (Path(trl.__file__).parent / "chat_templates" / "smolvlm.jinja").read_text()
    assert "drops a 'user' message" in refused(CHATS, markless)


def test_a_template_that_drops_an_answer_is_refused(markless):
    marked_end = "{% generation %}{{ messages[-1].content + eos_token }}{% endgeneration %}"
    markless.chat_template = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}" + marked_end
    assert "drops a 'assistant' message of the roles user, assistant, user, assistant" in refused(CHATS, markless)


@pytest.mark.parametrize("answer_only", [None, False])
def test_a_sequence_of_roles_that_the_template_refuses_names_its_record(markless, answer_only):
    markless.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        + markless.chat_template
    )
    record = {"messages": [{"role": "system", "content": "s"}, *CHATS[0]["messages"]]}
    message = refused([CHATS[0], record], markless, answer_only=answer_only)
    assert "d.jsonl, record 2: the chat template refuses the roles system, user" in message
    assert "no system here" in message and "model.chat_template" in message


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"path": ""}, "path\n  String should have at least 1 character"),
        ({"kind": "chat"}, "kind\n  Input should be 'auto', 'messages'"),
        ({"columns": {"promt": "q"}}, "columns.promt.[key]\n  Input should be 'messages', 'prompt'"),
        ({"max_length": 1}, "max_length\n  Input should be greater than or equal to 2"),
        ({"max_length": 10.5}, "max_length\n  Input should be a valid integer"),
        ({"max_samples": 0}, "max_samples\n  Input should be greater than or equal to 1"),
        ({"max_samples": 10**30}, "max_samples\n  Input should be less than or equal to"),
        ({"workers": True}, "workers\n  Input should be a valid integer"),
        ({"seed": -1}, "seed\n  Input should be greater than or equal to 0"),
        ({"eval_fraction": "a tenth"}, "eval_fraction\n  Input should be a valid number"),
        ({"eval_fraction": 1.0}, "eval_fraction\n  Input should be less than 1"),
        ({"eval_fraction": 0.1, "eval_path": "x.jsonl"}, "both set"),
    ],
)
def test_a_value_out_of_range_is_named(settings, part):
    with pytest.raises(ValidationError) as caught:
        DataConfig(**{"path": "d.jsonl"} | settings)
    assert part in str(caught.value)
