"""vLLM's cache updates and attention with a stage argument.

``afd::stage_<name>(int stage, ...)`` is ``vllm::<name>(...)`` inside the forward context of that
stage (:mod:`stage_context`). The stage is an argument and no call of its own, because nothing would
hold such a call next to its attention. Layers are named by strings, also where vLLM passes objects.

One operator is registered for each of vLLM's that exists in this process, with its schema: same
arguments, same mutations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import has_side_effect

from afd_graph.vllm.operators import STAGED, operator_name
from afd_graph.vllm.stage_context import enter_stage

_PREFIX = "afd::stage_"
_library = torch.library.Library("afd", "FRAGMENT")


def register_stage_ops() -> list[str]:
    """Register what is missing; returns the names of all that exist, ``afd::stage_...``."""
    names = []
    for name in STAGED:
        namespace, short = name.split("::")
        if not hasattr(getattr(torch.ops, namespace), short):
            continue
        names.append(_PREFIX + short)
        if not hasattr(torch.ops.afd, f"stage_{short}"):
            _register(getattr(getattr(torch.ops, namespace), short).default, short)
    return names


def stage_op(original: OpOverload) -> OpOverload:
    """The operator with a stage argument that stands for ``original``."""
    short = original._schema.name.split("::")[1]
    if not hasattr(torch.ops.afd, f"stage_{short}"):
        _register(original, short)
    return getattr(torch.ops.afd, f"stage_{short}").default


def staged_layer(node: fx.Node) -> str | None:
    """Name of the layer that a call of a stage operator belongs to; None for other nodes."""
    name = operator_name(node)
    if name is None or not name.startswith(_PREFIX):
        return None
    target = node.target
    assert isinstance(target, OpOverload)
    position = [a.name for a in target._schema.arguments].index("layer_name")
    return str(node.args[position])


def _register(original: OpOverload, short: str) -> None:
    schema = str(original._schema)
    arguments = re.sub(r"\w+ layer_name", "str layer_name", schema[schema.index("(") + 1 :])
    signature = f"stage_{short}(int stage, {arguments}"
    _library.define(signature, tags=(torch.Tag.needs_fixed_stride_order,))
    position = [a.name for a in original._schema.arguments].index("layer_name")
    by_object = str(original._schema.arguments[position].type) != "str"
    _library.impl(
        f"stage_{short}",
        _kernel(original, position, by_object),
        "CompositeExplicitAutograd",
    )
    gives_tensor = bool(original._schema.returns)

    def fake(stage: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        # A cache update returns an empty tensor that only orders it; attention writes its output.
        return args[0].new_empty(0) if gives_tensor else None

    torch.library.register_fake(f"{_PREFIX}{short}", fake, lib=_library)
    packet = getattr(torch.ops.afd, f"stage_{short}")
    has_side_effect(packet.default)


def _kernel(original: OpOverload, position: int, by_object: bool) -> Callable[..., Any]:
    names: dict[str, Any] = {}

    def encoded(name: str) -> Any:
        if not by_object:
            return name
        if name not in names:
            from vllm.utils.torch_utils import LayerName

            names[name] = LayerName(name)
        return names[name]

    def kernel(stage: int, *args: Any, **kwargs: Any) -> Any:
        if "layer_name" in kwargs:
            kwargs["layer_name"] = encoded(kwargs["layer_name"])
        else:
            args = (*args[:position], encoded(args[position]), *args[position + 1 :])
        with enter_stage(stage):
            return original(*args, **kwargs)

    return kernel
