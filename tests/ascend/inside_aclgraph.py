"""The code that torchair generates for captured graphs: events around all communication."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import loader
import pytest
import session
from captured_code import exchanges, faults

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.lowering.torchair import prepare

warnings.filterwarnings("ignore")
torchair = session.start()


@pytest.fixture(scope="module")
def code() -> str:
    loader.stand_in_torch_npu()
    gm = session.two_stages()
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    prepare(gm.graph, CamGroup(1, 1, 0, 64, group_name="g"), lambda layer: 8, "aclgraph")
    gm.recompile()
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.experimental_config.pattern_fusion_pass = False  # it needs all operators of torch_npu
    return session.Lowered(gm, inputs, None).compile_again(torchair, config).get_code()


def test_all_communication_has_its_events(code):
    assert exchanges(code) == ["afd_async_dispatch_send", "afd_async_combine_recv"] * 4
    assert faults(code) == []


def off_the_stream(code: str) -> str:
    first = code.index("    with torch.npu.stream(")
    return code[:first] + code[first:].replace("    with torch.npu.stream(", "    with other(", 1)


def no_wait(code: str) -> str:
    return re.sub(r"\n +event_\w+\.wait\(.*", "", code, count=1)


def no_record(code: str) -> str:
    return re.sub(r"\n +event_\w+\.record\(.*", "", code, count=1)


def memory_not_kept(code: str) -> str:
    return re.sub(r"\n.*record_tagged_stream\.default\(mm_default,.*", "", code, count=1)


def answer_not_awaited(code: str) -> str:
    return re.sub(r"\n    event_\w+\.wait\(.*", "", code)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (off_the_stream, "is not on stream afd_comm"),
        (no_wait, "does not wait for its rows"),
        (no_record, "does not wait for its rows"),
        (memory_not_kept, "the memory of mm_default may be used again"),
        (answer_not_awaited, "before it has arrived"),
    ],
)
def test_faults_are_found(code: str, change: Callable[[str], str], sentence: str):
    assert change(code) != code
    found = faults(change(code))
    assert any(sentence in fault for fault in found), found
