"""Small runs of the command line, with a checkpoint every other step, and what they end with."""

import json

from lowmem.files import checksum
from scripts.make_model import make_model, train_tokenizer

STEPS = 24
TOPICS = ("a list", "the path", "a number", "the name", "one file", "the lock", "a queue", "the tree")


def inputs(folder):
    """The words of a run of a few seconds that saves, evaluates, rotates checkpoints and draws."""
    pairs = [{"prompt": f"def get_{i}(self)", "completion": f"Return {TOPICS[i % 8]} of {i}."} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = train_tokenizer((text for pair in pairs for text in pair.values()), 300)
    make_model(folder / "model", tokenizer, num_key_value_heads=2, attention_dropout=0.1, **sizes)
    config = {
        "model_name_or_path": str(folder / "model"), "dtype": "float32", "max_length": 64, "test_split_size": 0.2,
        "datasets": [{"path": "json", "data_files": str(folder / "pairs.jsonl")}], "fused": {"rule": "adalomo"},
        "learning_rate": 0.02, "max_grad_norm": 0, "max_steps": STEPS, "per_device_train_batch_size": 4,
        "logging_steps": 1, "save_steps": 2, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 6,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(config))  # which is YAML
    return ["lowmem", "sft", f"--config={folder / 'run.yaml'}"]


def results(run):
    """What must not depend on crashes: the last checkpoint and the final model by content, and what was logged."""
    checkpoint = run / f"checkpoint-{STEPS}"
    lines = (checkpoint / "checksums.txt").read_text().splitlines()
    files = {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    for name in ("trainer_state.json", "training_args.bin"):  # have times, and the path of the folder
        files.pop(name, None)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    logged = {(r["step"], key): r[key] for r in records for key in ("loss", "eval_loss", "tokens") if key in r}
    # a run that is killed right after its last save keeps one checkpoint more
    names = sorted(path.name for path in run.iterdir() if not path.name.startswith((".", "checkpoint-")))
    return files, checksum(*run.glob("*model.safetensors")), logged, names
