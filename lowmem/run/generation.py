"""The answer of a trained model to a prompt."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from lowmem.errors import CheckpointError
from lowmem.hf import adapters, checkpoint


def generate(
    folder: Path, prompt: str, *, system: str | None, max_new_tokens: int, temperature: float, seed: int
) -> None:
    """Prints the answer of a checkpoint, or of the newest complete one in a run folder."""
    if (folder / "config.json").exists() or adapters.files(folder):
        checkpoint.check_model(folder)
    else:
        folder, _ = checkpoint.find_last(folder, checkpoint.check_model)
    if adapters.files(folder):
        raise CheckpointError(
            f"{folder} has PEFT adapters without their base model. Merge them first, in Python: "
            f'peft.PeftModel.from_pretrained(model, "{folder}").merge_and_unload().save_pretrained("merged"), and '
            'tokenizer.save_pretrained("merged"); then lowmem generate merged "..."'
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    sampled = temperature > 0
    set_seed(seed)
    model.generate(
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=sampled,
        **({"temperature": temperature} if sampled else {}),
    )
