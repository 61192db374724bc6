"""``afd-graph serve``: one rank of a world of attention and FFN ranks, started by torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click

from afd_graph.cli.ffn_role import run_rank, serve_experts, world_options
from afd_graph.cli.model_options import parse_dtype
from afd_graph.cli.output import note
from afd_graph.cli.signals import Signals, Told
from afd_graph.config import SPLITS
from afd_graph.errors import ConfigError, ConnectorError


@click.command()
@click.option(
    "--role",
    type=click.Choice(["auto", "attention", "ffn"]),
    default="auto",
    show_default=True,
    help="What this rank is expected to be. Attention ranks come first; auto takes what it is.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False),
    help="Checkpoint directory: config.json, safetensors, tokenizer.",
)
@click.option(
    "--artifact",
    type=click.Path(exists=True),
    help="What afd-graph compile wrote, instead of compiling --model here; that one then only "
    "gives the tokenizer and may be left out.",
)
@click.option("--ffn-ranks", type=click.IntRange(1), required=True, help="FFN ranks of the world.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks a replica.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Most tokens of one step of a replica.",
)
@click.option(
    "--split",
    type=click.Choice([s for s in SPLITS if s not in ("cost", "auto")]),
    default="token",
    show_default=True,
    help="Where a step is cut in two stages.",
)
@world_options
@click.option("--sequence-parallel", is_flag=True, help="Keep one rank's rows between the sums.")
@click.option(
    "--prompts",
    type=click.File("r"),
    default="-",
    help="One prompt a line, or JSON lines; - is standard input, read by rank 0.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    default="-",
    help="Where rank 0 writes one JSON line a prompt; - is standard output.",
)
@click.option("--mode", help="Name of the run in the results.  [default: from split and layout]")
@click.option(
    "--logits",
    "logits_dir",
    type=click.Path(file_okay=False),
    help="Folder for the fp32 logits that chose the tokens: a safetensors file a replica, with a "
    "tensor [tokens, vocabulary] a document.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option(
    "--batch", type=click.IntRange(1), default=8, show_default=True, help="Prompts a step."
)
@click.pass_context
def command(ctx: click.Context, role: str, **options: Any) -> None:
    """Run one rank: torchrun --nproc-per-node N -m afd_graph.cli serve ...

    The same command on every rank. The last --ffn-ranks ranks are FFN ranks: each loads its
    experts and serves until all attention ranks have left or it is told to stop; SIGUSR1 prints
    its state as JSON. The others are attention ranks in replicas of --tp: each replica completes
    its share of the prompts, and rank 0 writes the results.
    """
    if options["model"] is None and options["artifact"] is None:
        raise click.UsageError("name a --model or an --artifact")
    run_rank(ctx, lambda signals: _run(role, options, signals))


def _run(role: str, options: dict[str, Any], signals: Signals) -> None:
    import torch

    from afd_graph.connectors.torch_distributed_world import World, WorldConfig

    torch.set_num_threads(options["threads"])
    world = World(
        WorldConfig(
            ffn_ranks=options["ffn_ranks"],
            tp_size=options["tp"],
            max_tokens=options["max_tokens"],
            dynamic_quant=options["dynamic_quant"],
            credits=options["credit_count"],
            timeout_s=options["timeout_s"],
            connect_timeout_s=options["connect_timeout_s"],
            dtype=options["dtype"] or "",
        )
    )
    try:
        is_ffn = world.ranks.is_ffn(world.rank)
        if role not in ("auto", "ffn" if is_ffn else "attention"):
            raise ConfigError(
                f"{world.name} was started with --role {role}",
                remedy="start the attention ranks first, or leave --role out",
            )
        dtype = parse_dtype(options["dtype"])
        checkpoint = None
        if options["artifact"]:
            described = _check_artifact(world, options)
            world.describe(described["fingerprint"], described["dtype"])
        else:
            from afd_graph.hf import open_checkpoint

            checkpoint = open_checkpoint(options["model"], dtype)
            rows = str(checkpoint.row_dtype()).removeprefix("torch.")
            world.describe(checkpoint.fingerprint(), rows)
        prepare = _prepare_ffn if is_ffn else _prepare_attention
        go = prepare(world, checkpoint, options, signals)
        if signals.name is not None:
            raise Told
    except BaseException as error:
        world.give_up(error)
        raise
    go()


def _check_artifact(world: Any, options: dict[str, Any]) -> Mapping[str, str]:
    """What the manifest says of the model; refuses another world than the artifact is for."""
    from afd_graph.artifact import read_manifest

    manifest = read_manifest(options["artifact"])
    asked = {
        "ffn_ranks": (options["ffn_ranks"], manifest.ffn_ranks, "--ffn-ranks"),
        "tp": (options["tp"], 1, "--tp"),
        "credits": (options["credit_count"], manifest.credits, "--credits"),
        "dtype": (options["dtype"] or manifest.model["dtype"], manifest.model["dtype"], "--dtype"),
    }
    for want, have, option in asked.values():
        if want != have:
            raise ConfigError(
                f"the artifact was compiled for {option} {have}, {world.name} was started with "
                f"{want}",
                remedy=f"pass {option} {have}, or compile the artifact again",
            )
    return manifest.model


# -- the FFN role ----------------------------------------------------------------------------------


def _prepare_ffn(
    world: Any, checkpoint: Any, options: dict[str, Any], _: Signals
) -> Callable[[], None]:
    from afd_graph.ffn.checkpoint import LoadedExperts

    experts: Any
    if options["artifact"]:
        from afd_graph.artifact import load

        rank = world.rank - world.ranks.attention
        experts = load(options["artifact"], role="ffn", rank=rank)
    else:
        experts = LoadedExperts(
            checkpoint, lambda experts: world.ranks.expert_range(world.rank, experts)
        )
    note(f"{world.name}: loaded {experts.summary()}")

    return lambda: serve_experts(world, experts, options["split"])


# -- the attention role ----------------------------------------------------------------------------


def _prepare_attention(
    world: Any, checkpoint: Any, options: dict[str, Any], signals: Signals
) -> Callable[[], None]:
    from afd_graph.activation import StepLog
    from afd_graph.generate import Generation, generate, read_prompts
    from afd_graph.hf import load_tokenizer

    tokenizer = None if options["model"] is None else load_tokenizer(Path(options["model"]))
    lines = _all_lines(world, options["prompts"])
    prompts = read_prompts(lines, tokenizer)
    if options["artifact"]:
        compiled = _open_artifact(world, options)
    else:
        compiled = _compile_model(world, checkpoint, options)

    def go() -> None:
        import torch

        connector = compiled.connector
        signals.tell = connector.stop
        with compiled.start() as backend:
            replicas = world.ranks.attention // world.ranks.tp
            replica = world.ranks.replica(world.rank)
            mine = prompts[replica::replicas]
            done = []
            how = Generation(
                options["split"],
                options["mode"] or _mode(options),
                options["max_new_tokens"],
                options["batch"],
                compiled.end_tokens,
                (lambda tokens: "") if tokenizer is None else tokenizer.decode,
            )
            log = StepLog(backend, prefix=f"replica {replica}.")
            first = world.rank == world.ranks.replica_ranks(replica)[0]
            logits: dict[str, torch.Tensor] | None = None
            if first and options["logits_dir"]:
                logits = {}
            for document in generate(compiled.model, compiled.new_cache, mine, log, how, logits):
                done.append(json.dumps(asdict(document), ensure_ascii=False))
                if first:
                    note(f"{world.name}: {len(done)} of {len(mine)} prompts")
            if logits is not None:
                _write_logits(logits, options["logits_dir"], replica)
            gathered = connector.gather(done)
        if world.rank == 0:
            _write(prompts, gathered, replicas, world.ranks.tp, options["output"])
            report = backend.report()
            note(f"{world.name}: {report.steps_split} steps split, {dict(report.steps_unsplit)}")

    return go


@dataclass
class _Served:
    """A model that an attention rank serves, whether compiled here or opened.

    Attributes:
        connector: to the FFN ranks.
        start: the backend or the loaded model, as a context.
        model: called for every step.
        new_cache: makes the cache of a batch.
        end_tokens: that end a text.
    """

    connector: Any
    start: Callable[[], Any]
    model: Any
    new_cache: Callable[[], Any]
    end_tokens: frozenset[int]


def _compile_model(world: Any, checkpoint: Any, options: dict[str, Any]) -> _Served:
    import torch
    from transformers import DynamicCache

    from afd_graph import AFDBackend, AFDConfig
    from afd_graph.connectors.torch_distributed import TorchDistributedConnector
    from afd_graph.hf import load_without_experts, make_tensor_parallel

    model = load_without_experts(checkpoint)
    if options["tp"] > 1:
        make_tensor_parallel(model, world.tp_mesh())
    config = AFDConfig(
        split=options["split"],
        connector="torch_distributed",
        credits=options["credit_count"],
        sequence_parallel=options["sequence_parallel"],
        timeout_s=options["timeout_s"],
    )
    torch._dynamo.config.recompile_limit = 64
    # Floats of the model are constants; as inputs they only make every graph compile twice.
    torch._dynamo.config.specialize_float = True
    served = _Served(
        TorchDistributedConnector(world),
        lambda: start(),
        None,
        lambda: DynamicCache(config=model.config),
        _end_tokens(model.generation_config.eos_token_id),
    )

    def start() -> AFDBackend:
        backend = AFDBackend(config, connector=served.connector)
        served.model = torch.compile(model, backend=backend, dynamic=True)
        return backend

    return served


def _open_artifact(world: Any, options: dict[str, Any]) -> _Served:
    from afd_graph.artifact import load
    from afd_graph.artifact.served import ServedModel, TensorCache
    from afd_graph.connectors.torch_distributed import TorchDistributedConnector

    connector = TorchDistributedConnector(world)
    asked = ("split", "sequence_parallel", "timeout_s")
    loaded = load(
        options["artifact"],
        role="attention",
        connector=connector,
        options={"connector": "torch_distributed", **{name: options[name] for name in asked}},
    )
    last = None
    if options["model"]:
        from afd_graph.hf import read_config

        last = read_config(Path(options["model"])).get("eos_token_id")
    return _Served(connector, lambda: loaded, ServedModel(loaded), TensorCache, _end_tokens(last))


def _all_lines(world: Any, prompts: IO[str]) -> list[str]:
    """The prompts' lines on every attention rank; standard input belongs to rank 0 alone."""
    if prompts is not sys.stdin:
        return list(prompts)
    if world.rank == 0:
        return list(world.share("prompts", list(prompts)))
    return list(world.share("prompts"))


