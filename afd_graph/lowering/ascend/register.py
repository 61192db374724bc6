"""Make the operators of a package known to PyTorch: schema and fake kernel where they lack."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from afd_graph import _compat
from afd_graph.lowering.ascend.ir_table import Operator, Package

_libraries: dict[str, torch.library.Library] = {}


@cache
def register(package: Package) -> None:
    """Define what no binary package has registered; what is there stays."""
    for operator in package.operators:
        namespace, name = operator.name.split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        if not _compat.is_defined(operator.name):
            _libraries[namespace].define(f"{name}({operator.arguments}) -> {operator.returns}")
        if not _compat.has_kernel(operator.name, "Meta"):
            torch.library.register_fake(
                operator.name, _fake(operator), lib=_libraries[namespace], allow_override=True
            )
        torch.fx.node.has_side_effect(operator.overload)


def _fake(operator: Operator) -> Any:
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        given = {a.name: a.default_value for a in operator.overload._schema.arguments}
        given.update(zip(operator.argument_names, arguments, strict=False))
        return operator.shapes(**{**given, **keywords})

    return kernel


def missing_kernel(package: Package, device: torch.device) -> str | None:
    """The first operator of ``package`` that cannot run on ``device``, or None."""
    key = {"cpu": "CPU", "npu": "PrivateUse1"}.get(device.type, device.type.upper())
    for operator in package.operators:
        if not (_compat.is_defined(operator.name) and _compat.has_kernel(operator.name, key)):
            return operator.name
    return None
