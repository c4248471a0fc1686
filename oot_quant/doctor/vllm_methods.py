"""Quantization methods that vLLM serves itself, so that no backend is missed for them.

vLLM keeps the list in ``vllm.model_executor.layers.quantization``, whose import takes seconds;
this copy only decides what the doctor says about a model that is none of our business.
"""

VLLM_METHODS = frozenset(
    {
        "auto_awq",
        "auto_gptq",
        "awq",
        "awq_marlin",
        "compressed-tensors",
        "deepseek_v4_fp8",
        "experts_int8",
        "fbgemm_fp8",
        "fp8",
        "fp_quant",
        "gpt_oss_mxfp4",
        "gptq",
        "gptq_marlin",
        "humming",
        "inc",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "modelopt_mxfp8",
        "moe_wna16",
        "mxfp4",
        "mxfp8",
        "online",
        "quark",
        "torchao",
    }
)
