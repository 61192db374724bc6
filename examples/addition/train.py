"""Train the small DeepSeek-V2 model that adds: python examples/addition/train.py DIR

Deterministic by seed on one thread. Writes a Hugging Face checkpoint: ``config.json``,
``model.safetensors``, ``generation_config.json`` and a tokenizer of single characters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from task import CHARACTERS, END, PAD, Problem, encode, held_out_problems, problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

IGNORED = -100
BALANCE = 0.01


def config() -> DeepseekV2Config:
    """DeepSeek-V2 in small: one dense and two MoE layers, 8 routed experts and a shared one."""
    return DeepseekV2Config(
        vocab_size=len(CHARACTERS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        initializer_range=0.05,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, so that ``AutoTokenizer`` reads what :func:`task.encode` writes."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="_", eos_token=".", padding_side="left"
    )


def batches(size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids ``[size, length]`` and the ids to predict, padded on the right, without end."""
    source = problems(seed, held_out=False)
    while True:
        rows = [(encode(p.prompt), encode(p.answer)) for p in islice(source, size)]
        length = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
        ids = torch.full((size, length), PAD)
        labels = torch.full((size, length), IGNORED)
        for i, (prompt, answer) in enumerate(rows):
            text = torch.tensor(prompt + answer)
            ids[i, : len(text) - 1] = text[:-1]
            labels[i, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
        yield ids, labels


def imbalance(router_logits: tuple[torch.Tensor, ...], real: torch.Tensor) -> torch.Tensor:
    """1 when every expert is chosen equally often; the more, the more uneven (Switch's loss)."""
    losses = []
    for logits in router_logits:
        scores = logits.softmax(-1)[real]
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(2).indices, 0.5)
        losses.append(scores.shape[1] * (scores.mean(0) * chosen.mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def exact_match(model: torch.nn.Module, sample: list[Problem]) -> float:
    """Share of problems whose whole answer is the likeliest token at every place."""
    hits = 0
    for problem in sample:
        prompt, answer = encode(problem.prompt), encode(problem.answer)
        ids = torch.tensor([prompt + answer[:-1]])
        best = model(ids).logits[0, len(prompt) - 1 :].argmax(-1)
        hits += best.tolist() == answer
    return hits / len(sample)


def train(steps: int, size: int, rate: float, seed: int) -> torch.nn.Module:
    """The trained model, in evaluation mode."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = DeepseekV2ForCausalLM(config())
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    warm_up = 100
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm_up, rate * 0.02),
        ],
        [warm_up],
    )
    sample = held_out_problems(200, seed=1)
    begin = time.perf_counter()
    for step, (ids, labels) in enumerate(islice(batches(size, seed), steps), 1):
        out = model(ids, output_router_logits=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        real = ids.flatten() != PAD
        (loss + BALANCE * imbalance(out.router_logits, real)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 200 == 0 or step == steps:
            share = exact_match(model.eval(), sample)
            model.train()
            seconds = time.perf_counter() - begin
            print(
                f"{seconds:6.0f} s  step {step}  loss {loss:.4f}  held out {share:.1%}", flush=True
            )
    return model.eval()


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the checkpoint is written")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = train(args.steps, args.batch, args.rate, args.seed)
    model.save_pretrained(args.directory)
    tokenizer().save_pretrained(args.directory)
    GenerationConfig(pad_token_id=PAD, eos_token_id=END).save_pretrained(args.directory)
    print(f"held out: {exact_match(model, held_out_problems(1000)):.2%} of 1000")


if __name__ == "__main__":
    main()
