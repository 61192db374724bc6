"""How a paged attention belongs to the token flow: its rows are staged, its metadata is replaced.

The operator knows of the step only what its metadata arguments say. They describe all requests of
the step, so no rule can slice them as they are: they must be inputs of the graph, and the
two-stage program takes an input of its own in their place for every stage
(:mod:`split_paged`), which the host fills from the step's metadata.
"""

from __future__ import annotations

from torch import fx

from afd_graph.paged_attention import PagedOperator, earlier_call
from afd_graph.passes.flow_rules import FlowContext, Outcome, Refusal


def paged_outcome(
    ctx: FlowContext, node: fx.Node, operator: PagedOperator, metadata: dict[str, fx.Node]
) -> Outcome:
    """The outcome of a paged attention.

    Args:
        ctx: layouts so far.
        node: the attention.
        operator: what its arguments mean.
        metadata: graph input of each metadata field, added to.

    Raises:
        Refusal: the rows do not share one token axis, the metadata is not a graph input or is not
            that of the other layers, or another call writes the same cache.
    """
    layout = ctx.layout(node.args[operator.tokens[0]])
    if set(layout) != {0} or not layout[0].plain:
        raise Refusal("the query does not carry one plain token axis in dimension 0")
    for position in operator.tokens:
        if dict(ctx.layout(node.args[position])) != dict(layout):
            raise Refusal(f"{node.args[position]} does not carry the tokens of the query")
    if earlier_call(node) is not None:
        raise Refusal(f"writes a KV cache that {earlier_call(node)} writes too")
    for position, field in operator.metadata.items():
        value = node.args[position]
        if not isinstance(value, fx.Node) or value.op != "placeholder":
            raise Refusal(f"its {field}, {value}, is not an input of the graph")
        if metadata.setdefault(field, value) is not value:
            raise Refusal(
                f"its {field}, {value}, is not that of the layers before, {metadata[field]}"
            )
    if any(ctx.layout(n) for n in node.all_input_nodes if n not in _rows(node, operator)):
        raise Refusal("its cache or a weight depends on the tokens")
    return Outcome(layout)


def _rows(node: fx.Node, operator: PagedOperator) -> set[object]:
    return {node.args[position] for position in operator.tokens}
