"""Expert weights that live once, in shared memory: out of the model, and back into it.

1. Each storage under the weights of a program is copied to a new segment, then freed in the model
   (its tensors keep shape, strides and dtype, but have no memory).
2. The FFN process maps the segment and builds the same views over it.
3. :meth:`MovedWeights.restore` gives the model its memory back. The segment outlives the FFN
   process, so this works after a crash too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from afd_graph.connectors.shared_memory import Segment, aligned
from afd_graph.errors import ConnectorError
from afd_graph.ffn.program import FFNProgram
from afd_graph.ffn.serialize import program_from_dict, program_to_dict


class MovedWeights:
    """One program and its weights in a segment, and the storages that they came from.

    The weights of ``program`` are empty afterwards.

    Raises:
        ConnectorError: a weight cannot be moved; names it. Nothing was moved then.
        SerializeError: the program cannot be stored. Nothing was moved then.
    """

    def __init__(self, program: FFNProgram) -> None:
        stored, tensors = program_to_dict(program)
        names = {
            key: f"{weight['name']!r}"
            for part in (stored["routed"], stored["shared"])
            if part is not None
            for weight in part["weights"]
            for key in [weight["tensor"]]
        }
        groups = _by_storage(tensors)
        for group in groups:
            _check_movable([(names[key], tensors[key]) for key in group], program.layer)

        views: dict[str, dict[str, Any]] = {}
        self._places: list[tuple[torch.UntypedStorage, int, int]] = []
        end = 0
        for group in groups:
            storage = tensors[group[0]].untyped_storage()
            self._places.append((storage, end, storage.nbytes()))
            for key in group:
                views[key] = _view_to_dict(tensors[key], end)
            end = aligned(end + storage.nbytes())
        description = json.dumps({"program": stored, "views": views}).encode()
        self.description_size = len(description)
        self._base = aligned(len(description))
        self.segment = Segment.create(f"afd-layer{program.layer}")
        self.segment.grow(self._base + end)
        self.segment.write(0, description)
        for storage, offset, nbytes in self._places:
            self._shared_bytes(offset, nbytes).copy_(_as_bytes(storage))
            storage.resize_(0)
        self.segment.unmap()

    def restore(self) -> None:
        """Give the model's storages their memory and values back; idempotent."""
        places, self._places = self._places, []
        if places:
            self.segment.map(self._base + max(offset + nbytes for _, offset, nbytes in places))
        for storage, offset, nbytes in places:
            storage.resize_(nbytes)
            _as_bytes(storage).copy_(self._shared_bytes(offset, nbytes))
        self.segment.close()

    def _shared_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.segment.tensor(self._base + offset, (nbytes,), torch.uint8)


def program_from_segment(segment: Segment, description_size: int) -> FFNProgram:
    """Build the program in ``segment``; its weights are views of the memory.

    Args:
        segment: what :class:`MovedWeights` filled.
        description_size: bytes of the description that it begins with; the weights follow.

    Raises:
        ValueError: malformed.
    """
    segment.map(description_size)
    described = json.loads(segment.read(0, description_size))
    base = aligned(description_size)
    views = {key: _view_from_dict(segment, base, view) for key, view in described["views"].items()}
    return program_from_dict(described["program"], views)


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Group the keys of tensors that share memory; what has no memory stands alone."""
    groups: dict[object, list[str]] = {}
    for key, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0
        groups.setdefault(address or key, []).append(key)
    return list(groups.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"


def _check_movable(group: list[tuple[str, torch.Tensor]], layer: int) -> None:
    """Refuse weights whose memory is not theirs alone to move, by name."""
    label = ", ".join(dict.fromkeys(name for name, _ in group))
    weights = [tensor for _, tensor in group]
    first = weights[0]
    if not _is_plain(first):
        problem = f"is a {type(first.data).__name__} on {first.device}, not a tensor on cpu"
    elif first.numel() and not first.untyped_storage().nbytes():
        problem = "has no memory: it was moved to an FFN process before"
    elif not _covers(first.untyped_storage().nbytes(), weights):
        problem = f"is a view of a larger storage of {first.untyped_storage().nbytes()} bytes"
    elif not first.untyped_storage().resizable():
        problem = "lies in memory that PyTorch does not own (a file mapping or an array)"
    else:
        return
    raise ConnectorError(
        f"expert weight {label} cannot be moved to the FFN process: it {problem}",
        layer=layer,
        remedy="give the parameter its own memory (parameter.data = parameter.data.clone()), "
        "or close the other backend first",
    )


def _covers(nbytes: int, weights: list[torch.Tensor]) -> bool:
    """Whether the weights' elements, counted once each, make up the whole storage."""
    distinct = {(w.storage_offset(), tuple(w.shape), w.stride(), w.dtype): w for w in weights}
    reached = 0
    for weight in sorted(distinct.values(), key=lambda w: int(w.storage_offset())):
        begin = int(weight.storage_offset())
        if begin * weight.element_size() > reached:
            return False
        if weight.numel():
            end = begin + _span(weight.shape, weight.stride())
            reached = max(reached, end * weight.element_size())
    elements = sum(w.numel() * w.element_size() for w in distinct.values())
    return reached == nbytes and elements >= nbytes


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor that has any."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _view_to_dict(tensor: torch.Tensor, storage_begin: int) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "begin": storage_begin + tensor.storage_offset() * tensor.element_size(),
    }


def _view_from_dict(segment: Segment, base: int, view: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, view["dtype"])
    shape, strides = view["shape"], view["strides"]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    span = (_span(shape, strides),)
    return segment.tensor(base + view["begin"], span, dtype).as_strided(shape, strides)
