"""The serving form through torchair: paged caches, fused attention, stages planned on the host."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import cam_emulator
import npu_emulator
import pytest
import session
import torch
from ge_graph import GeGraph, faults
from paged_model import EXPERTS, HIDDEN, TOP_K, Batch, PagedModel

warnings.filterwarnings("ignore")
torchair = session.start()
MOE_LAYERS = 3
BATCH = Batch([(6, 1), (0, 10), (9, 1), (13, 4)], block_size=3, pad_tokens=4, pad_requests=4)


def model(dtype: torch.dtype = torch.bfloat16) -> PagedModel:
    return PagedModel(MOE_LAYERS).to(dtype)


@functools.cache
def programs(dynamic: bool) -> list[session.Lowered]:
    network = model()
    return session.lowered(
        torchair, network, *BATCH.arguments(BATCH.caches(network)), dynamic=dynamic
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_programs_lower_and_keep_the_rules(dynamic):
    unsplit, split = (GeGraph(program.ge()) for program in programs(dynamic))
    assert faults(unsplit) == []
    assert faults(split) == []
    assert [(e.layer, e.stage) for e in split.exchanges()] == [
        (layer, stage) for layer in range(MOE_LAYERS) for stage in (0, 1)
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_summary_of_torchair_finds_nothing_unsupported(dynamic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in programs(dynamic):
        assert session.not_converted(torchair, program) == set()


@pytest.mark.newest
def test_eager_run_of_the_lowered_graph_equals_the_model():
    npu_emulator.install()
    network = model(torch.float32)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    world = cam_emulator.World(1, 2, patience_s=300)  # of compilation too
    torch._dynamo.reset()
    with session.any_dtype():
        compiler = session.backend(world, lowering_options={"compiler_config": config})
        served = session.served(
            compiler, width=HIDDEN, top_k=TOP_K, experts=EXPERTS, dtype=torch.float32
        )
        with compiler, served, torch.no_grad():
            compiled = torch.compile(network, backend=compiler, fullgraph=True, dynamic=True)
            for batch in (BATCH, Batch([(3, 5), (0, 2)], block_size=3, pad_tokens=2)):
                theirs = batch.caches(network)
                ours = [cache.clone() for cache in theirs]
                expected, _ = network(*batch.arguments(theirs))
                with compiler.step_metadata(batch.metadata()):
                    got, _ = compiled(*batch.arguments(ours))
                real = slice(batch.tokens)
                assert (got[real] - expected[real]).abs().max() < 1e-5 * expected.abs().max()
                for mine, other in zip(ours, theirs, strict=True):
                    assert (mine - other).abs().max() < 1e-5
            assert compiler.report().steps_split == 2
    assert world.overwritten == 0


def _broken(change: Callable[[GeGraph], None]) -> list[str]:
    good = programs(True)[1].ge()
    proto = type(good)()
    proto.CopyFrom(good)
    change(GeGraph(proto))
    return faults(GeGraph(proto))


def _typed(graph: GeGraph, kind: str) -> list[Any]:
    return [op for op in graph.proto.op if op.type == kind]


def writes_a_copy(graph: GeGraph) -> None:
    write = _typed(graph, "ScatterNdUpdate")[0]
    move = graph.proto.op.add(name="copy", type="TensorMove")
    move.input.append(write.input[0])
    write.input[0] = "copy:0"


def reads_unwritten(graph: GeGraph) -> None:
    write, fused = _typed(graph, "ScatterNdUpdate")[0], _typed(graph, "FusedInferAttentionScore")[0]
    fused.input[1] = write.input[0]


def writes_too_early(graph: GeGraph) -> None:
    second = _typed(graph, "ScatterNdUpdate")[2]
    kept = [edge for edge in second.input if not edge.endswith(":-1")]
    assert len(kept) < len(second.input)
    del second.input[:]
    second.input.extend(kept)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (writes_a_copy, "writes into a copy of the cache: TensorMove"),
        (reads_unwritten, "may read its cache before it is written"),
        (writes_too_early, "may overwrite what"),
    ],
)
def test_faults_are_found(change, sentence):
    found = _broken(change)
    assert any(sentence in fault for fault in found), found


def test_attention_takes_the_lengths_from_the_device():
    _, split = (GeGraph(program.ge()) for program in programs(True))
    for op in _typed(split, "FusedInferAttentionScore"):
        assert op.attr["block_size"].i == BATCH.block_size
        assert op.attr["sparse_mode"].i == 3
        inputs = dict(zip((desc.name for desc in op.input_desc), op.input, strict=False))
        for name in ("actual_seq_lengths", "actual_seq_lengths_kv", "block_table"):
            assert any(
                split.ops[source].type == "Data"
                for source in split.before(inputs[name].split(":")[0])
            )


def lowered_with(caches: Callable[[list[torch.Tensor]], Any], **changes: Any) -> None:
    network = model()
    arguments = BATCH.arguments(caches(BATCH.caches(network)))
    session.lowered(torchair, network, *arguments, dynamic=True, **changes)


def test_a_cache_that_is_a_part_of_another_tensor_is_refused():
    with pytest.raises(Exception, match="pass one cache tensor per layer"):
        lowered_with(torch.stack)


def test_a_cache_of_another_dtype_is_refused():
    with pytest.raises(Exception, match="use caches of the dtype of the model"):
        lowered_with(lambda caches: [cache.half() for cache in caches])


def test_a_captured_graph_is_refused():
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with pytest.raises(Exception, match="a captured graph fixes the lengths of the requests"):
        lowered_with(list, lowering_options={"compiler_config": config})
