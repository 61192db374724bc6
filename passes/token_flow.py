"""Infer which dimension of every value is the token axis, from one seed.

Before: the unsplit AFD graph (after :mod:`insert`). After: unchanged; the answer is a
:class:`TokenFlow` that says, for every node that depends on the seed, how it is laid out and how
its inputs must be sliced, and for every other node nothing: it is computed once.

1. choose the seed: the hidden state that enters the first MoE layer (:func:`choose_seed`);
2. walk the graph; a node with a staged input is staged by the rule of its operator
   (:mod:`flow_rules`); two operators are special:

   * *attention* mixes tokens, causally: stage 1 sees the keys of stage 0 (over paged caches:
     :mod:`paged_flow`);
   * *append* (``cat`` or ``index_copy`` along the token axis into a cache) starts a key axis with
     three parts: what was cached, stage 0, stage 1. Row-wise work on it is done part by part, so
     that nothing is computed twice, and the parts are joined where attention needs them;

3. behind the last MoE layer a node is staged only while it is cheap and has a rule; from the
   first matrix product on, everything is computed once, on restored values.

A value that mixes tokens without a rule before that point is a refusal by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

import afd_graph.attention
import afd_graph.ops  # noqa: F401  (both register operators)
from afd_graph.errors import UnsupportedError
from afd_graph.paged_attention import PAGED_OPERATORS, paged_operator
from afd_graph.passes.causality import CheckedMask, Offset, Verdict, affine, prove_causal
from afd_graph.passes.flow_rules import (
    FlowContext,
    Outcome,
    Refusal,
    argument,
    dimension,
    is_tensor,
    rule_for,
    tensor,
)
from afd_graph.passes.graph_tools import ancestors, descendants, input_list, input_node, source_line
from afd_graph.passes.paged_flow import paged_outcome
from afd_graph.passes.sizes import Size, shape_of
from afd_graph.passes.token_layout import Axis, Layout, TokenDim
from afd_graph.planner import NoSplitReason

aten = torch.ops.aten
afd = torch.ops.afd

ATTENTION = afd.attention.default
DISPATCH = afd.cam_dispatch.default
RECEIVE = afd.cam_receive.default

MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.matmul.default,
        aten.convolution.default,
        ATTENTION,
        *PAGED_OPERATORS,
    }
)


class NoTokenAxis(UnsupportedError):
    """There is nothing to cut: the step has one token, or one request.

    Attributes:
        reason: the planner's word for it.
    """

    reason = ""


@dataclass(frozen=True)
class Append:
    """``cat([base, part])`` or ``index_copy(base, dim, index, part)`` along the token axis.

    Attributes:
        axis: the key axis it starts.
        part: the staged rows of this step.
        base: what was cached before (several pieces for ``cat``).
        dim: dimension of the token axis.
        index: where ``index_copy`` writes; None for ``cat``.
        base_size: tokens cached before, along ``dim``.
    """

    axis: Axis
    part: fx.Node
    base: tuple[fx.Node, ...]
    dim: int
    index: fx.Node | None
    base_size: Size


@dataclass
class TokenFlow:
    """The answer: see the module docstring.

    Attributes:
        mode: ``sequence`` (the cut goes through every sequence), ``batch`` (between them),
            ``paged`` (anywhere in a step of many requests) or ``rows`` (there is no attention).
        axis: the token axis that is cut.
        seed: the value that is sliced first.
        seed_dim: its token dimension.
        outcomes: how each staged node is computed.
        layouts: layout of each staged node.
        appends: the staged nodes that append to a cache.
        windows: slices of an updated cache that hold just this step's tokens, and their source.
        attentions: the staged attention nodes.
        equal_inputs: scalar inputs that must be equal when a step runs.
        checked_masks: input masks that must be causal when a step runs.
        metadata: graph inputs with the metadata of paged attention, by field.
    """

    mode: str
    axis: Axis
    seed: fx.Node
    seed_dim: int
    outcomes: dict[fx.Node, Outcome] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout | tuple[Layout, ...]] = field(default_factory=dict)
    appends: dict[fx.Node, Append] = field(default_factory=dict)
    windows: dict[fx.Node, fx.Node] = field(default_factory=dict)
    attentions: list[fx.Node] = field(default_factory=list)
    equal_inputs: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    checked_masks: list[CheckedMask] = field(default_factory=list)
    metadata: dict[str, fx.Node] = field(default_factory=dict)

    def staged(self, node: fx.Node) -> bool:
        """Whether the node has a copy per stage."""
        return node in self.layouts


def choose_seed(graph: fx.Graph, parameters: Collection[fx.Node] = ()) -> fx.Node:
    """The value whose slicing starts the stages: the hidden state entering the first MoE layer.

    It is the last value that the query, key and value of the layer's attention all come from
    while the fewest other values bypass it, which in a residual network is the residual stream.
    """
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    first = next(node for node in nodes if node.target is DISPATCH)
    hidden = input_node(first, 0)
    above = ancestors([hidden])
    attentions = [
        node
        for node in nodes
        if (node.target is ATTENTION or paged_operator(node)) and node in above
    ]
    given = [n for n in nodes if n.op == "placeholder" and n not in parameters and is_tensor(n)]
    of_data = descendants(given)
    # Backwards, because the last attention may be one to something else than the tokens.
    for before, attention in reversed(list(zip([None, *attentions], attentions, strict=False))):
        begin = -1 if before is None else order[before]
        window = set(nodes[begin + 1 : order[hidden] + 1])
        sources = [ancestors([n]) for n in attention.args[:3] if isinstance(n, fx.Node)]
        common = set.intersection(*sources, of_data)
        candidates = [
            node
            for node in nodes[begin + 1 : order[attention]]
            if node in common
            and node.op == "call_function"
            and is_tensor(node)
            and node.meta["val"].is_floating_point()
            and node.meta["val"].dim() >= 2
        ]
        if candidates:
            return min(candidates, key=lambda node: (_bypasses(node, window), -order[node]))
    return hidden


def _bypasses(node: fx.Node, window: set[fx.Node]) -> int:
    """Tensors that ``node`` was computed from and that are used again behind it."""
    below = {node}
    for later in node.graph.nodes:
        if later in window and any(n in below for n in later.all_input_nodes):
            below.add(later)
    above = ancestors([node])
    used = {n for later in below - {node} for n in later.all_input_nodes if n in above}
    return sum(is_tensor(n) for n in used - {node})


def infer_token_flow(
    graph: fx.Graph,
    *,
    mode: str,
    assume_causal: bool = False,
    parameters: Collection[fx.Node] = (),
) -> TokenFlow:
    """Infer the flow for a cut along sequences (``sequence``) or between them (``batch``).

    Args:
        graph: the unsplit AFD graph.
        mode: which cut is wanted.
        assume_causal: take masks as causal that are not proven to be.
        parameters: graph inputs that are weights, not data of the step.

    Raises:
        UnsupportedError: a value mixes tokens, or attention is not causal; names the node, the
            layer, the user's source line and what to do.
    """
    seed = choose_seed(graph, parameters)
    shape = shape_of(tensor(seed))
    reasons: list[UnsupportedError] = []
    for dim in range(len(shape) - 1):
        if shape[dim].is_one:
            continue
        walk = _Walk(graph, seed, dim, assume_causal)
        try:
            flow = walk.run()
        except UnsupportedError as error:
            # A dimension that no attention takes for tokens explains nothing to the user.
            if walk.mode in (None, mode, "paged") and walk.plausible:
                reasons.append(error)
            continue
        if flow.mode in (mode, "paged", "rows"):
            return flow
    if reasons:
        raise reasons[0]
    nothing = NoTokenAxis(
        f"no {mode} dimension of {seed.name} {list(tensor(seed).shape)} reaches the experts",
        node=seed.name,
        source=source_line(seed),
        remedy="use the other split policy, or give more than one token and one request",
    )
    nothing.reason = str(
        NoSplitReason.SINGLE_REQUEST if mode == "batch" else NoSplitReason.SINGLE_TOKEN
    )
    raise nothing


class _Walk:
    def __init__(self, graph: fx.Graph, seed: fx.Node, dim: int, assume_causal: bool) -> None:
        self.graph = graph
        self.axis = Axis(shape_of(tensor(seed))[dim])
        self.flow = TokenFlow("rows", self.axis, seed, dim)
        self.flow.layouts[seed] = {dim: TokenDim(self.axis)}
        self.ctx = FlowContext(self.flow.layouts)
        self.assume_causal = assume_causal
        self.mode: str | None = None
        self.plausible = True
        self._key_axes: dict[object, Axis] = {}
        self._verdicts: dict[object, Verdict] = {}
        self._layer = 0

    def run(self) -> TokenFlow:
        needed = ancestors(node for node in self.graph.nodes if node.target is DISPATCH)
        flow = self.flow
        whole: set[fx.Node] = set()  # computed once, from restored values
        for node in self.graph.nodes:
            if node.op != "call_function" or node is flow.seed:
                continue
            if any(n in whole for n in node.all_input_nodes):
                whole.add(node)
                continue
            if not any(flow.staged(n) for n in node.all_input_nodes):
                continue
            behind = node not in needed and node.target is not RECEIVE
            if behind and (node.target in MATRIX_PRODUCTS or self._reads_keys(node)):
                whole.add(node)
                continue
            try:
                outcome = self._outcome(node)
            except Refusal as refusal:
                if behind:
                    whole.add(node)
                    continue
                raise self._unsupported(node, str(refusal)) from None
            if behind and self._folds(node, outcome):
                # Joining the stages before the token axis is folded into another is one cat.
                whole.add(node)
                continue
            flow.outcomes[node] = outcome
            flow.layouts[node] = outcome.layout
            if node.target is DISPATCH:
                self._layer += 1
        flow.mode = self.mode or "rows"
        return flow

    def _folds(self, node: fx.Node, outcome: Outcome) -> bool:
        def plain(layout: Layout | tuple[Layout, ...]) -> bool:
            layouts = layout if isinstance(layout, tuple) else (layout,)
            return all(entry.plain for one in layouts for entry in one.values())

        sources = [self.flow.layouts[n] for n in node.all_input_nodes if n in self.flow.layouts]
        return not plain(outcome.layout) and all(plain(layout) for layout in sources)

    def _reads_keys(self, node: fx.Node) -> bool:
        return any(
            entry.axis.appended_to is not None
            for n in node.all_input_nodes
            if isinstance(layout := self.flow.layouts.get(n), dict)
            for entry in layout.values()
        )

    def _outcome(self, node: fx.Node) -> Outcome:
        if node.target is ATTENTION:
            return self._attention(node)
        paged = paged_operator(node)
        if paged is not None:
            self.mode = "paged"
            return paged_outcome(self.ctx, node, paged, self.flow.metadata)
        append = self._append(node)
        if append is not None:
            self.flow.appends[node] = append
            return Outcome({append.dim: TokenDim(append.axis)})
        if any(n in self.flow.windows for n in node.all_input_nodes):
            raise Refusal("works on a part of the cache that only attention may use")
        window = self._window(node)
        if window is not None:
            return window
        rule = rule_for(node.target)
        if rule is None:
            raise Refusal("mixes or may mix tokens: the operator has no rule")
        outcome = rule(self.ctx, node)
        if node.target is DISPATCH:
            self._check_dispatch(node)
        return outcome

    def _check_dispatch(self, node: fx.Node) -> None:
        hidden = node.args[0]
        layout = self.ctx.layout(hidden)
        if 0 not in layout:
            self.plausible = False
            raise Refusal("the rows of the experts do not lie along this dimension")

    def _append(self, node: fx.Node) -> Append | None:
        """Recognise ``cat``/``index_copy`` that extends a cache along the token axis."""
        if node.target is aten.cat.default:
            pieces = input_list(node, 0)
            dim = dimension(argument(node, 1, "dim", 0), tensor(node).dim())
            *base, part = pieces
            layout = self.ctx.layout(part)
            if dim not in layout or not layout[dim].plain or len(layout) != 1:
                return None
            if not base or any(self.flow.staged(piece) for piece in base):
                return None
            base_size = shape_of(tensor(node))[dim]
            if len(base) == 1:
                base_size = shape_of(tensor(base[0]))[dim]
            axis = self._key_axis(node, dim, ("cat", shape_of(tensor(node))[dim], base_size))
            return Append(axis, part, tuple(base), dim, None, base_size)
        if node.target is aten.index_copy.default:
            base_node, along, index, part = node.args
            assert isinstance(base_node, fx.Node)
            assert isinstance(part, fx.Node)
            assert isinstance(index, fx.Node)
            dim = dimension(along, tensor(node).dim())
            layout = self.ctx.layout(part)
            if dim not in layout or not layout[dim].plain or len(layout) != 1:
                return None
            if self.flow.staged(base_node) or self.flow.staged(index):
                return None
            size = shape_of(tensor(node))[dim]
            axis = self._key_axis(node, dim, ("index_copy", size, index))
            return Append(axis, part, (base_node,), dim, index, size)
        return None

    def _window(self, node: fx.Node) -> Outcome | None:
        """Recognise ``cache[:, :, :tokens]`` of an updated cache: the first prompt.

        Query ``i`` of the step sees the first ``i + 1`` entries of the cache. Stage 1 writes
        behind those of stage 0, so stage 0 reads nothing of it wherever the update begins.
        """
        if node.target is not aten.slice.Tensor:
            return None
        source, along, start = node.args[:3]
        assert isinstance(source, fx.Node)
        dim = dimension(along, tensor(node).dim())
        entry = self.ctx.layout(source).get(dim)
        if entry is None or entry.axis.appended_to is None or not entry.plain or start != 0:
            return None
        append = self.flow.appends[entry.axis.appended_to]
        if append.index is None or shape_of(tensor(node))[dim] != self.axis.extent:
            return None
        self.flow.windows[node] = source
        return Outcome({dim: TokenDim(Axis(self.axis.extent, appended_to=node))})

    def _key_axis(self, node: fx.Node, dim: int, key: object) -> Axis:
        """Caches that grow alike share an axis, so that their values may be combined."""
        if key not in self._key_axes:
            self._key_axes[key] = Axis(shape_of(tensor(node))[dim], appended_to=node)
        return self._key_axes[key]

    def _attention(self, node: fx.Node) -> Outcome:
        query, key, value, mask, causal = node.args[:5]
        assert isinstance(query, fx.Node)
        layout = self.ctx.layout(query)
        if len(layout) != 1 or not all(entry.plain for entry in layout.values()):
            self.plausible = False
            raise Refusal("the query does not carry one plain token axis")
        (dim, entry), *_ = layout.items()
        if entry.axis.appended_to is not None:
            raise Refusal("the query holds more tokens than those that are cut")
        self.mode = {0: "batch", 2: "sequence"}.get(dim)
        if self.mode is None:
            self.plausible = False
            raise Refusal(f"the query carries this axis in dimension {dim}, which is not tokens")
        self.flow.attentions.append(node)
        if self.mode == "batch":
            return self._batch_attention(node, entry)
        inputs: dict[fx.Node, Layout] = {}
        offset: Offset | None = None
        for operand in (key, value):
            assert isinstance(operand, fx.Node)
            of_keys = self.ctx.layout(operand)
            if not of_keys:
                continue
            if set(of_keys) != {2} or not of_keys[2].plain:
                raise Refusal("keys and values do not carry the tokens in dimension 2")
            offset = self._offset(of_keys[2].axis)
        if offset is not None and not causal:
            if not isinstance(mask, fx.Node):
                raise Refusal("attention is not causal: it has no mask")
            self._check_mask(node, mask, offset)
        return Outcome(layout, inputs)

    def _batch_attention(self, node: fx.Node, entry: TokenDim) -> Outcome:
        inputs: dict[fx.Node, Layout] = {}
        for operand in node.args[:4]:
            if not is_tensor(operand):
                continue
            assert isinstance(operand, fx.Node)
            have = dict(self.ctx.layout(operand))
            need: dict[int, TokenDim] = {}
            value = tensor(operand)
            if value.dim() == 4 and not shape_of(value)[0].is_one:
                need = {0: entry}
            if have and have != need:
                raise Refusal(f"{operand.name} does not carry the requests in dimension 0")
            inputs[operand] = need
        return Outcome({0: entry}, inputs)

    def _offset(self, axis: Axis) -> Offset:
        """Keys that lie before the first query of the step."""
        if axis.appended_to is None or axis.appended_to in self.flow.windows:
            return Offset.of_size(Size(0))
        append = self.flow.appends[axis.appended_to]
        if append.index is None:
            return Offset.of_size(append.base_size)
        position = affine(append.index)
        if position is None or position.dim != -1:
            raise Refusal("the cache is written at positions that cannot be read from the graph")
        return Offset(position.constant, position.terms)

    def _check_mask(self, node: fx.Node, mask: fx.Node, offset: Offset) -> None:
        if self.flow.staged(mask):
            raise Refusal("the attention mask is computed from the hidden state")
        if tensor(mask).dim() != 4 or shape_of(tensor(mask))[2].is_one:
            verdict = Verdict(False, "the mask does not depend on the query")
        else:
            key = (mask, offset)
            verdict = self._verdicts.get(key) or prove_causal(mask, offset)
            self._verdicts[key] = verdict
        if not verdict.causal and not self.assume_causal:
            raise Refusal(f"attention is not known to be causal: {verdict.reason}")
        self.flow.equal_inputs += [
            pair for pair in verdict.equal_inputs if pair not in self.flow.equal_inputs
        ]
        if not self.assume_causal:
            self.flow.checked_masks += [
                mask for mask in verdict.checked if mask not in self.flow.checked_masks
            ]

    def _unsupported(self, node: fx.Node, reason: str) -> UnsupportedError:
        remedy = (
            "pass assume_causal=True if it is causal, or use split='request'"
            if "causal" in reason
            else "add a rule with afd_graph.passes.flow_rules.flow_rule, or set "
            "on_unsupported='fallback' to run unsplit"
        )
        return UnsupportedError(
            f"{node.target} cannot be split by tokens: {reason}",
            node=node.name,
            layer=self._layer,
            source=source_line(node),
            remedy=remedy,
        )
