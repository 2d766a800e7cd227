"""What the tests of data share: a folder and a cache of their own, and tokenizers."""

import re

import pytest

from lowmem.run.tokenizers import CHAT_TEMPLATE, train_tokenizer


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["what is plus it is thanks welcome Double quickly 0123456789"] * 4, 320)


@pytest.fixture
def markless(tokenizer):
    """The same tokenizer with a chat template that does not mark the answers."""
    template = re.sub(r"\{%- (end)?generation -%\}", "", CHAT_TEMPLATE)
    copy = train_tokenizer(["unused"], 262, template)
    copy._tokenizer = tokenizer._tokenizer
    return copy
