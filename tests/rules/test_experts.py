"""A real mixture-of-experts model: its stacks [E, in, out] are factored per expert, by every factored rule, unasked."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import lowmem

FACTORED = {
    "adalomo": ("exp_avg_sq_row", "exp_avg_sq_col", {}),
    "adafactor": ("v_row", "v_col", {"min_dim_size_to_factor": 8}),
    "adafactor_t2t": ("vr", "vc", {}),
}


def mixture():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)).train()


@pytest.mark.parametrize("rule", FACTORED)
def test_stacks_of_experts_are_factored_per_expert(rule):
    row, col, options = FACTORED[rule]
    model = mixture()
    stacks = {name: param for name, param in model.named_parameters() if param.ndim == 3}
    assert len(stacks) == 2
    opt = lowmem.FusedOptimizer(model.named_parameters(), rule=rule, lr=0.05, **options)
    ids, losses = torch.randint(61, (4, 12)), []
    for _ in range(30):
        losses.append(opt.backward(model(input_ids=ids, labels=ids).loss).item())
    states = opt.named_state_dict()["state"]
    for name, param in stacks.items():
        experts, rows, cols = param.shape
        assert {tuple(states[name][key].shape) for key in (row, col)} == {(experts, rows), (experts, cols)}
    assert losses[-1] < 0.5 * losses[0]
