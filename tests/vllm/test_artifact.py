"""What a stored model says about who made it; without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from afd_graph.connectors.torch_distributed import TorchDistributedConnector
from afd_graph.errors import AFDError, UnsupportedError
from afd_graph.vllm import artifact, cache_entry, options, runner_hook
from afd_graph.vllm.programs import ExpertSource, Programs
from afd_graph.vllm.served import FFNSide


def _config(**afd: Any) -> Any:
    return SimpleNamespace(
        additional_config={"afd": afd},
        compute_hash=lambda: "of vLLM",
        compile_debug_dump_path=lambda: None,
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
        compilation_config=SimpleNamespace(local_cache_dir=None),
    )


def _programs() -> Programs:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.narrow, (x, 0, 0, 2)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return Programs(gm, None, [ExpertSource("layers.1", (1, 2, None, None), "silu", "vec", 2)])


def test_round_trip() -> None:
    made_by = artifact.identity(_config())
    loaded = artifact.load_programs(artifact.dump_programs(_programs(), made_by), made_by)
    assert loaded.experts == _programs().experts
    (out,) = loaded.unsplit.forward(torch.arange(4))
    assert out.tolist() == [0, 1]


@pytest.mark.parametrize(
    "what",
    [
        *("afd-graph", "source", "torch", "vllm", "options", "format"),
        *("configuration", "rank", "processor"),
    ],
)
def test_any_difference_is_refused_by_name(what: str) -> None:
    made_by = artifact.identity(_config())
    stored = artifact.dump_programs(_programs(), {**made_by, what: "other"})
    with pytest.raises(AFDError, match=f"{what} was other, is"):
        artifact.load_programs(stored, made_by)


def test_options_are_part_of_the_identity() -> None:
    assert artifact.identity(_config(split="request")) != artifact.identity(_config())
    threads = {"connector_options": {"threads": 2}}
    assert artifact.identity(_config(**threads)) != artifact.identity(_config())


def test_cpus_that_a_start_gets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = artifact.identity(_config())
    monkeypatch.setattr(options, "_cpus", {10_000, 10_001})
    assert options.options_of(_config()).config.connector_options["cpus"] == [10_000, 10_001]
    assert artifact.identity(_config()) == before


@pytest.mark.parametrize("at", [10, 200, -20])
def test_a_changed_byte_is_refused(at: int) -> None:
    made_by = artifact.identity(_config())
    data = bytearray(artifact.dump_programs(_programs(), made_by))
    data[at] ^= 0x10
    with pytest.raises(AFDError):
        artifact.load_programs(bytes(data), made_by)


def test_a_truncated_model_is_refused() -> None:
    made_by = artifact.identity(_config())
    data = artifact.dump_programs(_programs(), made_by)
    for length in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(AFDError, match="damaged"):
            artifact.load_programs(data[:length], made_by)


def test_an_entry_is_sealed_and_checked(tmp_path: Path) -> None:
    config = _config()
    assert cache_entry.entry_path(config) is None
    config.compilation_config.local_cache_dir = str(tmp_path)
    entry = cache_entry.entry_path(config)
    assert entry == tmp_path / "rank_0_0" / "model"
    cache_entry.seal(entry, b"ours")  # nothing was stored: nothing happens
    entry.parent.mkdir()
    entry.write_bytes(b"theirs, ours, theirs")
    with pytest.raises(AFDError, match="no checksum"):
        cache_entry.check(entry)
    cache_entry.seal(entry, b"of another process")
    with pytest.raises(AFDError, match="no checksum"):
        cache_entry.check(entry)
    cache_entry.seal(entry, b"ours")
    cache_entry.check(entry)
    entry.write_bytes(b"theirs, ours, Theirs")
    with pytest.raises(AFDError, match="damaged"):
        cache_entry.check(entry)
    with pytest.raises(AFDError, match="does not say"):
        cache_entry.check(None)


def test_what_vllm_refuses_after_loading_has_not_met_the_ffn_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM looks at the model's source after that, and would meet it again to compile again."""
    config, met = _config(), []
    monkeypatch.setattr(artifact.StoredModel, "opening", staticmethod(lambda: config))
    monkeypatch.setattr(runner_hook, "install", lambda vllm_config: None)
    monkeypatch.setattr(artifact, "FFNSide", lambda *_: met.append("FFN side"))
    monkeypatch.setattr(artifact, "ServedModel", lambda *_: SimpleNamespace(run=lambda x: x))
    stored = artifact.dump_programs(_programs(), artifact.identity(config))
    loaded = artifact.CompiledModel.deserialize_compile_artifacts(stored)
    loaded.finalize_loading(config)
    assert not met
    assert [loaded(1), loaded(2)] == [1, 2]
    assert met == ["FFN side"]


def test_ffn_ranks_are_told_why_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []

    class Ranks(TorchDistributedConnector):
        def __init__(self) -> None:
            """Meets nobody."""

        def stop(self, why: str) -> None:
            happened.append(why)

    def side(*_: Any) -> FFNSide:
        made = FFNSide.__new__(FFNSide)
        made.connector = Ranks()
        made.channel = SimpleNamespace(credits=2, close=lambda: happened.append("closed"))
        return made

    def fails(*_: Any) -> Programs:
        raise UnsupportedError("layer 2 is odd")

    monkeypatch.setattr(artifact, "FFNSide", side)
    monkeypatch.setattr(artifact, "build_programs", fails)
    monkeypatch.setattr(runner_hook, "install", lambda vllm_config: None)
    with pytest.raises(UnsupportedError):
        artifact.CompiledModel.compile(fx.GraphModule({}, fx.Graph()), _config())
    assert happened == ["the model was not compiled: layer 2 is odd", "closed"]
