"""Fused training of one tiny model per family gives bitwise the results of transformers' trainer.

Models have random weights and the class's default dropout. The rule is `torch.optim.AdamW`, which
`optim="adamw_torch"` also selects.
"""

from dataclasses import fields

import pytest
import torch
import transformers as hf
from judged import judge, report
from support.products import in_turn, sample

from lowmem.options import FusedConfig
from lowmem.trainer import FusedTrainer

STEPS, ROWS = 3, 6
SHARE = 1 / 3  # share of the families that are tested without LOWMEM_FULL
LENGTH, VOCABULARY, SIDE = 12, 40, 16  # tokens of a text, and height and width of an image in pixels

# Applied to every configuration that has these options.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "image_size": SIDE, "patch_size": 4, "projection_dim": 8,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
HALVES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
FOUR_STAGES = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
RESIDUAL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
WAVES = {
    "conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [3, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "mask_time_length": 2,
    "layerdrop": 0.0,
}  # fmt: skip
SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, **HALVES}
PATCHES = {
    "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4, "num_input_channels": 2,
    "d_model": 16, "ffn_dim": 16,
}  # fmt: skip
TOWER = {name: size for name, size in SIZES.items() if name != "decoder_start_token_id"}
TOWERS = {"text_config": TOWER, "vision_config": TOWER}


# -- one row of data, from a generator ---------------------------------------------------------------------------------


def tokens(draw):
    return {"input_ids": torch.randint(3, VOCABULARY, (LENGTH,), generator=draw)}


def masked(draw):
    return {**tokens(draw), "attention_mask": torch.ones(LENGTH, dtype=torch.long)}


def kind(draw):
    return {"labels": torch.randint(2, (), generator=draw)}


def language(draw):
    row = tokens(draw)
    return {**row, "labels": row["input_ids"].clone()}


def sentence(draw):
    return {**masked(draw), **kind(draw)}


def answer(draw):
    place = torch.randint(LENGTH, (2,), generator=draw)
    return {**masked(draw), "start_positions": place[0], "end_positions": place[1]}


def pixels(draw):
    return {"pixel_values": torch.randn(3, SIDE, SIDE, generator=draw)}


def image(draw):
    return {**pixels(draw), **kind(draw)}


def large_image(draw):
    return {"pixel_values": torch.randn(3, 2 * SIDE, 2 * SIDE, generator=draw), **kind(draw)}


def segments(draw):
    large = large_image(draw)["pixel_values"]
    return {"pixel_values": large, "labels": torch.randint(2, large.shape[1:], generator=draw)}


def wave(draw):
    return {"input_values": torch.randn(400, generator=draw), **kind(draw)}


def transcribed(draw):
    return {"input_values": torch.randn(400, generator=draw), "labels": tokens(draw)["input_ids"]}


def spectrogram(draw):
    return {"input_values": torch.randn(32, 8, generator=draw), **kind(draw)}


def speech(draw):
    return {"input_features": torch.randn(32, 8, generator=draw), "labels": tokens(draw)["input_ids"]}


def speech_in_rows(draw):
    return {**speech(draw), "input_features": torch.randn(8, 32, generator=draw)}


def series(draw):
    return {
        "past_values": torch.randn(10, generator=draw), "past_time_features": torch.arange(10.0)[:, None],
        "past_observed_mask": torch.ones(10), "future_values": torch.randn(4, generator=draw),
        "future_time_features": torch.arange(10.0, 14.0)[:, None],
    }  # fmt: skip


def channels(draw):
    return {"past_values": torch.randn(16, 2, generator=draw), "future_values": torch.randn(4, 2, generator=draw)}


def pair(draw):
    return {**masked(draw), **pixels(draw)}


def contrasted(draw):
    return {**pair(draw), "return_loss": torch.tensor(True)}


def described(draw):
    return {**language(draw), **pixels(draw)}


def question(draw):
    return {**pair(draw), "labels": torch.rand(2, generator=draw)}