def _mode(options: dict[str, Any]) -> str:
    """``token, sequence parallel``: how results of this run are called."""
    return options["split"] + (", sequence parallel" if options["sequence_parallel"] else "")


def _end_tokens(end: int | list[int] | None) -> frozenset[int]:
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)


def _write(
    prompts: list[Any], gathered: list[list[str]], replicas: int, tp: int, output: str
) -> None:
    """Write the results in the order of the prompts.

    Raises:
        ConnectorError: the ranks of a replica answered differently, or split different steps.
    """
    for replica in range(replicas):
        lines, *others = gathered[replica * tp : (replica + 1) * tp]
        for rank, other in enumerate(others, replica * tp + 1):
            if other != lines:
                number = next(
                    i for i, (a, b) in enumerate(zip(lines, other, strict=True)) if a != b
                )
                raise ConnectorError(
                    f"attention ranks {replica * tp} and {rank} share a replica and differ: "
                    f"{lines[number]} and {other[number]}",
                    remedy="check that all ranks run the same versions on the same kind of machine",
                )
    with click.open_file(output, "w", atomic=output != "-") as stream:
        for number in range(len(prompts)):
            lines = gathered[(number % replicas) * tp]
            stream.write(lines[number // replicas] + "\n")


def _write_logits(logits: dict[str, Any], folder: str, replica: int) -> None:
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(logits, Path(folder) / f"replica{replica}.safetensors")
