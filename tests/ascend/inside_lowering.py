"""Attention programs through torchair's GE compiler: the graphs that a device would get."""

from __future__ import annotations

import functools
import warnings

import pytest
import session
import torch
from ge_graph import GeGraph, faults
from transformers import StaticCache

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.errors import AFDError
from tiny_models import VOCABULARY, deepseek_v2

warnings.filterwarnings("ignore")
torchair = session.start()
LAYERS = 3


def model(experts: str, dtype: torch.dtype = torch.bfloat16):
    network = deepseek_v2(experts, num_hidden_layers=1 + LAYERS, first_k_dense_replace=1)
    network = network.to(dtype)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return network(input_ids=ids, use_cache=False).logits

    return run


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def graphs(programs: list[session.Lowered]) -> tuple[GeGraph, GeGraph]:
    unsplit, split = (GeGraph(program.ge()) for program in programs)
    return unsplit, split


@functools.cache
def programs(experts: str, dynamic: bool, operators: str) -> list[session.Lowered]:
    return session.lowered(
        torchair, model(experts), tokens(1, 12), dynamic=dynamic, operators=operators
    )


@pytest.mark.parametrize(
    ("experts", "dynamic", "operators"),
    [
        ("grouped_mm", False, "afd_ascend"),
        ("batched_mm", False, "umdk_cam_op_lib"),
        ("grouped_mm", True, "afd_ascend"),
    ],
)
def test_programs_lower_and_keep_the_rules(experts, dynamic, operators):
    unsplit, split = graphs(programs(experts, dynamic, operators))
    assert faults(unsplit) == []
    assert faults(split) == []
    assert len(unsplit.exchanges()) == LAYERS
    assert [(e.layer, e.stage) for e in split.exchanges()] == [
        (layer, stage) for layer in range(LAYERS) for stage in (0, 1)
    ]
    shapes = [list(op.output_desc[0].shape.dim) for op in split.ops.values() if op.type == "Data"]
    assert any(-1 in shape for shape in shapes) is dynamic


def test_a_static_cache_lowers():
    network = deepseek_v2(num_hidden_layers=2, first_k_dense_replace=1).bfloat16()
    cache = StaticCache(network.config, max_cache_len=16)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return network(input_ids=ids, past_key_values=cache, use_cache=True).logits

    with torch.no_grad():
        run(tokens(1, 1))  # makes the tensors of the cache
    unsplit, split = graphs(session.lowered(torchair, run, tokens(1, 8)))
    assert faults(unsplit) == []
    assert faults(split) == []
    assert unsplit.types()["ScatterElements"] == 2 * 2  # keys and values of both layers
    assert len(split.exchanges()) == 2


def test_dynamic_rows_are_padded_to_what_a_dispatch_holds():
    for graph in graphs(programs("grouped_mm", True, "afd_ascend")):
        for exchange in graph.exchanges():
            attributes = graph.ops[exchange.dispatch].attr
            assert attributes["batchSize"].i == session.MAX_TOKENS


def test_attributes_say_what_the_group_is():
    _, split = graphs(programs("grouped_mm", False, "afd_ascend"))
    first = split.ops[split.exchanges()[0].dispatch]
    attributes = {
        name: value.s.decode() if value.s else value.i
        for name, value in first.attr.items()
        if not name.startswith("_")
    }
    assert attributes.pop("hccl_group_name").startswith("emulated")
    assert attributes == {
        "magic": 0,
        "maxSeqLen": session.MAX_TOKENS,
        "batchSize": 6,
        "hiddenSize": 64,
        "topk": 2,
        "moeRankNum": 1,
        "attnRankNum": 1,
        "routeExpertNumPerMoe": 8,
        "attnRankId": 0,
        "worldSize": 2,
        "layerIndex": 0,
        "tpSize": 1,
        "dynamicQuant": 0,
    }


def test_every_rank_communicates_in_the_same_order():
    _, reference = graphs(programs("grouped_mm", False, "afd_ascend"))
    second = session.lowered(torchair, model("grouped_mm"), tokens(1, 12), rank=1, ranks=(2, 1, 2))
    _, other = graphs(second)
    assert other.order() == reference.order()
    phases = [phase for phase, _ in reference.order()]
    assert phases == ["dispatch_send", "combine_recv"] * 2 * LAYERS


@pytest.mark.parametrize("operators", ["afd_ascend", "umdk_cam_op_lib"])
def test_eager_run_of_the_lowered_graph_equals_the_model(operators):
    import cam_emulator

    network = model("grouped_mm", torch.float32)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    world = cam_emulator.World(1, 2, patience_s=300)  # of compilation too
    torch._dynamo.reset()
    with session.any_dtype():
        compiler = session.backend(
            world, operators=operators, lowering_options={"compiler_config": config}
        )
        served = session.served(compiler, width=64, top_k=2, experts=8, dtype=torch.float32)
        with compiler, served, torch.no_grad():
            ids = tokens(2, 11)
            compiled = torch.compile(network, backend=compiler, fullgraph=True)
            got, expected = compiled(ids), network(ids)
            assert compiler.report().steps_split == 1
    scale = expected.abs().max()
    assert (got - expected).abs().max() < 1e-5 * scale
    assert world.overwritten == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_summary_of_torchair_finds_nothing_unsupported(dynamic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in programs("grouped_mm", dynamic, "afd_ascend"):
        assert session.not_converted(torchair, program) == set()


def test_a_dtype_that_the_operators_lack_is_refused():
    with pytest.raises(Exception, match="load the model in bfloat16 or float16") as caught:
        session.lowered(torchair, model("grouped_mm", torch.float32), tokens(1, 12))
    assert isinstance(caught.value.__cause__ or caught.value, (AFDError, RuntimeError))


def test_more_rows_than_a_dispatch_holds_are_refused():
    with pytest.raises(Exception, match="raise max_tokens on all ranks"):
        session.lowered(torchair, model("grouped_mm"), tokens(2, session.MAX_TOKENS))


def test_another_connector_is_refused():
    from afd_graph import AFDBackend, AFDConfig

    torch._dynamo.reset()
    with AFDBackend(AFDConfig(lowering="torchair")) as compiler, torch.no_grad():
        compiled = torch.compile(model("grouped_mm"), backend=compiler, fullgraph=True)
        with pytest.raises(Exception, match="use connector='cam'"):
            compiled(tokens(1, 12))
    assert CamGroup(1, 1, 0, 8).world_size == 2