def boxes(draw):
    return {**sentence(draw), "bbox": torch.randint(30, (LENGTH, 2), generator=draw).repeat(1, 2)}


# -- families: model class, data, and configuration besides SIZES ------------------------------------------------------

ENCODERS = {
    "albert": ("AlbertForSequenceClassification", sentence, {"embedding_size": 8}),
    "bert": ("BertForMaskedLM", language, {}),
    "big_bird": ("BigBirdForSequenceClassification", sentence, {"attention_type": "original_full"}),
    "canine": ("CanineForSequenceClassification", sentence, {"num_hash_buckets": 50, "downsampling_rate": 2}),
    "convbert": ("ConvBertForSequenceClassification", sentence, {"embedding_size": 16}),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        sentence,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    ),
    "distilbert": ("DistilBertForSequenceClassification", sentence, {"hidden_dim": 32}),
    "electra": ("ElectraForQuestionAnswering", answer, {"embedding_size": 8}),
    "esm": ("EsmForMaskedLM", language, {"mask_token_id": 3, "position_embedding_type": "rotary"}),
    "fnet": ("FNetForSequenceClassification", sentence, {}),
    "funnel": (
        "FunnelForSequenceClassification",
        sentence,
        {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1},
    ),
    "longformer": ("LongformerForSequenceClassification", sentence, {"attention_window": 4}),
    "modernbert": ("ModernBertForSequenceClassification", sentence, {}),
    "mpnet": ("MPNetForSequenceClassification", sentence, {}),
    "nystromformer": ("NystromformerForMaskedLM", language, {"num_landmarks": 2, "segment_means_seq_len": LENGTH}),
    "perceiver": (
        "PerceiverForSequenceClassification",
        sentence,
        {
            "d_latents": 16, "d_model": 16, "num_latents": 4, "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
        },
    ),
    "xlnet": ("XLNetForSequenceClassification", sentence, {"d_inner": 32, "d_head": 8}),
    "yoso": ("YosoForSequenceClassification", sentence, {}),
}  # fmt: skip

