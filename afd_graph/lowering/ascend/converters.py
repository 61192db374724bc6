"""torchair converters: how the operators of the table become nodes of a GE graph."""

from __future__ import annotations

from functools import cache
from typing import Any

from afd_graph.lowering.ascend.ir_table import Operator, Package
from afd_graph.lowering.ascend.register import register


@cache
def register_converters(package: Package) -> None:
    """Teach torchair, which must be importable, the four operators of ``package``."""
    import torchair

    register(package)
    for operator in package.operators:
        torchair.register_fx_node_ge_converter(operator.overload)(_converter(operator))


def _converter(operator: Operator) -> Any:
    from torchair import ge

    def attribute(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return ge.attr.ListInt(list(value))
        return ge.attr.Str(value) if isinstance(value, str) else ge.attr.Int(int(value))

    def convert(*arguments: Any, meta_outputs: Any = None, **keywords: Any) -> Any:
        given = {a.name: a.default_value for a in operator.overload._schema.arguments}
        given.update(zip(operator.argument_names, arguments, strict=False), **keywords)
        inputs = {ir: given[argument] for argument, ir in operator.inputs}
        # custom_op leaves an empty name for an input that is not given, which torchair's pass over
        # the sends of CANN stumbles over.
        while next(reversed(inputs.values())) is None:
            inputs.popitem()
        return ge.custom_op(
            operator.ge_type,
            inputs=inputs,
            attrs={
                ir: attribute(0 if argument is None else given[argument])
                for argument, ir in operator.attributes
            },
            outputs=list(operator.outputs),
        )

    return convert
