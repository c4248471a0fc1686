"""Every architecture that vLLM knows, by the sources of its classes, against our table of limits.

A place that the walk finds has to be judged here, once: what it does to packed weights, or why
they do not mind. The table in the package must then follow from the places judged.
"""

# ruff: noqa: E501 - a place is named in one line

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from oot_quant.vllm_glue.architectures import LIMITS, MOVED, Limit, Reason
from oot_quant.vllm_glue.compat import NEWEST_TESTED, installed_version
from tests.vllm_glue.registry_walk import Sources, sites

LIMITED = {
    "bert_with_rope.GteNewModel.split_up_gate_proj": Limit(Reason.REORDERS, ("up_gate_proj",)),
    "bloom.BloomModel._repack_qkv": Limit(Reason.REORDERS, ("query_key_value",)),
    "gemma3n.Gemma3nAltUp.__init__ reads modality_router": Limit(
        Reason.READS, ("modality_router",)
    ),
    "gemma4_dspark.Gemma4DSparkModel._build_context_kv_buffers reads k_proj": Limit(
        Reason.READS, ("k_proj",)
    ),
    "gemma4_mm.Gemma4ForConditionalGeneration.encoder_cudagraph_forward"
    " reads embedding_projection": Limit(Reason.READS, ("embedding_projection",)),
    "gemma4_unified.Gemma4UnifiedForConditionalGeneration._process_audio_input"
    " reads embedding_projection": Limit(Reason.READS, ("embedding_projection",)),
    "gemma4_unified.Gemma4UnifiedForConditionalGeneration._process_image_input"
    " reads embedding_projection": Limit(Reason.READS, ("embedding_projection",)),
    "gemma4_unified.Gemma4UnifiedForConditionalGeneration._process_video_input"
    " reads embedding_projection": Limit(Reason.READS, ("embedding_projection",)),
    "isaac.IsaacForConditionalGeneration._process_image_input reads linear_fc1": Limit(
        Reason.READS, ("linear_fc1", "vision_embedding")
    ),
    "jina._load_jina_v5_weights": Limit(Reason.REORDERS),
    "k2_horizon.K2HorizonModel.load_weights": Limit(Reason.REORDERS, ("q_proj", "k_proj")),
    "laguna_dflash.DFlashLagunaModel._build_context_kv_buffers reads qkv_proj": Limit(
        Reason.READS, ("q_proj", "k_proj", "v_proj")
    ),
    "llama4.Llama4ForCausalLM.permute_qk_weight_for_rotary": Limit(
        Reason.REORDERS, ("q_proj", "k_proj")
    ),
    "mllama4.Llama4ForConditionalGeneration._consolidate_qkv_weights": Limit(
        Reason.REORDERS, ("vision_model",)
    ),
    "model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention.__init__"
    " reads in_proj_qkvgfab": Limit(Reason.READS, ("in_proj_qkvgfab",)),
    "models.deepseek_v41.nvidia.flash_mla_mega_attn.DeepseekV4MegaAttnAttention.__init__"
    " reads wo_a": Limit(Reason.READS, ("wo_a",)),
    "models.deepseek_v41.nvidia.flash_mla_mega_attn.DeepseekV4MegaAttnAttention.__init__"
    " reads wq_b": Limit(Reason.READS, ("wq_b",)),
    "models.deepseek_v41.nvidia.flash_mla_mega_attn.DeepseekV4MegaAttnAttention._o_proj"
    " reads wo_a": Limit(Reason.READS, ("wo_a",)),
    "models.hy_v4.nvidia.attention.HYV4MLAAttention.forward reads linear_gate": Limit(
        Reason.READS, ("linear_gate",)
    ),
    "models.kimi_k3.nvidia.kda.KimiK3DeltaAttention.__init__ reads in_proj_qkvgfab": Limit(
        Reason.READS, ("in_proj_qkvgfab",)
    ),
    "models.kimi_k3.nvidia.latent_moe_runner.LatentMoERunner.__init__ reads up_proj": Limit(
        Reason.READS, ("routed_expert_up_proj",)
    ),
    "models.kimi_k3.nvidia.latent_moe_runner.LatentMoERunner._small_batch_tail"
    " reads up_proj": Limit(Reason.READS, ("routed_expert_up_proj",)),
    "models.kimi_k3.nvidia.latent_moe_runner.LatentMoERunner._overlap_allreduce_tail"
    " reads up_proj": Limit(Reason.READS, ("routed_expert_up_proj",)),
    "models.kimi_k3.nvidia.latent_moe_runner.LatentMoERunner._shard_up_proj_tail"
    " reads up_proj": Limit(Reason.READS, ("routed_expert_up_proj",)),
    "openpangu_vl.OpenPanguVisionTransformer.load_weights": Limit(Reason.REORDERS, ("visual",)),
    "step3_text.Step3TextModel.load_weights": Limit(Reason.COPIES, ("q_proj", "k_proj", "v_proj")),
    "telechat2.TeleChat2Model._split_key_value": Limit(Reason.REORDERS, ("key_value",)),
    # Parts that do without vLLM's loader in models whose language model has it.
    "nano_nemotron_vl.NemotronH_Nano_VL_V2.load_weights names": Limit(
        Reason.NAMES, ("vision_model", "sound_encoder", "mlp1")
    ),
    "pixtral.PixtralForConditionalGeneration.load_weights names": Limit(
        Reason.NAMES,
        (
            "vision_encoder",
            "vision_tower",
            "vision_language_adapter",
            "multi_modal_projector",
            "patch_merger",
        ),
    ),
    "voxtral.VoxtralForConditionalGeneration.load_weights names": Limit(
        Reason.NAMES, ("mm_whisper_embeddings", "mm_streams_embeddings", "whisper_encoder")
    ),
}
"""Places that stand in the way. Every other `` names`` of a whole model does, too."""

