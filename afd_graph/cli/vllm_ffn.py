"""``afd-graph vllm-ffn``: an FFN rank for a model that vLLM serves."""

from __future__ import annotations

from typing import Any

import click

from afd_graph.cli.ffn_role import run_rank, serve_experts, world_options
from afd_graph.cli.model_options import parse_dtype
from afd_graph.cli.output import note
from afd_graph.cli.signals import Signals


@click.command()
@click.option(
    "--model",
    "path",
    type=click.Path(exists=True, file_okay=False),
    required=True,
    help="Checkpoint directory, the one that vLLM serves.",
)
@click.option(
    "--address",
    required=True,
    help="HOST:PORT at which vLLM's first worker listens: its connector option of that name.",
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Of vLLM.")
@click.option(
    "--ffn-ranks", type=click.IntRange(1), default=1, show_default=True, help="Of the world."
)
@click.option(
    "--ffn-rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Which of them this one is; each owns an equal share of the experts.",
)
@world_options
@click.pass_context
def command(ctx: click.Context, path: str, **options: Any) -> None:
    """Run the experts of a model that vLLM serves, on a rank of their own.

    Start it before or after vLLM. It loads its experts, meets vLLM's workers at --address and
    serves them until vLLM ends or it is told to stop; SIGUSR1 prints its state as JSON.
    """
    if options["ffn_rank"] >= options["ffn_ranks"]:
        raise click.UsageError("--ffn-rank counts from 0 and must be less than --ffn-ranks")
    run_rank(ctx, lambda signals: _run(path, options, signals), at_once=True)


def _run(path: str, options: dict[str, Any], _: Signals) -> None:
    import torch

    from afd_graph.connectors.torch_distributed_world import Ranks, World, WorldConfig
    from afd_graph.hf import open_checkpoint
    from afd_graph.vllm.experts import load_kernels
    from afd_graph.vllm.rank_experts import PackedExperts
    from afd_graph.vllm.ranks import described_model

    torch.set_num_threads(options["threads"])
    load_kernels()
    tp, ffn_ranks = options["tp"], options["ffn_ranks"]
    ranks = Ranks(tp, ffn_ranks, tp)
    rank = tp + options["ffn_rank"]
    config = WorldConfig(
        ffn_ranks=ffn_ranks,
        attention_ranks=tp,
        tp_size=tp,
        max_tokens=0,
        dynamic_quant=options["dynamic_quant"],
        credits=options["credit_count"],
        timeout_s=options["timeout_s"],
        connect_timeout_s=options["connect_timeout_s"],
        address=options["address"],
        rank=rank,
    )
    dtype = parse_dtype(options["dtype"])
    checkpoint = open_checkpoint(path, dtype)
    experts = PackedExperts(checkpoint, lambda number: ranks.expert_range(rank, number))
    note(f"{ranks.name(rank)}: loaded {experts.summary()}")
    note(f"{ranks.name(rank)}: waiting for vLLM at {options['address']}")
    world = World(config)
    try:
        row_dtype = str(checkpoint.row_dtype()).removeprefix("torch.")
        world.describe(described_model(checkpoint), row_dtype)
        note(f"{world.name}: vLLM is there")
    except BaseException as error:
        world.give_up(error)
        raise
    serve_experts(world, experts, "")
