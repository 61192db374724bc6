"""Devices and links, with the source of every number.

A preset is a statement about the world, so :attr:`Hardware.sources` says for each field where it
comes from. Own hardware is a JSON file with the same names (:func:`load_hardware`); it may start
from a preset (``"base": "h800"``) and change some fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from afd_graph.errors import PlanError
from afd_graph.validation import check_choice, check_known_keys

_SHARES = (
    "gemm_efficiency",
    "attention_efficiency",
    "memory_efficiency",
    "compute_share_while_communicating",
)


@dataclass(frozen=True)
class Hardware:
    """One device and its links; rates are per device, per second, in one direction.

    Attributes:
        name: for reports.
        flops_16bit: peak operations per second of matrix units on bf16 or fp16.
        flops_8bit: the same on fp8 or int8; equal to ``flops_16bit`` where there is none.
        memory_bandwidth: peak bytes per second of device memory.
        memory: bytes of device memory.
        gemm_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: share of the 16-bit peak that core attention reaches.
        memory_efficiency: share of the memory bandwidth that kernels reach.
        dispatch_bandwidth: bytes per second that a dispatch moves from one attention device, and
            that an expert device takes in, as measured.
        combine_bandwidth: the same for the way back.
        message_latency_s: seconds that a dispatch or a return takes without any rows.
        collective_bandwidth: bytes per second of tensor-parallel collectives.
        collective_latency_s: seconds that a collective takes without any bytes.
        domain: devices that share one copy of a token's row (a node whose devices pass rows on
            over a faster link); 1 sends one copy to every expert device.
        call_overhead_s: seconds that attention or experts of one layer cost whatever their size:
            launching kernels, reading counts on the host.
        compute_share_while_communicating: share of a device that computes while its own
            all-to-all runs; below 1 where communication kernels occupy compute units.
        sources: field name -> where its number comes from.

    Raises:
        PlanError: a rate that is not positive, or a share outside (0, 1].
    """

    name: str
    flops_16bit: float
    flops_8bit: float
    memory_bandwidth: float
    memory: float
    gemm_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    dispatch_bandwidth: float
    combine_bandwidth: float
    message_latency_s: float
    collective_bandwidth: float
    collective_latency_s: float = 0.0
    domain: int = 1
    call_overhead_s: float = 0.0
    compute_share_while_communicating: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("name", "sources"):
                continue
            least_is_zero = entry.name.endswith("_s")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                _refuse(self.name, entry.name, value, "is not a number")
            if not (value >= 0 if least_is_zero else value > 0):
                _refuse(self.name, entry.name, value, "must be positive")
            if entry.name in _SHARES and value > 1:
                _refuse(self.name, entry.name, value, "is a share, at most 1")


def _refuse(name: str, key: str, value: object, why: str) -> None:
    raise PlanError(
        f"hardware {name!r}: {key}={value!r} {why}",
        remedy="give rates in operations or bytes per second, times in seconds",
    )


_DEEPEP = "DeepEP, docs/legacy.md (V1, H800, EP32): 58 GB/s dispatch, 57 GB/s combine"
_DEEPGEMM = (
    "DeepGEMM's first tables (H800, fp8, M=4096): 590 to 1358 TFLOPS; weighted over the products "
    "of DeepSeek-V3 1118 (attention) and 1223 (experts) of 1979"
)
_CLOUDMATRIX = "Serving LLMs on Huawei CloudMatrix384, arXiv 2506.12708"
_SGL_NPU = "sgl-kernel-npu, deep_ep normal kernels on A3: EP16 87 GB/s dispatch, 121 GB/s combine"

HARDWARE: dict[str, Hardware] = {
    "h800": Hardware(
        name="h800",
        flops_16bit=989e12,
        flops_8bit=1979e12,
        memory_bandwidth=3.35e12,
        memory=80e9,
        gemm_efficiency=0.59,
        attention_efficiency=0.65,
        memory_efficiency=0.80,
        dispatch_bandwidth=58e9,
        combine_bandwidth=57e9,
        message_latency_s=77e-6,
        collective_bandwidth=153e9,
        collective_latency_s=10e-6,
        domain=8,
        compute_share_while_communicating=1 - 24 / 132,
        sources={
            "flops_16bit": "NVIDIA H100 SXM data sheet, dense (H800 has the same compute)",
            "flops_8bit": "NVIDIA H100 SXM data sheet, dense",
            "memory_bandwidth": "NVIDIA H100 SXM data sheet",
            "memory": "NVIDIA H100 SXM data sheet",
            "gemm_efficiency": _DEEPGEMM,
            "attention_efficiency": "FlashMLA's README (H800 SXM5): 660 TFLOPS dense decoding, "
            "640 sparse prefill",
            "memory_efficiency": "DeepGEMM's first tables: up to 2668 of 3350 GB/s",
            "dispatch_bandwidth": _DEEPEP,
            "combine_bandwidth": _DEEPEP,
            "message_latency_s": "DeepEP, docs/legacy.md: 77 us low-latency dispatch, EP8",
            "collective_bandwidth": "DeepEP, docs/legacy.md: 153 GB/s over NVLink within a node",
            "collective_latency_s": "assumed",
            "domain": "DeepEP: rows cross nodes once and are passed on over NVLink, 8 GPUs a node",
            "call_overhead_s": "assumed: captured graphs, no launch cost",
            "compute_share_while_communicating": "DeepEP, docs/legacy.md: 24 of 132 SMs",
        },
    ),
    "ascend-910c": Hardware(
        name="ascend-910c",
        flops_16bit=376e12,
        flops_8bit=752e12,
        memory_bandwidth=1.6e12,
        memory=64e9,
        gemm_efficiency=0.80,
        attention_efficiency=0.65,
        memory_efficiency=0.84,
        dispatch_bandwidth=87e9,
        combine_bandwidth=121e9,
        message_latency_s=100e-6,
        collective_bandwidth=150e9,
        collective_latency_s=20e-6,
        domain=1,
        sources={
            "flops_16bit": f"{_CLOUDMATRIX}: 752 TFLOPS bf16 a package of two dies; one die here",
            "flops_8bit": f"{_CLOUDMATRIX}: twice the bf16 rate; one die",
            "memory_bandwidth": f"{_CLOUDMATRIX}: 3.2 TB/s a package; one die",
            "memory": f"{_CLOUDMATRIX}: 128 GB a package; one die",
            "gemm_efficiency": f"{_CLOUDMATRIX}: int8 products reach 77 to 83 % of the peak",
            "attention_efficiency": f"{_CLOUDMATRIX}: MLA reaches 246 of 376 TFLOPS",
            "memory_efficiency": f"{_CLOUDMATRIX}: MLA reaches 1346 of 1600 GB/s",
            "dispatch_bandwidth": _SGL_NPU,
            "combine_bandwidth": _SGL_NPU,
            "message_latency_s": f"{_CLOUDMATRIX}: dispatch of 128 tokens takes 116 us at EP8",
            "collective_bandwidth": "assumed below the 196 GB/s of the UB plane of one die",
            "collective_latency_s": "assumed",
            "domain": "every die is reached directly over the UB plane",
            "call_overhead_s": "assumed: captured graphs, no launch cost",
            "compute_share_while_communicating": "assumed",
        },
    ),
}
"""Presets; a device is a GPU, and on Ascend one die of a package of two."""


def load_hardware(source: str | PathLike[str]) -> Hardware:
    """A preset by name, or the hardware that a JSON file describes.

    Raises:
        PlanError: neither a preset nor a readable description.
    """
    if isinstance(source, str) and source.lower() in HARDWARE:
        return HARDWARE[source.lower()]
    path = Path(source)
    try:
        given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        check_choice("hardware", str(source), tuple(HARDWARE))  # raises and lists the presets
        raise
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} is not a readable hardware description: {error}",
            remedy="give a preset name or a JSON object with the fields of Hardware",
        ) from error
    base = given.pop("base", None)
    names = [entry.name for entry in dataclasses.fields(Hardware)]
    check_known_keys("hardware", given, names)
    given.setdefault("name", path.stem)
    if base is not None:
        return dataclasses.replace(load_hardware(base), **given)
    missing = [
        entry.name
        for entry in dataclasses.fields(Hardware)
        if entry.default is dataclasses.MISSING
        and entry.default_factory is dataclasses.MISSING
        and entry.name not in given
    ]
    if missing:
        raise PlanError(
            f"{path} does not say {', '.join(missing)}",
            remedy='add them, or start from a preset with "base": "h800"',
        )
    return Hardware(**given)
