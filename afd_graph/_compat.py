"""Everything private of PyTorch that this package relies on, and nothing else.

Tested against the PyTorch version that ``pyproject.toml`` pins.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload as OpOverload

TESTED_TORCH = "2.13"
"""The PyTorch that all of this was tested with, as ``pyproject.toml`` pins it."""


def has_fast_mm(dtype: torch.dtype) -> bool:
    """Whether ``mm`` on this CPU has a kernel of its own for ``dtype``."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def processor() -> str:
    """What PyTorch, and those who ask it, choose kernels for this CPU by."""
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"


def allow_amx() -> None:
    """Let this process use AMX, if the CPU has it: Linux kills one that has not asked."""
    torch.cpu._init_amx()


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    compiler: Callable[..., Any],
    decompositions: dict[Any, Any] | None = None,
) -> Callable[..., Any]:
    """Run AOTAutograd for inference and hand the functional ATen graph to ``compiler``.

    Input mutations (static caches) stay in the graph as ``copy_`` nodes.
    """
    from torch._dynamo.backends.common import aot_autograd

    compile_graph = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    # PyTorch's cache holds what its own compiler makes; aot_compile insists on it.
    uncached = {"strict_autograd_cache": False, "bundled_autograd_cache": False}
    with torch._functorch.config.patch({**uncached, "force_autograd_cache": False}):
        return compile_graph(gm, example_inputs)


