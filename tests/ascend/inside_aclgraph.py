"""The code that torchair generates for captured graphs: events around all communication."""

from __future__ import annotations

import re
import warnings

import loader
import pytest
import session

from afd_graph.connectors.cam_group import CamGroup
from afd_graph.lowering.torchair import prepare

warnings.filterwarnings("ignore")
torchair = session.start()
STREAM = "with torch.npu.stream(_GLOBAL_USER_TAG_TO_STREAM['afd_comm']):"


@pytest.fixture(scope="module")
def code() -> list[str]:
    loader.stand_in_torch_npu()
    gm = session.two_stages()
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    prepare(gm.graph, CamGroup(1, 1, 0, 64, group_name="g"), lambda layer: 8, "aclgraph")
    gm.recompile()
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.experimental_config.pattern_fusion_pass = False  # it needs all operators of torch_npu
    compiled = session.Lowered(gm, inputs, None).compile_again(torchair, config)
    text = compiled.get_code()
    forward = text[text.index("def forward(") :]
    return [line for line in forward.splitlines() if line.strip()]


def _regions(code: list[str]) -> list[tuple[int, list[str]]]:
    """The lines inside each switch of streams, and where it begins."""
    found = []
    for i, line in enumerate(code):
        if line.strip() == STREAM:
            depth = len(line) - len(line.lstrip())
            inside = []
            for below in code[i + 1 :]:
                if len(below) - len(below.lstrip()) <= depth:
                    break
                inside.append(below.strip())
            found.append((i, inside))
    return found


def test_each_communication_waits_for_its_rows(code):
    regions = _regions(code)
    assert len(regions) == 8
    for start, inside in regions:
        waits = [m[1] for line in inside if (m := re.match(r"(event_\w+)\.wait\(", line))]
        operators = [i for i, line in enumerate(inside) if "torch.ops.afd_ascend." in line]
        assert len(operators) == 1
        assert len(waits) == 1
        position = next(i for i, line in enumerate(inside) if line.startswith(waits[0]))
        assert position < operators[0]
        recorded = [
            i for i, line in enumerate(code) if line.strip().startswith(waits[0] + ".record")
        ]
        assert recorded
        assert recorded[0] < start


def test_who_reads_an_answer_waits_for_it(code):
    readers = 0
    for start, inside in _regions(code):
        answer = next(line for line in inside if "torch.ops.afd_ascend." in line)
        if "combine_recv" not in answer:
            continue
        name = answer.split(" = ")[0]
        event = [m[1] for line in inside if (m := re.match(r"(event_\w+)\.record\(", line))][-1]
        behind = code[start + len(inside) + 1 :]
        read = next(i for i, line in enumerate(behind) if re.search(rf"[(\[ ]{name}[,)\]]", line))
        waited = [i for i, line in enumerate(behind) if line.strip().startswith(f"{event}.wait(")]
        assert waited
        assert waited[0] < read
        readers += 1
    assert readers == 4


def test_rows_stay_while_the_other_stream_reads_them(code):
    for _, inside in _regions(code):
        operator = next(line for line in inside if "torch.ops.afd_ascend." in line)
        arguments = operator[operator.index("default(") + 8 :].split(", ")
        tensors = {name for name in arguments if re.match(r"[a-z_]\w*$", name)}
        tensors = {name for name in tensors if not name.startswith("full_default")}
        assert len(tensors) == 2
        kept = " ".join(line for line in inside if "record_tagged_stream" in line)
        assert all(f"({name}," in kept for name in tensors)
