"""torchair's own Python out of a downloaded torch_npu wheel, without CANN and without an NPU.

Only ``torch_npu/dynamo/torchair/**.py`` is unpacked, and its parent directory is put on the path,
so the package has its own name. The four native modules are replaced by what they answer. Nothing
is installed: an installed torch_npu makes every ``import torch`` fail where CANN is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
import types
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

DOWNLOADS = Path(__file__).parents[2] / ".cache" / "torch_npu"
_PREFIX = "torch_npu/dynamo/"


class SetupError(RuntimeError):
    """The wheel is not there."""


def wheel(version: str) -> Path:
    """The downloaded wheel of a torch_npu version."""
    found = sorted(DOWNLOADS.glob(f"torch_npu-{version}-*.whl"))
    if not found:
        raise SetupError(f"torch_npu {version} is not in {DOWNLOADS}: run `make torchair-setup`")
    return found[0]


def unpacked(version: str) -> Path:
    """Directory with the wheel's torchair and npugraph_ex, as top-level packages."""
    target = DOWNLOADS / f"python-{version}"
    if target.exists():
        return target
    with (
        tempfile.TemporaryDirectory(dir=DOWNLOADS) as scratch,
        zipfile.ZipFile(wheel(version)) as archive,
    ):
        complete = Path(scratch) / "complete"
        for name in archive.namelist():
            if name.startswith(_PREFIX) and name.endswith(".py"):
                path = complete / name[len(_PREFIX) :]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
        with contextlib.suppress(OSError):  # another process was first
            complete.rename(target)
    return target


class NativeSide:
    """What the native modules were asked.

    Attributes:
        loaded: graphs that were compiled, serialized, with their options.
        exported: models that were exported, serialized, with their options.
        known: operators that "CANN" knows: type to (inputs, outputs, attributes).
    """

    def __init__(self) -> None:
        self.loaded: list[tuple[bytes, dict[str, str]]] = []
        self.exported: list[tuple[bytes, dict[str, str]]] = []
        self.known: dict[str, tuple[list[Any], list[Any], list[Any]]] = {}

    def declare(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Sequence[tuple[str, str]],
        optional: Collection[str] = (),
    ) -> None:
        """Let an operator type exist, as the registration of its package would."""
        self.known[operator] = (
            [(name, "optional" if name in optional else "required") for name in inputs],
            [(name, "required") for name in outputs],
            list(attributes),
        )

    def definition(self, operator: str) -> tuple[Any, ...]:
        """What CANN answers for a custom operator: unknown ones are an error."""
        found = self.known.get(operator)
        return ("ERROR", [], [], []) if found is None else ("SUCCESS", *found)


native = NativeSide()


class _Graph:
    def __init__(self, name: str = "") -> None:
        self.name = name

    def load(self, model: Any, options: Any, *_placements: Any) -> None:
        native.loaded.append((bytes(model), dict(options)))

    def set_hint_shape(self, *_shapes: Any) -> None: ...

    def compile(self) -> None: ...

    def auto_tune(self, *_arguments: Any) -> None: ...

    def run(self, *_arguments: Any) -> Any:
        raise NotImplementedError("there is no device: graphs are built and looked at, not run")


_DTYPES = (
    "BOOL UINT8 INT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BF16 FLOAT16 FLOAT32 FLOAT64 "
    "COMPLEX64 COMPLEX128"
)


def _core_module(name: str) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    if not name.endswith("._torchair"):
        return module
    module.TorchNpuGraphBase = _Graph
    module.get_registered_ir_def = native.definition
    module.export = lambda model, options: native.exported.append((bytes(model), dict(options)))
    module.check_cann_compat = lambda *_: ""
    module.GetSocName = lambda: "Ascend910_9391"
    module.as_torch_tensors = lambda *_: (1, [])
    module.TorchDataType = types.SimpleNamespace(**{n: n for n in _DTYPES.split()})
    for quiet in (
        "InitializeGraphEngine",
        "FinalizeGraphEngine",
        "InitDeviceStdoutChannel",
        "SetDebugLogPath",
        "AclmdlSetDump",
        "AclopStartDumpArgs",
        "AclopStopDumpArgs",
    ):
        setattr(module, quiet, lambda *_: None)
    return module


