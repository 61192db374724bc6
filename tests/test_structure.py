"""What the passes emit: order by credits, pure stages, keys, edits; checked on printed graphs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from filecheck.matcher import Matcher
from filecheck.options import Options
from harness import Captured, capture, compact, new_cache, transform
from torch import fx

from afd_graph import AFDConfig
from afd_graph.errors import PassError
from afd_graph.passes.verify import verify
from tiny_models import PlainModel, deepseek_v2, mixtral

afd = torch.ops.afd
DISPATCH, RECEIVE = afd.cam_dispatch.default, afd.cam_receive.default
ATTENTION = afd.attention.default

ONE_CREDIT = """
// A(0,0) D(0,0)  A(0,1) R(0,0) D(0,1)  A(1,0) R(0,1) D(1,0)  A(1,1) R(1,0) D(1,1)  R(1,1)
CHECK:      attention layer=0 stage=0 keys=0.0
CHECK-NEXT: dispatch layer=0 stage=0
CHECK-NEXT: attention layer=0 stage=1 keys=0.0,0.1
CHECK-NEXT: receive layer=0 stage=0
CHECK-NEXT: dispatch layer=0 stage=1
CHECK-NEXT: attention layer=1 stage=0 keys=1.0
CHECK-NEXT: receive layer=0 stage=1
CHECK-NEXT: dispatch layer=1 stage=0
CHECK-NEXT: attention layer=1 stage=1 keys=1.0,1.1
CHECK-NEXT: receive layer=1 stage=0
CHECK-NEXT: dispatch layer=1 stage=1
CHECK-NEXT: receive layer=1 stage=1
CHECK-NEXT: output
"""
TWO_CREDITS = """
// A(0,0) D(0,0)  A(0,1) D(0,1)  R(0,0) A(1,0) D(1,0)  R(0,1) A(1,1) D(1,1)  R(1,0) R(1,1)
CHECK:      attention layer=0 stage=0 keys=0.0
CHECK-NEXT: dispatch layer=0 stage=0
CHECK-NEXT: attention layer=0 stage=1 keys=0.0,0.1
CHECK-NEXT: dispatch layer=0 stage=1
CHECK-NEXT: receive layer=0 stage=0
CHECK-NEXT: attention layer=1 stage=0 keys=1.0
CHECK-NEXT: dispatch layer=1 stage=0
CHECK-NEXT: receive layer=0 stage=1
CHECK-NEXT: attention layer=1 stage=1 keys=1.0,1.1
CHECK-NEXT: dispatch layer=1 stage=1
CHECK-NEXT: receive layer=1 stage=0
CHECK-NEXT: receive layer=1 stage=1
CHECK-NEXT: output
"""
UNSPLIT = """
CHECK:      attention layer={0} stage=None keys={0}.None
CHECK-NEXT: dispatch layer=0 stage=0
CHECK-NEXT: receive layer=0 stage=0
CHECK-NEXT: attention layer={1} stage=None keys={1}.None
CHECK-NEXT: dispatch layer=1 stage=0
CHECK-NEXT: receive layer=1 stage=0
CHECK-NEXT: output
"""


def filecheck(text: str, checks: str, folder) -> bool:
    """Whether ``text`` meets the LLVM FileCheck lines ``checks``."""
    printed, expected = folder / "printed.txt", folder / "checks.txt"
    printed.write_text(text)
    expected.write_text(checks)
    options = Options(match_filename=str(expected), input_file=str(printed))
    return Matcher.from_opts(options).run() == 0


def v2_prompt() -> Captured:
    model = deepseek_v2(num_hidden_layers=3, first_k_dense_replace=1)
    return capture(model, input_ids=torch.arange(14).view(2, 7), use_cache=False)


def mixtral_filled(kind: str) -> Captured:
    model, ids = mixtral(), torch.arange(21).view(3, 7)
    cache = new_cache(kind, model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
    return capture(model, input_ids=ids, past_key_values=cache, use_cache=True)


GRAPHS = {
    "plain": lambda: capture(PlainModel(shared=24), torch.arange(14).view(2, 7)),
    "v2": v2_prompt,
    "mixtral dynamic": lambda: mixtral_filled("dynamic"),
    "mixtral static": lambda: mixtral_filled("static"),
}


def dense_layers(captured: Captured) -> int:
    """The tiny DeepSeek-V2 here has one in front."""
    return int(any("kv_a_proj" in name for name, _ in captured.weights.values()))


@pytest.fixture(scope="module", params=list(GRAPHS))
def captured(request):
    return GRAPHS[request.param]()


@pytest.mark.parametrize(("credits", "checks"), [(1, ONE_CREDIT), (2, TWO_CREDITS)])
def test_order_by_credits(captured, credits, checks, tmp_path):
    programs = transform(captured, credits=credits)
    assert filecheck(compact(programs.split.graph), checks, tmp_path)
    dense = dense_layers(captured)
    assert filecheck(compact(programs.unsplit.graph), UNSPLIT.format(dense, dense + 1), tmp_path)
    # The other order is not what was emitted, so the check can fail.
    other = ONE_CREDIT if credits == 2 else TWO_CREDITS
    assert not filecheck(compact(programs.split.graph), other, tmp_path)


def test_stages_are_pure(captured):
    """Nothing of stage 1 flows into stage 0; nothing whole lies between the experts of a stage."""
    programs = transform(captured)
    seen: dict[fx.Node, set[int]] = {}
    for node in programs.split.graph.nodes:
        stages = set().union(*(seen[n] for n in node.all_input_nodes))
        stage = node.meta.get("afd_stage")
        if stage == 0:
            assert stages <= {0}, node
        if stage is None and stages:
            # Put together again: only for the outputs, never to go back into a stage.
            assert not any(user.meta.get("afd_stage") is not None for user in node.users), node
        seen[node] = stages if stage is None else stages | {stage}
    for node in programs.split.graph.nodes:
        if node.target in (DISPATCH, RECEIVE, ATTENTION) and seen[node]:
            assert node.meta["afd_stage"] == max(seen[node])


def test_counts_after_every_pass(captured):
    """Fault 10: no pass loses a dispatch; each pass does what it says it did."""
    counts: dict[str, Counter] = {}

    def observe(name: str, before: fx.Graph, after: fx.Graph) -> None:
        counts[name] = Counter(node.target for node in after.nodes)
        counts[name]["nodes"] = len(after.nodes)
        counts[name]["change"] = len(after.nodes) - len(before.nodes)

    programs = transform(captured, observer=observe)
    layers = 2
    assert programs.edits["match"] == layers == len(programs.ffn)
    assert programs.edits["insert"] == 2 * layers
    assert programs.edits["split"] == counts["split"]["change"] > 0
    for name in ("normalize", "match"):
        assert counts[name][DISPATCH] == counts[name][RECEIVE] == 0
    for name in ("insert", "token_flow", "schedule_unsplit"):
        assert counts[name][DISPATCH] == counts[name][RECEIVE] == layers
    for name in ("split", "schedule"):
        assert counts[name][DISPATCH] == counts[name][RECEIVE] == 2 * layers
        assert counts[name][ATTENTION] >= 2 * layers
    assert counts["schedule"]["change"] == 0
    # The experts' own work has left the attention side.
    products = {torch.ops.aten.bmm.default, torch.ops.transformers.grouped_mm_fallback.default}
    before = sum(counts["match"][target] for target in products)
    assert before - sum(counts["insert"][target] for target in products) == 2 * layers


def test_attention_before_the_first_experts_is_not_split(captured):
    """A dense layer in front runs once, on the whole batch."""
    graph = transform(captured).split.graph
    once = [n for n in graph.nodes if n.target is ATTENTION and "afd_stage" not in n.meta]
    assert len(once) == dense_layers(captured)


def test_a_static_cache_is_written_by_stage_0_then_by_stage_1():
    """What goes back into the cache: stage 1's rows over stage 0's rows over what was there."""
    graph = transform(mixtral_filled("static")).split.graph
    write = torch.ops.aten.index_copy.default
    back = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]
    back = [n for n in back if n.args[1].target is write]
    assert len(back) == 4  # keys and values of two layers
    for node in back:
        second = node.args[1]
        first = second.args[0]
        assert (first.target, first.meta["afd_stage"]) == (write, 0)
        assert second.meta["afd_stage"] == 1
        assert first.args[0] is node.args[0]


class Broken:
    """Damages that the verifier must name."""

    @staticmethod
    def swap_stage(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.target is RECEIVE)
        arguments = list(node.args)
        arguments[4] = 1 - arguments[4]
        node.args = tuple(arguments)

    @staticmethod
    def drop_receive(graph: fx.Graph) -> None:
        node = [n for n in graph.nodes if n.target is RECEIVE][-1]
        node.replace_all_uses_with(node.args[1])
        graph.erase_node(node)


def _below(node: fx.Node) -> set[fx.Node]:
    found, stack = set(), list(node.users)
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            stack += current.users
    return found


@pytest.fixture(scope="module")
def plain():
    return GRAPHS["plain"]()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Broken.swap_stage, r"after a test: dispatch .* is received as"),
        (Broken.drop_receive, r"a dispatch has \d users, not one receive"),
    ],
)
def test_verifier_names_the_damage(plain, damage, message):
    graph = transform(plain).split.graph
    verify(graph, after="a test", credits=2)
    damage(graph)
    with pytest.raises(PassError, match=message) as error:
        verify(graph, after="a test", credits=2)
    assert error.value.node


def test_verifier_counts_credits(plain):
    graph = transform(plain, credits=2).split.graph
    with pytest.raises(PassError, match="2 un-received dispatches, 1 allowed"):
        verify(graph, after="schedule", credits=1)


def test_verifier_sees_a_later_stage(plain):
    graph = transform(plain).split.graph
    first = next(n for n in graph.nodes if n.target is RECEIVE and n.args[4] == 0)
    node = next(n for n in graph.nodes if n in _below(first) and n.meta.get("afd_stage") == 0)
    node.meta["afd_stage"] = 1
    with pytest.raises(PassError, match="stage 0 depends on a later stage"):
        verify(graph, after="a test")


def test_split_none_and_no_layers_leave_one_stage(plain):
    programs = transform(plain, AFDConfig(split="none"))
    assert programs.split is None
    assert programs.unsplit_reason == "disabled"


@pytest.mark.parametrize("name", ["normalize", "verify"])
def test_a_disabled_pass_is_left_out(plain, name):
    whole, without = transform(plain), transform(plain, AFDConfig(disabled_passes=(name,)))
    assert name in whole.pass_seconds
    assert name not in without.pass_seconds
    assert compact(without.split.graph) == compact(whole.split.graph)