DECODERS = {
    "bloom": ("BloomForCausalLM", language, {}),
    "falcon": ("FalconForCausalLM", language, {}),
    "gemma3": ("Gemma3ForCausalLM", language, GROUPED),
    "gpt2": ("GPT2LMHeadModel", language, {}),
    "gpt_neo": ("GPTNeoForCausalLM", language, {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", language, {}),
    "gptj": ("GPTJForCausalLM", language, {"rotary_dim": 4}),
    "llama": ("LlamaForCausalLM", language, GROUPED),
    "mpt": ("MptForCausalLM", language, {}),
    "opt": ("OPTForCausalLM", language, {"ffn_dim": 32, "word_embed_proj_dim": 8}),
    "phi": ("PhiForCausalLM", language, {}),
    "qwen3": ("Qwen3ForSequenceClassification", sentence, GROUPED),
    "xglm": ("XGLMForCausalLM", language, {"ffn_dim": 32}),
}

EXPERTS_AND_RECURRENCES = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        language,
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1,
            "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
            "v_head_dim": 8, "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", language, EXPERTS),
    "mixtral": ("MixtralForCausalLM", language, {**EXPERTS, "output_router_logits": True}),
    "olmoe": ("OlmoeForCausalLM", language, EXPERTS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", language, {**EXPERTS, "shared_expert_intermediate_size": 8}),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        language,
        {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "bamba": (
        "BambaForCausalLM",
        language,
        {**GROUPED, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "attn_layer_indices": [1]},
    ),
    "falcon_mamba": ("FalconMambaForCausalLM", language, {"state_size": 4}),
    "jamba": ("JambaForCausalLM", language, {**EXPERTS, "mamba_d_state": 4, "use_mamba_kernels": False}),
    "mamba": ("MambaForCausalLM", language, {"state_size": 4}),
    "mamba2": ("Mamba2ForCausalLM", language, {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", language, {**GROUPED, "lru_width": 16}),
    "rwkv": ("RwkvForCausalLM", language, {"attention_hidden_size": 16}),
}  # fmt: skip

HALVES_OF_TWO = {
    "bart": ("BartForConditionalGeneration", language, HALVES),
    "led": ("LEDForConditionalGeneration", language, {**HALVES, "attention_window": 4}),
    "m2m_100": ("M2M100ForConditionalGeneration", language, HALVES),
    "marian": ("MarianMTModel", language, HALVES),
    "pegasus": ("PegasusForConditionalGeneration", language, HALVES),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        language,
        {
            "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        },
    ),
    "t5": ("T5ForConditionalGeneration", language, T5),
}  # fmt: skip

IMAGES = {
    "beit": ("BeitForImageClassification", image, {}),
    "bit": ("BitForImageClassification", large_image, {**RESIDUAL, "num_groups": 2}),
    "convnext": ("ConvNextForImageClassification", image, {**RESIDUAL, "num_stages": 2}),
    "cvt": (
        "CvtForImageClassification",
        large_image,
        {"embed_dim": [8] * 3, "num_heads": [1] * 3, "depth": [3] * 3},
    ),
    "dinov2": ("Dinov2ForImageClassification", image, {}),
    "efficientnet": (
        "EfficientNetForImageClassification",
        large_image,
        {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    ),
    "focalnet": ("FocalNetForImageClassification", image, {**STAGES, "focal_levels": [1, 1], "focal_windows": [3, 3]}),
    "levit": (
        "LevitForImageClassification",
        large_image,
        {
            "image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2] * 3, "depths": [1] * 3,
            "key_dim": [8] * 3, "patch_size": 16,
        },
    ),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", large_image, {"depth_multiplier": 0.1, "min_depth": 4}),
    "mobilevit": (
        "MobileViTForImageClassification",
        large_image,
        {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [8] * 6 + [16], "image_size": 32, "patch_size": 2},
    ),
    "poolformer": ("PoolFormerForImageClassification", large_image, FOUR_STAGES),
    "pvt": ("PvtForImageClassification", large_image, {**FOUR_STAGES, "image_size": 32}),
    "regnet": ("RegNetForImageClassification", large_image, {**RESIDUAL, "groups_width": 8}),
    "resnet": ("ResNetForImageClassification", image, {**RESIDUAL, "layer_type": "basic"}),
    "segformer": ("SegformerForSemanticSegmentation", segments, {**FOUR_STAGES, "sr_ratios": [4, 2, 2, 1]}),
    "swin": ("SwinForImageClassification", image, STAGES),
    "vit": ("ViTForImageClassification", image, {}),
    "vit_mae": (
        "ViTMAEForPreTraining",
        pixels,
        {
            "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
}  # fmt: skip

SOUNDS_AND_SERIES = {
    "audio_spectrogram_transformer": (
        "ASTForAudioClassification",
        spectrogram,
        {"max_length": 32, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
    ),
    "hubert": ("HubertForSequenceClassification", wave, WAVES),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        speech,
        {**HALVES, "input_feat_per_channel": 8, "conv_channels": 16, "conv_kernel_sizes": [3], "num_conv_layers": 1},
    ),
    "unispeech": ("UniSpeechForSequenceClassification", wave, WAVES),
    "wav2vec2": ("Wav2Vec2ForCTC", transcribed, WAVES),
    "wavlm": ("WavLMForSequenceClassification", wave, WAVES),
    "whisper": (
        "WhisperForConditionalGeneration",
        speech_in_rows,
        {**HALVES, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "autoformer": ("AutoformerForPrediction", series, {**SERIES, "moving_average": 3, "label_length": 4}),
    "informer": ("InformerForPrediction", series, SERIES),
    "patchtsmixer": ("PatchTSMixerForPrediction", channels, PATCHES),
    "patchtst": ("PatchTSTForPrediction", channels, PATCHES),
    "time_series_transformer": ("TimeSeriesTransformerForPrediction", series, SERIES),
}

SEVERAL_KINDS = {
    "blip": ("BlipForConditionalGeneration", described, TOWERS),
    "clip": ("CLIPModel", contrasted, TOWERS),
    "git": ("GitForCausalLM", described, {"vision_config": TOWER}),
    "layoutlm": ("LayoutLMForSequenceClassification", boxes, {"max_2d_position_embeddings": 32}),
    "siglip": ("SiglipModel", contrasted, TOWERS),
    "vilt": ("ViltForQuestionAnswering", question, {}),
}

KINDS = {
    "encoders": ENCODERS,
    "decoders": DECODERS,
    "experts and recurrences": EXPERTS_AND_RECURRENCES,
    "encoders with decoders": HALVES_OF_TWO,
    "images": IMAGES,
    "sounds and series": SOUNDS_AND_SERIES,
    "several kinds of data": SEVERAL_KINDS,
}


def build(name, options):
    cls = getattr(hf, name)
    names = {field.name: field.name for field in fields(cls.config_class)} | cls.config_class.attribute_map
    sizes = {names[key]: size for key, size in SIZES.items() if key in names}
    torch.manual_seed(0)
    return cls(cls.config_class(**sizes | options))


def collate(rows):
    """Collates a batch and turns boolean columns into a single option of the model."""
    batch = hf.default_data_collator(rows)
    return {name: value.all() if value.dtype == torch.bool else value for name, value in batch.items()}


def trained(cls, model, rows, folder, clip, **keywords):
    """Returns the losses of a training and all parameters and buffers of the model."""
    args = hf.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        weight_decay=0.1, max_grad_norm=clip, **({} if keywords else {"optim": "adamw_torch"}),
    )  # fmt: skip
    trainer = cls(model, args, data_collator=collate, train_dataset=rows, **keywords)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses, [*model.parameters(), *model.buffers()]


def compare(row, folder, clip, **keywords):
    """Returns whether fused training gives the same results as the plain trainer, which must change the model."""
    name, data, options = row
    rows = [data(torch.Generator().manual_seed(number)) for number in range(ROWS)]
    start = [param.detach().clone() for param in build(name, options).parameters()]
    losses, tensors = trained(hf.Trainer, build(name, options), rows, folder, clip)
    assert not all(map(torch.equal, start, tensors))
    actual_losses, actual = trained(FusedTrainer, build(name, options), rows, folder, clip, **keywords)
    return actual_losses == losses and all(map(torch.equal, actual, tensors))


@pytest.mark.parametrize(("kind", "clip"), in_turn(KINDS, [0.0, 0.1]))
def test_families_train_as_with_the_trainer(kind, clip, tmp_path):
    families = {name: KINDS[kind][name] for name in sample(KINDS[kind], SHARE)}
    rule = FusedConfig(rule=torch.optim.AdamW, foreach=False)
    verdicts = {name: judge(lambda row=row: compare(row, tmp_path, clip, fused=rule)) for name, row in families.items()}
    report(f"transformers {hf.__version__}, {kind}", verdicts, at_least=len(families))


@pytest.mark.parametrize("kind", ["encoders", "decoders", "experts and recurrences", "encoders with decoders"])
def test_families_train_so_by_default_with_large_embeddings(kind, tmp_path):
    """The default rule reads the gradients of embeddings as they are computed."""
    families = {name: row for name, row in KINDS[kind].items() if row[1] in (language, sentence, answer)}
    large = {
        name: (*row[:2], {**row[2], "vocab_size": 2048})
        for name, row in families.items()
        if name in sample(families, SHARE)
    }
    verdicts = {name: judge(lambda row=row: compare(row, tmp_path, clip=0.1)) for name, row in large.items()}
    report(f"transformers {hf.__version__}, {kind}, 2048 tokens", verdicts, at_least=len(large))
