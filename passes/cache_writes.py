"""Let a program write to static caches in place instead of copying them in every layer.

AOTAutograd makes the graph functional: ``cache.index_copy_(...)`` becomes a new cache, which is
copied to the input at the end of the step. Run as it is, that reads and writes the whole cache
twice or more in every layer, for the sake of one token. Before, in one stage, in two stages one
behind the other along the tokens, and in two stages that have requests of their own::

    new = index_copy(cache, ...)                              copy_(cache, new)
    new = index_copy(index_copy(cache, ...), ...)             copy_(cache, new)
    new = cat([index_copy(cache[:cut], ...), index_copy(cache[cut:], ...)])

After: each ``index_copy`` is an ``index_copy_``, and nothing is copied. That is the same where

1. whatever reads a value of the cache stands before the next write to that memory: the program
   runs in the order of the graph, so the order is the proof;
2. pieces lie side by side from 0 on (the copy takes nothing but a value of the whole shape, so
   together they are the cache);
3. nothing else writes to the cache, and no view of it leaves the program; inputs that share memory
   with one that is written to are one input in AOTAutograd's graphs.

Any other cache stays functional. For lowerings that run the graph as it is; Inductor has a pass of
its own. A step that fails half-way has written the entries of its tokens, as with paged caches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SIZES = frozenset({aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default})
# May return their argument, and their schema does not say so.
_MAY_ALIAS = frozenset(
    {
        aten._unsafe_view.default,
        aten.contiguous.default,
        aten.flatten.using_ints,
        aten.reshape.default,
        aten.to.dtype,
        operator.getitem,
    }
)


def write_caches_in_place(graph: fx.Graph) -> int:
    """Rewrite ``graph``; returns the number of writes that are in place now."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    edits = 0
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        cache, value = copy.args[:2]
        chains = _chains(cache, value, copy)
        if not chains or not _is_proven(cache, chains, {copy, value}, order):
            continue
        graph.erase_node(copy)
        if value.target is aten.cat.default:
            graph.erase_node(value)
        for write in (write for chain in chains for write in chain):
            write.target = aten.index_copy_.default
            edits += 1
    return edits


def _chains(cache: fx.Node, value: Any, copy: fx.Node) -> list[list[fx.Node]]:
    """Writes one upon the other, for each piece that ``value`` is made of; none if it is not."""
    if cache.op != "placeholder" or copy.users or not isinstance(value, fx.Node):
        return []
    if value.target is not aten.cat.default:
        base, chain = _chain(value)
        return [chain] if chain and base is cache else []
    if set(value.users) != {copy}:
        return []
    pieces: Any = value.args[0]
    dim = value.args[1] if len(value.args) > 1 else 0
    chains: list[list[fx.Node]] = []
    end: Any = 0
    for piece in pieces:
        base, chain = _chain(piece)
        if not chain or base.target is not aten.slice.Tensor or base.args[:3] != (cache, dim, end):
            return []
        if len(base.args) != 4:
            return []
        end = base.args[3]
        chains.append(chain)
    return chains


def _chain(value: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What the first write is upon, and the writes that led to ``value``."""
    chain: list[fx.Node] = []
    base: Any = value
    while base.target is aten.index_copy.default:
        chain.insert(0, base)
        base = base.args[0]
    return base, chain


def _is_proven(
    cache: fx.Node, chains: list[list[fx.Node]], gone: set[fx.Node], order: dict[fx.Node, int]
) -> bool:
    writes = {write for chain in chains for write in chain}
    first = min(order[write] for write in writes)
    after = {cache: first}  # value -> the number of the write behind which it is another one
    for chain in chains:
        for write, following in zip(chain, [*chain[1:], None], strict=True):
            after[write] = len(order) if following is None else order[following]
    for value, limit in after.items():
        for reader in _readers(value, writes):
            if reader in writes:
                # Upon a base, which is its own; rows or places to write must be no part of it.
                if any(_shares(argument, after) for argument in reader.args[2:]):
                    return False
            elif reader in gone or reader.target in _SIZES or _is_view(reader):
                continue  # who reads a view comes as well
            elif reader.op == "output" or _is_mutable(reader) or order[reader] > limit:
                return False
    return True


def _readers(value: fx.Node, writes: set[fx.Node]) -> Iterator[fx.Node]:
    """Whatever uses ``value`` or a view of it, up to the next write."""
    waiting, seen = [value], {value}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if user not in writes and _may_alias(user):
                waiting.append(user)


def _shares(argument: Any, values: dict[fx.Node, int]) -> bool:
    """Whether ``argument`` is a value of the cache or a view of one."""
    while isinstance(argument, fx.Node):
        if argument in values:
            return True
        if not _may_alias(argument) or not argument.all_input_nodes:
            return False
        argument = argument.all_input_nodes[0]
    return False


def _may_alias(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _MAY_ALIAS or not isinstance(node.target, torch._ops.OpOverload):
        return True
    return _is_view(node)


def _is_view(node: fx.Node) -> bool:
    """Whether it reads nothing itself: its result is the memory of its argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or _is_mutable(node):
        return False
    return any(value.alias_info is not None for value in node.target._schema.returns)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
