"""Random DeepSeek checkpoints whose arg-max means something, and the tokens of Hugging Face.

    python examples/random_deepseek.py DIR      # or: DIR deepseek_v3

Weights are scaled by their fan-in, so that logits spread and equal greedy tokens prove equal
models; the router is scaled up, so that tokens take different experts. The attention has the
latent width of the real models (512 + 64), the only one that vLLM's MLA kernels for CPU take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": 512,
}

MODELS = {
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 96,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
}


def make_checkpoint(directory: Path, family: str, **changes: object) -> Path:
    """Write a checkpoint of ``family`` to ``directory``; equal calls write equal weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps({**COMMON, **MODELS[family], **changes}, indent=1)
    (directory / "config.json").write_text(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
            elif not isinstance(tensor, torch.nn.Parameter):
                continue
            elif tensor.dim() < 2:
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            else:
                scale = 3.0 if name.endswith("gate.weight") else 1.0
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * (scale / tensor.shape[-1] ** 0.5))
    model.save_pretrained(directory)
    # save_pretrained writes its own spelling of the configuration; vLLM reads the published one.
    (directory / "config.json").write_text(config)
    return directory


def greedy_tokens(
    directory: Path, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[int]]:
    """Greedy tokens of Hugging Face ``generate``, one request at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for prompt, length in zip(prompts, lengths, strict=True):
            out = model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def main() -> None:
    """Write a checkpoint, which has no tokenizer."""
    parser = argparse.ArgumentParser(description="Write a small random DeepSeek checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("family", nargs="?", default="deepseek_v2", choices=MODELS)
    given = parser.parse_args()
    make_checkpoint(given.directory, given.family)


if __name__ == "__main__":
    main()
