"""Small questions that several passes ask of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx


def input_node(node: fx.Node, position: int) -> fx.Node:
    """The argument at ``position``, which must be a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of {node.name} is {argument!r}"
    return argument


def input_list(node: fx.Node, position: int) -> list[Any]:
    """The argument at ``position``, which must be a list; its entries may be nodes."""
    argument = node.args[position]
    assert isinstance(argument, (list, tuple)), f"argument {position} of {node.name} is no list"
    return list(argument)


def ancestors(
    nodes: Iterable[fx.Node],
    within: set[fx.Node] | None = None,
    inputs_of: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """All nodes that ``nodes`` depend on, themselves included; not beyond ``within``."""
    return _closure(nodes, inputs_of, within)


def descendants(nodes: Iterable[fx.Node], within: set[fx.Node] | None = None) -> set[fx.Node]:
    """All nodes that depend on ``nodes``, themselves included; not beyond ``within``."""
    return _closure(nodes, lambda node: list(node.users), within)


def between(first: fx.Node, last: fx.Node) -> set[fx.Node]:
    """All nodes on a way from ``first`` to ``last``, both included.

    Looks at nothing in front of ``first``, so that asking this of every layer stays linear. Nodes
    compare by their place in the graph: ``sorted`` gives them in order.
    """
    behind = _closure([last], lambda n: [s for s in n.all_input_nodes if not s < first], None)
    return descendants([first], within=behind)


def _closure(nodes, neighbours, within):  # type: ignore[no-untyped-def]
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in found or (within is not None and node not in within):
            continue
        found.add(node)
        stack.extend(neighbours(node))
    return found


def root(node: fx.Node) -> fx.Node:
    """What a weight that is transposed or viewed before its use is made from."""
    while node.op == "call_function":
        node = input_node(node, 0)
    return node


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module that the node was traced in, if the graph still tells."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    entry = next(reversed(stack.values()))
    path = entry[0] if isinstance(entry, tuple) else str(entry)
    return clean_path(path)


def clean_path(path: str) -> str:
    """Turn ``L['self']._modules['model']._modules['norm']`` into ``model.norm``."""
    path = path.replace("L['self']", "").replace("self.", "", 1)
    for kind in ("_modules", "_parameters", "_buffers"):
        path = path.replace(f".{kind}['", ".").replace(f"{kind}['", ".")
    return path.replace("']", "").replace("['", ".").strip(".")


def source_line(node: fx.Node) -> str | None:
    """The user's source line that produced the node: ``file:line``."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return None
    pieces = lines[-1].split(", ")
    return pieces[0].removeprefix("File ").strip('"') + ":" + pieces[1].removeprefix("line ")
