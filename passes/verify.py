"""Check the invariants of the emitted graph; runs after every pass.

1. the graph is well formed and topologically ordered;
2. every dispatch has exactly one receive, of the same layer, stage and channel, on its own handle;
3. on every prefix of the order no more dispatches are un-received than there are credits, and
   they are received in the order of their dispatch;
4. a node of a stage never depends on a later one;
5. two calls that write one KV cache are ordered by data, and read the metadata of their stage.
"""

from __future__ import annotations

from torch import fx

from afd_graph.errors import PassError
from afd_graph.paged_attention import PAGED_OPERATORS, earlier_call
from afd_graph.passes.graph_tools import source_line
from afd_graph.passes.token_flow import DISPATCH, RECEIVE


def verify(graph: fx.Graph, *, after: str, credits: int | None = None) -> None:
    """Raise :class:`PassError` naming the pass ``after`` which an invariant does not hold.

    Args:
        graph: the graph.
        after: name of the pass that ran.
        credits: checked against the order when given, that is once the graph is scheduled.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise PassError(f"after {after}: {error}") from error
    _pairs(graph, after)
    _purity(graph, after)
    _cache_order(graph, after)
    if credits is not None:
        _credits(graph, after, credits)


def _fail(after: str, node: fx.Node, what: str) -> PassError:
    return PassError(f"after {after}: {what}", node=node.name, source=source_line(node))


def _pairs(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if node.target is DISPATCH:
            receives = [user for user in node.users if user.target is RECEIVE]
            if len(receives) != 1 or len(node.users) != 1:
                raise _fail(after, node, f"a dispatch has {len(node.users)} users, not one receive")
            if node.args[-3:] != receives[0].args[-3:]:
                raise _fail(
                    after,
                    node,
                    f"dispatch {node.args[-3:]} is received as {receives[0].args[-3:]}",
                )
        elif node.target is RECEIVE:
            handle = node.args[0]
            if not isinstance(handle, fx.Node) or handle.target is not DISPATCH:
                raise _fail(after, node, "a receive does not take the handle of a dispatch")


def _purity(graph: fx.Graph, after: str) -> None:
    latest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        stage = node.meta.get("afd_stage")
        seen = [latest[n] for n in node.all_input_nodes if n in latest]
        if stage is not None:
            if any(other > stage for other in seen):
                raise _fail(after, node, f"stage {stage} depends on a later stage")
            seen.append(stage)
        if seen:
            latest[node] = max(seen)


def _cache_order(graph: fx.Graph, after: str) -> None:
    written: dict[object, fx.Node] = {}
    for node in graph.nodes:
        operator = PAGED_OPERATORS.get(node.target)
        if operator is None:
            continue
        cache = node.args[operator.cache]
        before, last = earlier_call(node), written.get(cache)
        while last is not None and before is not last:
            if before is None:
                raise _fail(after, node, f"writes {cache} in no order with {last.name}")
            before = earlier_call(before)
        written[cache] = node
        for position, field in operator.metadata.items():
            value = node.args[position]
            of_stage = value.meta.get("afd_stage") if isinstance(value, fx.Node) else None
            if of_stage is not None and of_stage != node.meta.get("afd_stage"):
                raise _fail(after, node, f"reads the {field} of stage {of_stage}")


def _credits(graph: fx.Graph, after: str, credits: int) -> None:
    outstanding: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is DISPATCH:
            outstanding.append(node)
            if len(outstanding) > credits:
                raise _fail(
                    after, node, f"{len(outstanding)} un-received dispatches, {credits} allowed"
                )
        elif node.target is RECEIVE and outstanding.pop(0) is not node.args[0]:
            raise _fail(after, node, "answers are received out of order")
    if outstanding:
        raise _fail(after, outstanding[0], "a dispatch is never received")
