"""Experts on FFN ranks: tensor-parallel workers, two FFN ranks, what fails, what is refused."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afd_graph.errors import AFDError, ConfigError
from afd_graph.report import GATE_OPENED
from conftest import END_S, mixed_requests
from ports import free_port

PROGRAM = Path(__file__).parent / "rank_engine.py"
START_S = 600  # a busy machine is slow to start


def workload(name: str, split: str) -> dict[str, Any]:
    prompts, lengths = mixed_requests()
    return {"name": name, "split": split, "prompts": prompts, "lengths": lengths}


def check_runs(found: dict[str, Any], expected: list[list[int]]) -> None:
    """Right tokens, and steps that were really split, the same ones on all workers."""
    for split in ("token", "request"):
        run = found["runs"][split]
        wrong = [i for i, row in enumerate(run["tokens"]) if row != expected[i]]
        assert not wrong
        counters, *others = run["counters"]
        assert all(other == counters for other in others)
        assert counters["split"] >= 20
        assert ("mid_request" in counters) == (split == "token")
        allowed = {"single_token", "single_request", "prefix_hazard"}
        assert set(counters) <= {"split", "mid_request"} | allowed
    assert all(sizes and not any(sizes) for sizes in found["weights_here"])


MATRIX = [workload("token", "token"), workload("request", "request")]


def test_tensor_parallel_attention_with_chunked_prefill_and_prefix_caching(
    engine: Any, checkpoint: Any, reference: Any, experts: Any, tmp_path: Path
) -> None:
    model = checkpoint("deepseek_v2")
    ffn = experts(model, 1, "--tp", "2")
    broken = {**MATRIX[0], "name": "broken", "running": str(tmp_path / "running"), "break": 1}
    found = engine.run(
        model,
        [*MATRIX, broken],
        afd=ffn.options(),
        engine={
            "tensor_parallel_size": 2,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 64,
            "block_size": 32,
        },
        environment={"VLLM_MLA_DISABLE": "1"},
        program=PROGRAM,
    )
    check_runs(found, reference("deepseek_v2"))
    assert len(found["weights_here"]) == 2
    # One worker failed while the other was in a sum with it, which nothing but its end ends.
    assert found["runs"]["broken"]["error"] != "none"
    assert found["runs"]["broken"]["seconds"] < END_S
    why = "a step failed on rank 1 (attention 1): RuntimeError: broken by a test"
    assert f"rank 0 (attention 0): {why}" in found["log"]
    ((code, log),) = ffn.ended()
    assert code == 1
    assert why in log


def test_tensor_parallel_attention_with_a_process_of_experts_for_each_worker(
    engine: Any, checkpoint: Any, reference: Any
) -> None:
    model = checkpoint("deepseek_v2")
    found = engine.run(model, MATRIX, engine={"tensor_parallel_size": 2}, program=PROGRAM)
    check_runs(found, reference("deepseek_v2"))
    assert len(found["weights_here"]) == 2


def test_opaque_layers_of_one_worker_compiled_and_loaded(
    engine: Any, checkpoint: Any, reference: Any, experts: Any, tmp_path: Path
) -> None:
    model = checkpoint("deepseek_v3")
    address = f"127.0.0.1:{free_port()}"
    for what in ("compiled the model", "loaded the model from vLLM's compile cache"):
        ffn = experts(model, address=address)
        found = engine.run(
            model,
            MATRIX,
            afd=ffn.options(),
            engine={"distributed_executor_backend": "mp"},
            environment={"AFD_TEST_OPAQUE": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")},
            program=PROGRAM,
        )
        check_runs(found, reference("deepseek_v3"))
        assert re.search(f"AFD {what}: .* gate and top-k: {GATE_OPENED}", found["log"])
        # vLLM has ended, and so have the experts.
        ((code, log),) = ffn.ended()
        assert code == 0, log
        assert "0 attention ranks" in log


def test_two_ffn_ranks_and_what_happens_when_one_is_killed(
    engine: Any, checkpoint: Any, reference: Any, experts: Any
) -> None:
    model = checkpoint("deepseek_v3")
    running = engine.folder / "running"
    ffn = experts(model, 2, "--tp", "2")
    prompts, lengths = mixed_requests()
    endless = {
        "name": "endless",
        "split": "token",
        "prompts": prompts,
        "lengths": [200] * len(lengths),
        "running": str(running),
    }
    victim = ffn.processes[1]

    def kill_when_running() -> None:
        deadline = time.monotonic() + START_S
        while not running.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        victim.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_when_running, daemon=True)
    killer.start()
    found = engine.run(
        model,
        [*MATRIX, endless],
        afd=ffn.options(),
        engine={"tensor_parallel_size": 2},
        program=PROGRAM,
    )
    check_runs(found, reference("deepseek_v3"))
    failed = found["runs"]["endless"]
    assert "rank 3 (ffn 1) is gone" in failed["error"]
    assert failed["seconds"] < END_S
    # Every rank says the same.
    assert "rank 0 (attention 0): rank 3 (ffn 1) is gone" in found["log"]
    assert "rank 1 (attention 1): rank 3 (ffn 1) is gone" in found["log"]
    (code, log), (killed, _) = ffn.ended()
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "rank 3 (ffn 1) is gone" in log


def test_another_checkpoint_is_refused(checkpoint: Any, experts: Any) -> None:
    from afd_graph.connectors.torch_distributed import TorchDistributedConnector
    from afd_graph.connectors.torch_distributed_world import World, WorldConfig
    from afd_graph.hf import open_checkpoint
    from afd_graph.vllm.ranks import described_model

    ffn = experts(checkpoint("deepseek_v2"))

    def meet() -> None:
        """In the place of vLLM's worker."""
        world = World(WorldConfig(ffn_ranks=1, attention_ranks=1, rank=0, address=ffn.address))
        world.describe(described_model(open_checkpoint(checkpoint("deepseek_v3"))), "bfloat16")
        TorchDistributedConnector(world).open("token")

    with pytest.raises(AFDError, match=r"ranks disagree on model: .* dtype: 'bfloat16' on rank 0"):
        meet()
    ((code, log),) = ffn.ended()
    assert code == 1
    assert "ranks disagree on model" in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs an address"),
        ({"address": "127.0.0.1:1", "tp_size": 2}, "tp_size.* have no place inside vLLM"),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    from afd_graph.vllm.options import options_of

    section = {"connector": "torch_distributed", "connector_options": options}
    with pytest.raises(ConfigError, match=message):
        options_of(SimpleNamespace(additional_config={"afd": section}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("enable_expert_parallel", True),
    ],
)
def test_other_parallelism_is_refused(name: str, value: Any) -> None:
    from afd_graph.vllm.ranks import check_parallelism

    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        check_parallelism(SimpleNamespace(tensor_parallel_size=2, **{name: value}))


