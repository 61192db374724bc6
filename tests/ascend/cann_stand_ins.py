"""Stand-ins for the libraries of CANN, so that the real torch_npu can be imported without an NPU.

    python cann_stand_ins.py DIRECTORY

With torch_npu installed beside this interpreter: every symbol that its binaries need and that
nobody provides becomes a function that answers zero, or 256 zero bytes; ``cann_stand_ins.c`` has
the answers that must be something else. What cannot work so: running anything, and GE itself.

Weak symbols stay undefined: they are the initialisers of thread-local variables.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch  # not torch_npu, which cannot be imported yet

ANSWERS = Path(__file__).with_suffix(".c")
LIBRARIES = [
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libfmk_parser",
    "libascend_protobuf",
    "libatb",
]
LOADED_BY_NAME = [
    "aclrtSetDeviceSatMode",
    "aclSetCompileopt",
    "aclrtSetOpExecuteTimeOut",
    "aclrtDestroyStreamForce",
]
"""Symbols that torch_npu looks up at run time."""

_OF_THE_TOOLCHAIN = ("Py", "_Py", "__gmon", "_ITM", "__cxa", "__gxx", "_Jv")
_DATA = re.compile(r"_ZT[VISH]")


def missing_symbols(package: Path) -> list[str]:
    """What the binaries of torch_npu need and nobody provides."""
    binaries = [
        *package.glob("_C*.so"),
        *package.glob("lib/*.so"),
        *package.glob("dynamo/torchair/core/*.so"),
    ]
    needed = set(LOADED_BY_NAME)
    for binary in binaries:
        needed |= {
            name
            for kind, name, versioned in _symbols(binary, "--undefined-only")
            if kind not in "wv" and (not versioned or "torch" in name)
        }
    provided: set[str] = set()
    for library in [*binaries, *_of_this_process()]:
        provided |= {name for _, name, _ in _symbols(library, "--defined-only")}
    return sorted(n for n in needed - provided if not n.startswith(_OF_THE_TOOLCHAIN))


def _symbols(binary: Path, which: str) -> Iterator[tuple[str, str, bool]]:
    done = subprocess.run(["nm", "-D", which, binary], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        *_, kind, name = line.split()
        plain, at, _ = name.partition("@")
        yield kind, plain, bool(at)


def _of_this_process() -> Iterator[Path]:
    """PyTorch, the interpreter and the system libraries that are mapped here."""
    yield from Path(torch.__file__).parent.glob("lib/*.so*")
    yield Path(sys.executable).resolve()
    python = Path(sysconfig.get_config_var("LIBDIR")) / sysconfig.get_config_var("LDLIBRARY")
    if python.suffix == ".so" and python.exists():
        yield python
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rsplit(" ", 1)[-1]
        if re.search(r"/lib(stdc\+\+|m|c|gcc_s|pthread)\.so", path):
            yield Path(path)


def build(symbols: list[str], target: Path) -> None:
    """Compile the libraries into ``target``; all symbols lie in one of them."""
    answered = set(re.findall(r"\b(acl\w+)\(", ANSWERS.read_text()))
    lines = [".text"]
    for name in symbols:
        if name not in answered and not _DATA.match(name):
            lines += [f".globl {name}", f".type {name},@function", f"{name}:", "xorl %eax,%eax"]
            lines += ["ret"]
    lines += [".data"]
    for name in symbols:
        if _DATA.match(name):
            lines += [f".globl {name}", f".type {name},@object", f".size {name},256"]
            lines += [".balign 16", f"{name}:", ".zero 256"]
    lines += ['.section .note.GNU-stack,"",@progbits', ""]
    target.mkdir(parents=True, exist_ok=True)
    source = target / "zeros.s"
    source.write_text("\n".join(lines))
    link = ["gcc", "-shared", "-Wl,--no-as-needed"]
    _run(*link, "-o", target / "libascendcl.so", source, ANSWERS, "-Wl,-soname,libascendcl.so")
    for name in LIBRARIES:
        output = ["-o", target / f"{name}.so", f"-Wl,-soname,{name}.so"]
        _run(*link, *output, "-x", "c", "/dev/null", f"-L{target}", "-lascendcl")


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        sys.exit("torch_npu is not installed beside this interpreter")
    found = missing_symbols(Path(spec.origin).parent)
    build(found, Path(sys.argv[1]))
    for directory in ("opp", "runtime", "compiler"):  # torch_npu wants them to exist
        (Path(sys.argv[1]) / "cann" / directory).mkdir(parents=True, exist_ok=True)
    print(f"{len(found)} symbols of CANN stood in for, in {sys.argv[1]}")