HARMLESS = {
    "no linear layer: expert weights, which stay unquantized": """
        bert_with_rope.NomicMoE.weight_loader
        dbrx.DbrxExperts.weight_loader
        gpt_oss.GptOssModel._load_weights_mxfp4
        gpt_oss.GptOssModel._load_weights_other
        gpt_oss.GptOssModel._load_weights_quark
        gpt_oss.GptOssRoutedExperts._load_packed_expert
        gpt_oss.GptOssRoutedExperts._load_unquantized_expert
        granitemoehybrid.GraniteMoeHybridModel.load_weights
        llama4.Llama4Model.load_moe_expert_weights
        llama4.Llama4Model.load_weights
        minicpm.MiniCPMMoE.weight_loader
        models.deepseek_v4.nvidia.model.DeepseekV4MegaMoEExperts.weight_loader
        models.hy_v4.nvidia.model.HYV4Model.load_fused_expert_weights
        models.hy_v4.nvidia.model.HYV4Model.load_weights
        models.hy_v4.nvidia.mtp.HYV4MTP._load_expert_weight
        models.hy_v4.nvidia.mtp.HYV4MTP._load_fused_expert_weights
        models.hy_v4.nvidia.mtp.HYV4MTP.load_weights
        models.inkling.nvidia.moe.InklingMoE.load_expert_weight
        models.inkling.nvidia.moe.InklingSinkExperts.load_weight
        models.inkling.nvidia.moe.InklingSinkExpertsLinear.load_weight
        openai_privacy_filter._interleave_gate_up_concat_to_pairs
        step3p5.Step3p5Model.load_weights
        step3p5_mtp.Step3p5MTP.load_weights
    """,
    "no linear layer: biases, sinks, gates, convolutions, state matrices, embeddings": """
        bagel.BagelForConditionalGeneration.load_weights
        bailing_moe_v3._load_a_log
        laguna.LagunaModel._slice_sink
        llama_eagle3.Eagle3LlamaForCausalLM.load_weights
        longcat_flash_ngram.NgramEmbedding.load_weight
        mimo_v2.MiMoV2Model.load_weights
        minimax_m2.MiniMaxM2MoE.ebias_weight_loader
        model_executor.layers.mamba.gdn.kimi_gdn_linear_attn._make_fused_conv1d_weight_loader
        model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.a_log_weight_loader
        model_executor.layers.mamba.gdn.olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
        model_executor.layers.mamba.linear.bailing_linear_attn.BailingGroupRMSNormGate._weight_loader
        model_executor.layers.mamba.mamba_mixer.MambaMixer.__init__
        model_executor.layers.mamba.mamba_mixer2.mamba_v2_sharded_weight_loader
        models.deepseek_v4.nvidia.dspark.DSparkDeepseekV4ForCausalLM.load_weights
        models.deepseek_v4.nvidia.model.DeepseekV4Model.load_weights
        models.deepseek_v4.nvidia.mtp.DeepSeekV4MTP.load_weights
        models.deepseek_v41.common.engram._engram_head_shard_weight_loader
        models.deepseek_v41.nvidia.dspark.DSparkDeepseekV4ForCausalLM.load_weights
        models.deepseek_v41.nvidia.model.DeepseekV4Model.load_weights
        models.glm5next.common.kda.Glm5NextLinearAttention.__init__
        models.inkling.nvidia.moe.InklingGate._load_weight
        models.inkling.nvidia.short_conv.InklingShortConv.weight_loader
        models.kimi_k3.nvidia.kda._make_decode_conv1d_weight_loader
        models.kimi_k3.nvidia.kda.a_log_weight_loader
        models.minimax_m3.nvidia.model.MiniMaxM3MoE.ebias_weight_loader
        models.qwen4_exp.common.ple.copy_ple_embedding_shard_
        models.qwen4_exp.nvidia.ngram_embedding.Qwen4ExpNGramEmbedding.load_weights
        molmo._get_weights_with_merged_embedding
        molmo2._get_weights_with_merged_embedding
        openpangu.OpenPanguSinkAttention.weight_loader
        qwen2_moe.Qwen2MoeForCausalLM.load_weights
        qwen3_dflash.DFlashQwen3Model._preprocess
        qwen3_eagle3.Eagle3Qwen3ForCausalLM.load_weights
    """,
    "only with weights stored in fp8, or with experts fused for AMD's kernels": """
        AXK1.AXK1Model.load_weights
        bailing_moe_v3._pad_block_fp8_mlp_checkpoint_tensor
        deepseek_mtp.DeepSeekMTP.load_weights
        deepseek_v2.DeepseekV2Model.load_weights
        deepseek_v2._try_load_fp8_indexer_wk
        glm4_moe_lite.Glm4MoeLiteModel.load_weights
        glm4_moe_lite_mtp.Glm4MoeLiteMTP.load_weights
        glm4_moe_mtp.Glm4MoeMTP.load_weights
        mimo_v2.MiMoV2Model._try_load_fp8_qkv_proj
        models.deepseek_v4.nvidia.model.DeepseekV4Model._pad_shared_expert_weight
        models.deepseek_v41.nvidia.model.DeepseekV4Model._pad_shared_expert_weight
        models.dots3_note.nvidia.model._pad_dense_mlp_weight
        models.glm5next.common.model._try_load_fp8_attn_proj
        utils.maybe_fuse_shared_experts
    """,
    "only with names that bitsandbytes' checkpoints do not have": """
        bert_with_rope.JinaRobertaModel.jina_merge_lora_weights
        hy_v3_mtp.HYV3MTP.load_weights
        mistral.MistralForCausalLM.maybe_remap_mistral
    """,
    "listed for its names already": """
        medusa.Medusa.load_weights
        mimo_v2_mtp.MiMoV2MTP.load_weights
        moondream3.Moondream3ForCausalLM.load_weights
    """,
    "only with more ranks than key heads, and the layer refuses what does not fit": """
        models.inkling.nvidia.model._load_inkling_weights
    """,
    "whole rows move, with their scales (tests/vllm_glue/test_rows.py)": """
        falcon.FalconModel.load_weights
    """,
    "a transposed matrix is turned back (tests/vllm/test_families.py)": """
        gpt2.GPT2Model._transpose_conv1d
    """,
    "asks the layer's method, a known dtype or the kernel in use first": """
        model_executor.layers.mamba.linear.bailing_linear_attn.BailingMoELinearAttention.weight_direct_load
        models.dots3_note.nvidia.attention.Dots3NoteTritonMLAImpl.forward_mha reads kv_b_proj
        models.kimi_k3.nvidia.kda.KimiK3DeltaAttention.forward reads f_b_proj
        models.kimi_k3.nvidia.kda.KimiK3DeltaAttention.forward reads in_proj_qkvgfab
        models.kimi_k3.nvidia.low_latency_gemm._enable_kda_projection_overlap reads f_b_proj
        models.kimi_k3.nvidia.low_latency_gemm._enable_kda_projection_overlap reads in_proj_qkvgfab
        qwen3_dflash.DFlashQwen3Model._build_context_kv_buffers reads qkv_proj
    """,
    "no quantizable layer of this name": """
        models.dots3_note.nvidia.vision.DotsMoEVitModel.dtype reads fc1
        models.dots3_note.nvidia.vision.DotsMoEVitModel.dtype reads fc13
        models.dots3_note.nvidia.vision.MoESwiGLUFFNFP8.process_weights_after_loading reads fc1
        models.dots3_note.nvidia.vision.MoESwiGLUFFNFP8.process_weights_after_loading reads fc2
        models.dots3_note.nvidia.vision.MoESwiGLUFFNFP8.process_weights_after_loading reads fc3
        granite_speech.GraniteSpeechForConditionalGeneration._build_input_features_mask reads input_linear
        granite_speech.GraniteSpeechForConditionalGeneration._parse_and_validate_audio_input reads input_linear
        models.deepseek_v41.common.vl_cudagraph.DeepseekV4VLEncoderCudaGraphMixin.encoder_eager_forward reads w1
        models.deepseek_v41.common.vl_cudagraph.DeepseekV4VLEncoderCudaGraphMixin.prepare_encoder_cudagraph_replay_buffers reads w1
        openvla.OpenVLAForActionPrediction._process_image_input reads proj
        qianfan_ocr.QianfanOCRForConditionalGeneration._patch_quant_config reads linear
    """,
    "no tensor of a checkpoint goes through it": """
        extract_hidden_states.ExtractHiddenStatesModel.load_weights names
        model_executor.layers.mamba.linear.minimax_linear_attn.MiniMaxText01LinearAttention.weight_direct_load
        utils.AutoWeightsLoader._groupby_prefix
    """,
    "the loader is used by the class that it derives from, or asks a mapper of the config itself": """
        colbert.ColBERTLfm2Model.load_weights names
        glm_ocr_mtp.GlmOcrMTP.load_weights names
        hy_v3_mtp.HYV3MTP.load_weights names
        mistral_eagle.EagleMistralForCausalLM.load_weights names
        mistral_large_3_eagle.EagleMistralLarge3ForCausalLM.load_weights names
    """,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
"""A quarter of a minute on an idle machine."""


@pytest.fixture(scope="module")
def places() -> dict[str, set[str]]:
    """What the walk finds in the installed vLLM."""
    found = installed_version()
    if found is None or not found.startswith(NEWEST_TESTED.rpartition(".")[0]):
        pytest.skip(f"the table is about vLLM {NEWEST_TESTED}, {found} is installed")
    folders = find_spec("vllm").submodule_search_locations
    return sites(Sources(Path(folders[0])))


def harmless() -> set[str]:
    return {line.strip() for lines in HARMLESS.values() for line in lines.splitlines()} - {""}


def limit_of(place: str) -> Limit | None:
    """What a judged place does; a whole model without vLLM's loader needs no judging."""
    if place in harmless():
        return None
    if place.endswith(" names"):
        return LIMITED.get(place, Limit(Reason.NAMES))
    return LIMITED[place]


def test_every_place_that_handles_weights_is_judged(places):
    known = harmless() | set(LIMITED)
    assert [p for p in sorted(places) if p not in known and not p.endswith(" names")] == []
    assert sorted(known - set(places)) == [], "judged, but not in vLLM any more"
    assert harmless().isdisjoint(LIMITED)


def test_the_table_names_exactly_the_architectures_that_come_to_such_a_place(places):
    found: dict[str, set[Limit]] = {}
    for place, architectures in places.items():
        limit = limit_of(place)
        for architecture in architectures if limit else ():
            found.setdefault(architecture, set()).add(limit)
    assert {name: set(limits) for name, limits in LIMITS.items()} == found


def test_the_other_table_names_those_whose_rows_move(places):
    assert places["falcon.FalconModel.load_weights"] == set(MOVED)


def test_every_entry_is_an_architecture_of_vllms_list(places):
    known = set().union(*places.values())
    assert set(LIMITS) <= known
    assert len(known) > 300, "the walk has lost most of vLLM's models"