class _Native(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = tuple(
        f"torchair.core.{name}"
        for name in ("_torchair", "_npu_graph_executor", "_npu_utils", "_abi_compat_ge_apis")
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name in self.names else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _core_module(spec.name)

    def exec_module(self, module: Any) -> None: ...


@contextlib.contextmanager
def _overloads_of_older_pytorch() -> Iterator[None]:
    """torchair registers converters by overload, file by file, and skips a file that fails.

    Older versions name overloads for named tensors, which this PyTorch no longer has: without
    them, files as common as ``cat`` and ``full`` would be skipped.
    """
    from torch._ops import OpOverloadPacket

    original = OpOverloadPacket.__getattr__

    def getattr_(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return lambda *_arguments, **_options: None

    OpOverloadPacket.__getattr__ = getattr_  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = original  # type: ignore[method-assign]


def has_torch_npu() -> bool:
    """Whether torch_npu itself is installed here: see cann_stand_ins.py."""
    return importlib.util.find_spec("torch_npu") is not None


def load(version: str | None = None) -> Any:
    """Import torchair; the process keeps this version and its patches of PyTorch."""
    if has_torch_npu():
        return _load_installed()
    version = version or os.environ.get("AFD_TORCH_NPU", "2.13.0")
    sys.meta_path.insert(0, _Native())
    sys.path.insert(0, str(unpacked(version)))
    define_npu_operators(version)  # before torchair registers converters for them
    with _overloads_of_older_pytorch():
        return importlib.import_module("torchair")


def ge_operators() -> Any:
    """The operators of CANN as torchair declares them."""
    return importlib.import_module("torchair._ge_concrete_graph.auto_generated_ge_raw_ops")


def _load_installed() -> Any:
    """The torchair of the installed torch_npu; its native modules must not be called here."""
    importlib.import_module("torch_npu")
    torchair = importlib.import_module("torchair")
    torchair.get_compiler  # noqa: B018  (imports the rest)
    core = importlib.import_module("torchair.core._torchair")
    core.get_registered_ir_def = native.definition
    core.check_cann_compat = lambda *_: ""
    core.InitializeGraphEngine = core.FinalizeGraphEngine = lambda *_: None
    importlib.import_module("torchair.core._backend")._cached_device_id = 0
    return torchair


def npu_schemas(version: str) -> dict[str, str]:
    """Schema of every operator of torch_npu, by name: they are literals in its library."""
    kept = DOWNLOADS / f"schemas-{version}.txt"
    if not kept.exists():
        with zipfile.ZipFile(wheel(version)) as archive:
            binary = archive.read("torch_npu/lib/libtorch_npu.so")
        pattern = rb"\x00(?:npu::)?([a-z_][a-z0-9_]*(?:\.\w+)?\([ -~]*\) -> [ -~]*)\x00"
        found = sorted({schema.decode() for schema in re.findall(pattern, binary)})
        with tempfile.NamedTemporaryFile("w", dir=DOWNLOADS, delete=False) as scratch:
            scratch.write("\n".join(found))
        Path(scratch.name).rename(kept)
    return {line.partition("(")[0]: line for line in kept.read_text().splitlines()}


def define_npu_operators(version: str) -> None:
    """All operators of torch_npu; those that our graphs call get their shapes from here."""
    import torch

    library = torch.library.Library("npu", "FRAGMENT")
    for schema in npu_schemas(version).values():
        with contextlib.suppress(RuntimeError):  # types that only torch_npu itself knows
            library.define(schema)
    for name, shapes in _NPU_SHAPES.items():
        torch.library.register_fake(f"npu::{name}", shapes, lib=library)
    _kept.append(library)


_NPU_SHAPES: dict[str, Any] = {
    "npu_grouped_matmul": lambda x, weight, **_: [
        x[0].new_empty((x[0].shape[0], weight[0].shape[2]))
    ],
    "npu_scatter_nd_update_": lambda into, indices, updates: into,
}


def stand_in_torch_npu() -> None:
    """A module ``torch_npu`` that answers what torchair asks while it compiles, and ``torch.npu``.

    Its presence makes torchair take the paths that it takes on a device.
    """
    import torch

    module: Any = types.ModuleType("torch_npu")
    module.npu = types.ModuleType("torch_npu.npu")
    module.npu.utils = types.ModuleType("torch_npu.npu.utils")
    module.npu.utils._is_gte_cann_version = lambda *_: True
    module.npu._get_deterministic_level = module.npu.current_device = lambda *_: 0
    module.npu.matmul = types.SimpleNamespace(allow_hf32=False)
    module.npu.conv = types.SimpleNamespace(allow_hf32=True)
    module.npu.get_device_name = module.get_device_name = lambda *_: "Ascend910_9391"
    for part in (module, module.npu, module.npu.utils):
        sys.modules[part.__name__] = part
    module.npu.Stream = _Event
    torch.npu = _Npu()  # type: ignore[attr-defined]


class _Event:
    def record(self, *_arguments: Any) -> None: ...

    def wait(self, *_arguments: Any) -> None: ...


class _Npu:
    """Every function answers zeros; events and streams exist."""

    Event = ExternalEvent = Stream = _Event

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_options: (0, 0)


_kept: list[Any] = []