def serializable_callable() -> Any:
    """The class of what ``aot_compile`` can save."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    return SerializableCallable


def is_saving() -> bool:
    """Whether the graph that is compiled now is wanted by ``aot_compile``, which may save it."""
    return bool(torch._functorch.config.bundled_autograd_cache)


def functional_graph(
    gm: fx.GraphModule, inputs: list[Any], decompositions: dict[Any, Any] | None = None
) -> fx.GraphModule:
    """The functional ATen graph that AOTAutograd makes of ``gm``; ``inputs`` are fake."""
    found: list[fx.GraphModule] = []

    def keep(aten: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(aten)
        return boxed(lambda flat: aten(*flat))

    aot_compile(gm, inputs, keep, decompositions)
    (functional,) = found
    return functional


def export_inputs(exported: Any) -> Iterator[tuple[str, str | None]]:
    """Kind (``weight``, ``constant``, ``input``) and name of each input of an exported graph."""
    from torch.export.graph_signature import InputKind

    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            yield "input", None
        elif spec.kind is InputKind.PARAMETER or (
            spec.kind is InputKind.BUFFER and spec.persistent
        ):
            yield "weight", spec.target
        else:
            yield "constant", spec.target


def export_outputs(exported: Any) -> Any:
    """How the outputs of an exported program are nested, with their numbers in place of them."""
    from torch.utils._pytree import tree_unflatten

    spec = exported.call_spec.out_spec
    return tree_unflatten(range(spec.num_leaves), spec)


def floor_division(expr: Any) -> tuple[Any, Any] | None:
    """Dividend and divisor of a symbolic floor division; None for any other expression."""
    from torch.utils._sympy.functions import FloorDiv

    return (expr.args[0], expr.args[1]) if isinstance(expr, FloorDiv) else None


def size_operator(expr: Any) -> str | None:
    """What :mod:`afd_graph.size_expressions` calls the operator of a symbolic expression."""
    from torch.utils._sympy import functions

    return {
        sympy.Add: "add",
        sympy.Mul: "mul",
        sympy.Min: "min",
        sympy.Max: "max",
        functions.Min: "min",
        functions.Max: "max",
        functions.FloorDiv: "floordiv",
        functions.CleanDiv: "floordiv",
        functions.Mod: "mod",
        functions.PythonMod: "mod",
        sympy.Eq: "eq",
        sympy.Ne: "ne",
        sympy.Lt: "lt",
        sympy.Le: "le",
        sympy.Gt: "gt",
        sympy.Ge: "ge",
        sympy.And: "and",
        sympy.Or: "or",
    }.get(type(expr))


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes its inputs as one list."""

    def call(inputs: list[Any]) -> Any:
        return function(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


auto_functionalized = torch.ops.higher_order.auto_functionalized_v2
"""What AOTAutograd makes of an operator that mutates its inputs."""


def mutated_view(node: fx.Node, argument: str) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """How :data:`auto_functionalized` makes a mutated argument from its base.

    Returns:
        The operator and its arguments behind the base; None when the argument is the base.
    """
    from torch._higher_order_ops import auto_functionalize as functional

    kwargs: dict[str, Any] = dict(node.kwargs)
    types: list[Any] = [torch.TensorType.get()]
    found = functional.read_view_information_from_args(
        [argument], types, kwargs, kwargs["_all_bases"]
    )[argument]
    if isinstance(found, functional.AsStridedViewInfo):
        place = (tuple(found.size), tuple(found.stride), found.storage_offset)
        return torch.ops.aten.as_strided.default, place
    if isinstance(found, functional.SliceViewInfo):
        return torch.ops.aten.slice.Tensor, (found.dim, found.start, found.end)
    return None


def input_source(node: fx.Node) -> str | None:
    """Where Dynamo took a graph input from, such as ``L['self']._modules['model']...``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def real_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors are computed with, even while AOTAutograd traces with fakes."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def new_fake_mode() -> Any:
    """A mode for tensors without values, with symbolic sizes; takes real tensors as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def as_fake(mode: Any, values: Any) -> Any:
    """Nested real tensors as fake ones of ``mode``, of the same sizes."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), values)


def is_fake(value: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) or value.device.type == "meta"


def flat_input(value: Any) -> list[Any]:
    """What AOTAutograd makes of one input: the parts of a tensor subclass, in its order."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in flat_input(getattr(value, name))]


def is_sharded(value: Any) -> bool:
    """Whether a tensor is distributed and not whole on every rank."""
    placements = getattr(value, "placements", ())
    return any(not placement.is_replicate() for placement in placements)


def process_group(name: str) -> tuple[int, int]:
    """Size of a process group and this process's rank in it."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    group = _resolve_process_group(GroupName(name))
    return group.size(), group.rank()


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode of the graph's metadata."""
    from torch._dynamo.utils import detect_fake_mode

    inputs = graph.find_nodes(op="placeholder")
    for node in inputs:
        # Dynamo's own graphs: their values belong to another mode than the one that is active.
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            return mode
    values = [node.meta.get("val") for node in inputs]
    return detect_fake_mode([v for v in values if v is not None])


def learn_equal_sizes(graph: fx.Graph) -> int:
    """Let symbolic shapes use what their guards imply: ``a == b`` from ``a + s == b + s``.

    The caches of all layers hold equally many tokens, but each has a symbol of its own. That they
    are combined is guarded; PyTorch keeps such guards and goes on with two symbols.

    Returns:
        How many pairs of graph inputs' sizes became one symbol.
    """
    mode = fake_mode_of(graph)
    env = None if mode is None else mode.shape_env
    if env is None:
        return 0
    known: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        known.update(size.node.expr for size in sizes if isinstance(size, torch.SymInt))
    learnt = 0
    for guard in list(env.guards):
        pair = _implied_equality(env, env.replace(guard.expr))
        if pair is not None and known.issuperset(pair):
            env._set_replacement(pair[1], pair[0], "equal by a guard on a sum")
            learnt += 1
    return learnt


def _implied_equality(env: Any, condition: Any) -> tuple[Any, Any] | None:
    """The two symbols that a condition makes equal, if that is what it says."""

    possible = [
        option
        for option in sympy.Or.make_args(condition)
        if env._maybe_evaluate_static(option) is not sympy.false
    ]
    if len(possible) != 1 or not isinstance(possible[0], sympy.Eq):
        return None
    difference = sympy.expand(possible[0].lhs - possible[0].rhs)
    symbols = sorted(difference.free_symbols, key=str)
    if len(symbols) != 2:
        return None
    a, b = symbols
    return (a, b) if difference in (a - b, b - a) else None


def assumed(graph: fx.Graph, symbols: set[Any]) -> Iterator[sympy.Basic]:
    """What tracing assumed: the least value of each of ``symbols``, and the guards."""
    mode = fake_mode_of(graph)
    env = None if mode is None else mode.shape_env
    if env is None:
        return
    for symbol in sorted(symbols, key=str):
        bounds = env.var_to_range.get(symbol)
        if bounds is not None and bounds.lower.is_Integer and bounds.lower > 0:
            yield sympy.Ge(symbol, bounds.lower, evaluate=False)
        if bounds is not None and bounds.upper.is_Integer and bounds.upper < 2**40:
            yield sympy.Le(symbol, bounds.upper, evaluate=False)
    seen = set()
    for guard in env.guards:
        condition = env.replace(guard.expr)
        if condition is not sympy.true and condition not in seen:
            seen.add(condition)
            yield condition


def new_size_symbol(graph: fx.Graph, name: str, hint: int) -> torch.SymInt:
    """A fresh symbolic size that takes the value of an extra graph input."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    mode = fake_mode_of(graph)
    env = mode.shape_env if mode is not None and mode.shape_env is not None else ShapeEnv()
    source = ConstantSource(f"{name}_{len(env.source_to_var)}")
    symbol = env.create_symbol(
        hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for all steps of the graph; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def size_hint(size: int | torch.SymInt) -> int:
    """The value that a symbolic size had when the graph was captured."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


@contextmanager
def guards_on(sizes: Sequence[torch.SymInt]) -> Iterator[list[sympy.Expr]]:
    """Collect the guards that code inside puts on ``sizes``.

    They are symbols of :func:`new_size_symbol`, which the captured graph's own guards cannot
    check: whoever compiles code that depends on them has to.
    """
    env = sizes[0].node.shape_env
    own = {size.node.expr for size in sizes}
    before = len(env.guards)
    found: list[sympy.Expr] = []
    yield found
    added = env.guards[before:]
    found += [guard.expr for guard in added if own & guard.expr.free_symbols]
    env.guards[before:] = [guard for guard in added if not own & guard.expr.free_symbols]


def resized(value: torch.Tensor, size: torch.SymInt) -> torch.Tensor:
    """A fake tensor like ``value`` with another first dimension, without guards on either."""
    with size.node.shape_env.suppress_guards():
        return value.new_empty((size, *value.shape[1:]))


def trace_graph(name: str, gm: fx.GraphModule) -> None:
    """Write a graph to ``TORCH_TRACE`` (tlparse) when that is on."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "graph_dump",
        metadata_fn=lambda: {"name": name},
        payload_fn=lambda: gm.print_readable(
            print_output=False, include_stride=True, include_device=True
        ),
    )


def backend_of(compiled: Any) -> Any:
    """The backend that ``torch.compile`` was given, from what it returned; None if unknown."""
    context = getattr(compiled, "dynamo_ctx", None)
    current = getattr(context, "callback", None)
    while current is not None:
        inner = getattr(current, "_torchdynamo_orig_backend", None) or getattr(
            current, "compiler_fn", None
        )
        if inner is None:
            return current
        current = inner
    return None


def inductor_compile(gm: fx.GraphModule, inputs: list[Any], mode: Any) -> Callable[..., Any]:
    """Decompose ``gm`` for Inductor and compile it; ``inputs`` are fake, the result is boxed."""
    import torch._inductor.config as inductor
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.no_grad():
        traced = make_fx(gm, decomposition_table=select_decomp_table(), tracing_mode="real")(
            *inputs
        )
    # AOTAutograd's own context takes the strides of one graph; we compile two variants of it.
    # Inductor (2.13) may put the reader of a buffer before the operator that writes it in place.
    with tracing(TracingContext(mode)), inductor.patch(reorder_for_peak_memory=False):
        return compile_fx_inner(traced, inputs)


def is_defined(operator: str) -> bool:
    """Whether ``namespace::name`` has a schema."""
    return bool(torch._C._dispatch_has_kernel(operator))


def has_kernel(operator: str, key: str) -> bool:
    """Whether ``namespace::name`` has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


def static_inputs() -> set[int]:
    """Positions of parameters and buffers among the inputs of the graph that is compiled now."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return set() if metadata is None else set(metadata.static_input_indices or ())


def default_store() -> Any:
    """The store that the ranks of the default process group met at."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def default_group() -> Any:
    """The default process group."""
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def propagate_example_values(gm: fx.GraphModule) -> None:
    """Compute ``meta["example_value"]`` of every node of a Dynamo graph from that of its inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    mode = fake_mode_of(gm.graph)

    class Propagate(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.op == "placeholder":
                return n.meta["example_value"]
            with mode:
                result = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = result
            return result

    # What is learnt about sizes that only our program has is no guard of the captured one.
    with mode.shape_env.suppress_guards():
        Propagate(gm).run(*[None] * len(inputs))


def pickled_graph(gm: fx.GraphModule) -> bytes:
    """Store a graph of any level, for a cache of the same PyTorch version only."""
    from torch.fx._graph_pickler import GraphPickler, Options

    with _slices_as_trees():
        return GraphPickler.dumps(gm, Options(ops_filter=None))


def unpickled_graph(data: bytes) -> fx.GraphModule:
    """Read what :func:`pickled_graph` stored; only from a cache that is trusted."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with _slices_as_trees():
        gm = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(gm, fx.GraphModule)
    gm.recompile()
    return gm


@contextmanager
def _slices_as_trees() -> Iterator[None]:
    """The graph pickler looks for nodes inside arguments, but not inside slices."""
    from torch.utils import _pytree as pytree

    pytree._private_register_pytree_node(
        slice, lambda x: ([x.start, x.stop, x.step], None), lambda x, _: slice(*x)
    )
    try:
        yield
    finally:
        pytree._deregister_pytree_node(slice)


@contextmanager
def cache_tag(tag: str) -> Iterator[None]:
    """Put ``tag`` into the keys of all of PyTorch's compile caches, behind the user's own."""
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}"):
        yield
