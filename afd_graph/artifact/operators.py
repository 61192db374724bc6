"""The operators that an artifact may call: tensor arithmetic, and nothing that touches the machine.

PyTorch has operators that read and write files, start servers or print. Opening an artifact must
not be a way to call them, so names are looked up here and not in all of ``torch.ops``. A model
with operators of its own says so, in the process that compiles and in the one that loads::

    afd_graph.artifact.allow_operators("mylib.rowwise.default")
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

import afd_graph.checks  # noqa: F401  (registers operators)
from afd_graph._compat import OpOverload
from afd_graph.errors import UnsupportedError
from afd_graph.exact_ops import EXACT
from afd_graph.stored_graph import (
    SerializeError,
    find_operator,
    graph_from_dict,
    operator_name,
)

_ATEN_NAMES = """
    _log_softmax _softmax _to_copy _unsafe_view abs add addmm alias all amax amin any arange argmax
    argmin argsort baddbmm bitwise_and bitwise_not bitwise_or bitwise_xor bmm cat ceil clamp clone
    contiguous copy cos cumsum detach diagonal div embedding empty_like eq erf exp expand fill flip
    floor full full_like gather ge gelu gt histc index index_add index_copy index_put index_select
    isinf isnan le lift_fresh_copy linear log log1p logical_and logical_not logical_or lt
    masked_fill masked_scatter matmul max maximum mean min minimum mm mul native_layer_norm ne neg
    new_empty new_full new_ones new_zeros nonzero ones ones_like permute polar pow prod reciprocal
    relu remainder repeat repeat_interleave reshape roll round rsqrt rsub scalar_tensor scatter
    scatter_add select select_scatter sgn sigmoid sign silu sin slice slice_scatter softplus sort
    split split_with_sizes sqrt squeeze stack sub sum sym_size t tan tanh topk transpose tril triu
    true_divide unbind unfold unsqueeze var view view_as_complex view_as_real where zeros zeros_like
"""
_AFD = frozenset(
    ["attention", "cam_dispatch", "cam_receive", "check_masked", "check_zero", "grouped_mm"]
    + [exact._schema.name.removeprefix("afd::") for exact in EXACT.values()]
)
_NAMESPACES = {"aten": frozenset(_ATEN_NAMES.split()), "afd": _AFD}
_PYTHON_NAMES = """
    operator.getitem operator.add operator.sub operator.floordiv operator.mod operator.neg
    operator.eq operator.ne operator.lt operator.le operator.gt operator.ge operator.and_
    operator.or_ operator.not_ torch.sym_max torch.sym_min torch.sym_not
"""
_PYTHON = frozenset(_PYTHON_NAMES.split())
_allowed: set[str] = set()
_MAX_SIZE = 2**63


def size_product(a: Any, b: Any) -> Any:
    """``a * b`` of two sizes; a graph that multiplies without end is stopped here."""
    product = operator.mul(a, b)
    if isinstance(product, int) and abs(product) >= _MAX_SIZE:
        raise OverflowError(f"a size of the graph is beyond {_MAX_SIZE}")
    return product


def allow_operators(*names: str) -> None:
    """Let artifacts call further operators, each as ``namespace.name.overload``.

    Raises:
        UnsupportedError: an operator is not registered in this process.
    """
    for name in names:
        if find_operator(name) is None:
            raise UnsupportedError(
                f"the operator {name!r} is not known here",
                remedy="import the module that registers it first",
            )
        _allowed.add(name)


def find_allowed(name: str) -> Callable[..., Any] | None:
    """The operator ``name`` if an artifact may call it, else None."""
    if name == "operator.mul":
        return size_product
    return find_operator(name) if _is_allowed(name) else None


def graph_of(stored: Any) -> fx.Graph:
    """Build a stored graph; every call in it is allowed, and has arguments that the operator takes.

    Raises:
        SerializeError: says which is not.
    """
    graph = graph_from_dict(stored, find_allowed)
    for node in graph.nodes:
        if node.op == "call_function" and not _can_be_called(node.target, node.args, node.kwargs):
            raise SerializeError(f"the arguments are none that {node.target} takes", node=node.name)
    return graph


def check_allowed(graph: fx.Graph) -> None:
    """Refuse to store a graph that could not be loaded again.

    Raises:
        UnsupportedError: names the operator and its node.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            name = operator_name(node)
        except SerializeError as error:
            raise UnsupportedError(error.what, node=node.name, remedy=error.remedy) from error
        if name != "operator.mul" and not _is_allowed(name):
            raise UnsupportedError(
                f"an artifact may not call {name}",
                node=node.name,
                remedy=f"if it only computes tensors, call allow_operators({name!r}) where the "
                "artifact is compiled and where it is loaded",
            )


def _is_allowed(name: str) -> bool:
    if name in _PYTHON or name in _allowed:
        return True
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    # Variants with out= and in-place ones (a trailing underscore is another packet) stay outside.
    return packet in _NAMESPACES.get(namespace, ()) and "out" not in overload.split("_")


def _can_be_called(target: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an operator takes so many arguments by position, and these by name."""
    count = len(args)
    if isinstance(target, OpOverload):
        arguments = target._schema.arguments
        by_position = [a.name for a in arguments if not a.kwarg_only]
        missing = [
            a.name
            for i, a in enumerate(arguments)
            if not (i < count and not a.kwarg_only) and not a.has_default_value()
        ]
        allowed = {a.name for a in arguments} - set(by_position[:count])
        return count <= len(by_position) and set(missing) <= set(named) <= allowed
    try:
        inspect.signature(target).bind(*args, **named)
    except TypeError:
        return False
    return True
