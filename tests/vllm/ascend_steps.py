"""Steps of vLLM-Ascend's V1 runner on CPU: real configuration, runner, builders and block tables.

The runner is made without its constructor, which wants a device: its attributes are what
``_build_attention_metadata`` and the hook read. Everything it calls is the published source.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "sigmoid",  # for which vLLM-Ascend has a route in plain PyTorch
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAX_LEN, MAX_REQUESTS, MAX_TOKENS, BLOCK = 2048, 8, 256, 128
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """What the scheduler asks of each request.

    Attributes:
        counts: tokens of this step; decodes come first, as vLLM-Ascend orders a batch.
        contexts: tokens that are computed already.
        prompts: tokens of the prompt.
        blocks: of the cache, ``[requests, blocks]``.
    """

    counts: list[int]
    contexts: list[int]
    prompts: list[int]
    blocks: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Of every token in its request."""
        return np.concatenate(
            [np.arange(s, s + n) for s, n in zip(self.contexts, self.counts, strict=True)]
        )

    @property
    def slots(self) -> np.ndarray:
        """Place of every token in the cache."""
        requests = np.repeat(np.arange(len(self.counts)), self.counts)
        return self.blocks[requests, self.positions // BLOCK] * BLOCK + self.positions % BLOCK

    def only(self, requests: slice, counts: list[int], contexts: list[int]) -> Step:
        """The step that has these tokens of these requests alone."""
        return Step(counts, contexts, self.prompts[requests], self.blocks[requests])


def random_step(seed: int) -> Step:
    """Decodes, first chunks, later chunks and ends of prompts, in any number."""
    draw = random.Random(seed)
    kind = draw.choice(["mixed", "decodes", "prompts", "chunks"])
    decodes = {"mixed": draw.randint(1, 4), "decodes": draw.randint(2, 8)}.get(kind, 0)
    prefills = 0 if kind == "decodes" else draw.randint(1, MAX_REQUESTS - decodes - 1)
    counts = [1] * decodes + [
        draw.choice([2, 3, 5, 17, 30]) if prefills > 1 else draw.randint(2, 120)
        for _ in range(prefills)
    ]
    contexts = [draw.randint(1, 1500) for _ in range(decodes)] + [
        0 if kind == "prompts" else draw.choice([0, 0, 7, 128, 300, 1100]) for _ in range(prefills)
    ]
    prompts = [draw.randint(1, context) for context in contexts[:decodes]] + [
        contexts[i] + counts[i] + draw.choice([0, 0, 40]) for i in range(decodes, len(counts))
    ]
    blocks = np.arange(1, 1 + len(counts) * (MAX_LEN // BLOCK), dtype=np.int32)
    return Step(counts, contexts, prompts, blocks.reshape(len(counts), -1))


def vllm_config(folder: Path, afd: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's configuration, completed by the platform of vLLM-Ascend."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm_ascend.ascend_config import AscendCompilationConfig

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    options = {
        "dtype": "bfloat16",
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_REQUESTS,
        "max_num_batched_tokens": MAX_TOKENS,
        "enable_chunked_prefill": True,
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        **changes,
    }
    # Patterns of operators that are not here; the first configuration of a process decides.
    known = (*inspect.signature(AscendCompilationConfig).parameters, "fuse_muls_add")
    off = {name: False for name in known if name.startswith("fuse_")}
    given = {"split": "token", "connector": "cam"} if afd is None else afd
    options["additional_config"] = {"afd": given, "ascend_compilation_config": off}
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()


def join_alone(config: Any, port_file: Path) -> None:
    """Make vLLM's groups of ranks, each with this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{port_file}", 0, "gloo")
        initialize_model_parallel(1)


def rotary_factors(config: Any) -> None:
    """Fill vLLM-Ascend's tables: another value for every position."""
    from vllm_ascend.ops import rotary_embedding as rotary

    rotary.set_cos_and_sin(config, MAX_REQUESTS, 1, torch.bfloat16, CPU)
    table = torch.arange(MAX_LEN, dtype=torch.float32)[:, None].expand(MAX_LEN, 64)
    rotary._record_cos_and_sin_cache(table, -table)


def new_runner(config: Any, backend: Any, spec: Any) -> Any:
    """A runner of vLLM-Ascend with one attention group."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import AttentionGroup
    from vllm_ascend.worker.block_table import MultiGroupBlockTable
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    runner = object.__new__(NPUModelRunner)
    group = AttentionGroup(backend, LAYERS, spec, 0)
    layers = config.compilation_config.static_forward_context
    for name in LAYERS:  # vLLM's part of the builder asks the layer for a backend of prefills
        backend_of_prefills = SimpleNamespace(clone=lambda: None)
        layers.setdefault(name, SimpleNamespace(prefill_backend=backend_of_prefills))
    with set_current_vllm_config(config):
        group.create_metadata_builders(config, CPU, BLOCK, 1)
        table = MultiGroupBlockTable(
            MAX_REQUESTS, MAX_LEN, MAX_TOKENS, False, CPU, [BLOCK], kernel_sizes=[[BLOCK]]
        )
    values = {
        "vllm_config": config,
        "model_config": config.model_config,
        "cache_config": config.cache_config,
        "parallel_config": config.parallel_config,
        "scheduler_config": config.scheduler_config,
        "compilation_config": config.compilation_config,
        "speculative_config": None,
        "device": CPU,
        "max_model_len": MAX_LEN,
        "attn_groups": [[group]],
        "kv_cache_config": SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS)]
        ),
        "input_batch": SimpleNamespace(block_table=table),
        "decode_token_per_req": 1,
        "actual_seq_lengths_q": list(range(1, MAX_TOKENS + 1)),
        "is_mm_prefix_lm": False,
        "_has_gdn": False,
        "need_accepted_tokens": False,
        "use_async_spec_decode": False,
        "use_compress": False,
        "sparse_kv_offload_enabled": False,
        "routed_experts_initialized": False,
        "_offload_req_ids_tensor": None,
        "_offload_token_to_req": None,
        "pcp_size": 1,
        "dcp_size": 1,
    }
    for name, value in values.items():
        setattr(runner, name, value)
    return runner


def load(runner: Any, step: Step) -> dict[str, Any]:
    """Put ``step`` into the runner; returns the arguments of ``_build_attention_metadata``."""
    count = len(step.counts)
    counts = np.array(step.counts, dtype=np.int32)
    contexts = np.zeros(MAX_REQUESTS, dtype=np.int32)
    contexts[:count] = step.contexts
    prompts = np.zeros(MAX_REQUESTS, dtype=np.int32)
    prompts[:count] = step.prompts
    batch = runner.input_batch
    batch.req_ids = [f"request {i}" for i in range(count)]
    batch.num_computed_tokens_cpu = contexts
    batch.num_computed_tokens_cpu_tensor = torch.from_numpy(contexts)
    batch.num_prompt_tokens_cpu_tensor = torch.from_numpy(prompts)
    table = batch.block_table[0]
    for row in range(count):
        table.add_row(step.blocks[row].tolist(), row)
    batch.block_table.commit_block_table(count)
    tokens = int(counts.sum())
    table.slot_mapping.gpu[:tokens] = torch.from_numpy(step.slots)

    starts = np.zeros(MAX_REQUESTS + 1, dtype=np.int32)
    starts[1 : count + 1] = np.cumsum(counts)
    lengths = np.zeros(MAX_REQUESTS, dtype=np.int32)
    lengths[:count] = np.array(step.contexts) + counts
    positions = torch.full((MAX_TOKENS,), 2047)  # rows behind the step's hold what was there before
    positions[:tokens] = torch.from_numpy(step.positions)
    runner.query_start_loc = _buffer(starts)
    runner.optimistic_seq_lens_cpu = torch.from_numpy(lengths)
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    fields = {field.name for field in dataclasses.fields(AscendCommonAttentionMetadata)}
    later = "group_len" in fields  # version 0.18 keeps lengths and positions in pairs of buffers
    runner.seq_lens = torch.from_numpy(lengths.copy()) if later else _buffer(lengths)
    runner.positions = positions if later else SimpleNamespace(gpu=positions)
    for name in ("group_len", "group_key_idx", "group_key_cache_idx"):
        setattr(runner, name, _buffer(np.arange(MAX_REQUESTS, dtype=np.int32)))
    runner.attn_state = runner._build_attn_state(count, counts, counts)
    return {
        "num_tokens": tokens,
        "num_tokens_padded": tokens + 3,
        "num_reqs": count,
        "max_query_len": int(counts.max()),
        "num_scheduled_tokens": dict(zip(batch.req_ids, step.counts, strict=True)),
        "num_scheduled_tokens_np": counts,
    }


def _buffer(values: np.ndarray) -> Any:
    tensor = torch.from_numpy(values)
    return SimpleNamespace(np=values, cpu=tensor, gpu=tensor.clone())
