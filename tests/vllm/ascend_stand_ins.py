"""Import the published source of vLLM-Ascend, and vLLM's of the same version, where no NPU is.

    use(vllm, vllm_ascend)      # folders of the unpacked wheels; before anything else is imported

The wheels pin a PyTorch that this package does not run on, and need CANN. Both are unpacked and put
in front of ``sys.path``; what is missing is named in :data:`MISSING` with the reason. A name of
a missing module can be imported, subclassed and used as an annotation; calling it is an error that
says its name, so that nothing is computed by a stand-in that is not written out here.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

MISSING = {
    "torch_npu": "needs CANN; its operators have no kernel here",
    "scipy": "not a dependency of vLLM for CPU; read for one constant of a load-balancing policy",
    "gguf": "only of vLLM 0.18, a file format of weights",
    "diskcache": "only of vLLM 0.18, a cache of grammars",
    "torchair": "comes with torch_npu",
    "torchvision": "is not built for this PyTorch; vLLM 0.18 imports an image model that needs it",
}
"""Modules that the published source imports and that are not here, with the reason."""


class Missing:
    """Something that has a name here and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} has no stand-in")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Missing:
        return self

    __ror__ = __or__


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class _Finder:
    """Finds modules of :data:`MISSING`, and their submodules, when nothing else does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in MISSING:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Event:
    def record(self, *args: Any) -> None:
        pass


def use(vllm: str, vllm_ascend: str) -> None:
    """Let this process import both, and give PyTorch the few things of an NPU that run here."""
    sys.path[:0] = [vllm, vllm_ascend]
    import numba  # noqa: F401  (asks for SciPy's version)
    import torch
    import transformers

    # These remember what is installed before the stand-ins can be taken for it.
    transformers.utils.is_scipy_available()
    transformers.utils.is_torchvision_available()
    transformers.utils.is_torch_npu_available()
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    import scipy.stats

    scipy.stats.norm = SimpleNamespace(ppf=lambda q: {0.75: 0.6744897501960817}[q])

    import torch_npu

    torch_npu.__version__ = "stand-in"  # only a key of a compile cache
    npu = _Module("torch.npu")
    npu.is_available = lambda: False  # type: ignore[attr-defined]
    npu.graph_pool_handle = lambda: (0, 0)  # type: ignore[attr-defined]
    npu.current_device = lambda: "cpu"  # type: ignore[attr-defined]
    npu.Event = _Event  # type: ignore[attr-defined]
    npu.current_stream = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        record_event=_Event, wait_event=lambda event: None
    )
    torch.utils.rename_privateuse1_backend("npu")
    torch.utils.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
    torch.npu = npu  # type: ignore[attr-defined]
    sys.modules["torch.npu"] = npu
    torch.Tensor.npu = lambda self, *args, **kwargs: self  # type: ignore[attr-defined]
    _without_pinned_memory(torch)
    _register_for_cpu()
    # Replaces parts of torchair, which is not here; only vLLM-Ascend 0.18 has it.
    name = "vllm_ascend.patch.worker.patch_npugraph_ex_triton"
    sys.modules[name] = ModuleType(name)
    # Registers the operators before anything asks for one of their modules in another order,
    # which would be a circular import.
    import vllm_ascend.ops


def _register_for_cpu() -> None:
    """vLLM-Ascend registers the functions of its operators for NPUs: here they run on CPU."""
    from vllm.utils import torch_utils

    original = torch_utils.direct_register_custom_op

    def register(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("dispatch_key") == "PrivateUse1":
            kwargs["dispatch_key"] = "CPU"
        original(*args, **kwargs)

    torch_utils.direct_register_custom_op = register


def _without_pinned_memory(torch: Any) -> None:
    """Pinned memory needs a device: what asks for it gets ordinary memory."""
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("zeros", "empty", "ones", "full", "tensor", "arange"):
        original = getattr(torch, name)

        def plain(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return _original(*args, **kwargs)

        setattr(torch, name, plain)