def test_experts_that_vllm_spreads_over_ranks_are_refused() -> None:
    from afd_graph.vllm.ranks import check_whole_experts

    parallel = SimpleNamespace(
        tensor_parallel_size=2, data_parallel_size=1, enable_expert_parallel=True
    )
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        check_whole_experts(parallel)
    parallel.tensor_parallel_size = 1  # one rank has all
    check_whole_experts(parallel)


def _graph(*calls: Any) -> Any:
    """A receive, and behind it calls of the form (target, other arguments)."""
    import torch
    from torch import fx

    import afd_graph.ops  # noqa: F401
    from afd_graph.passes.token_flow import RECEIVE

    graph = fx.Graph()
    rows = graph.placeholder("rows")
    value = received = graph.call_function(RECEIVE, (rows, rows, rows, 0, 0, "vllm"))
    for target, *others in calls:
        given = [rows if other == "rows" else other for other in others]
        if isinstance(target, str):
            value = graph.call_method(target, (value, *given))
        elif target is torch.ops._C.shm_allreduce:
            graph.call_function(target, (0, value))
        else:
            value = graph.call_function(target, (value, *given))
    graph.output(value)
    return graph, received


def test_a_sum_over_ranks_is_required() -> None:
    import operator

    import torch

    from afd_graph.errors import UnsupportedError
    from afd_graph.vllm.experts import load_kernels
    from afd_graph.vllm.shared_rows import check_sums

    load_kernels()
    whole = (torch.ops._C.shm_allreduce,)
    relu, scale, add = (torch.relu,), (operator.imul, 2.5), (operator.add, "rows")
    for calls in ([whole], [scale, add, whole, relu], [add, ("view", -1, 4), whole, ("relu",)]):
        check_sums(_graph(*calls)[0])
    for calls in ([], [add], [relu, whole], [add, relu, whole], [(operator.mul, "rows"), whole]):
        with pytest.raises(UnsupportedError, match="not summed over the tensor-parallel ranks"):
            check_sums(_graph(*calls)[0])


def test_packed_experts_are_those_of_vllm(checkpoint: Any) -> None:
    import torch

    from afd_graph.vllm.packing import pack_w2, pack_w13, padded_width

    assert padded_width("vec", 48) == 64
    plain = torch.randn(2, 96, 32)
    padded = plain.new_zeros(2, 128, 32)
    padded[:, :48], padded[:, 64:112] = plain[:, :48], plain[:, 48:]
    assert torch.equal(pack_w13(plain, "vec"), pack_w13(padded, "vec"))
    down = torch.nn.functional.pad(torch.randn(2, 32, 48), (0, 16))
    assert torch.equal(pack_w2(down[..., :48], "vec"), pack_w2(down, "vec"))
    with pytest.raises(ConfigError, match="not for 'abacus'"):
        padded_width("abacus", 48)


def test_a_rank_on_a_processor_without_the_kernel_of_vllm_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from afd_graph.vllm.packing import pack_w2

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ConfigError, match="for 'amx', which this processor does not have"):
        pack_w2(torch.zeros(2, 32, 32, dtype=torch.bfloat16), "amx")
