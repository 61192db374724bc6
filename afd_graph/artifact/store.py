"""Where the files of an artifact lie: a folder, or a zip archive ``*.afd``; written all at once.

A reader gets bytes by name, never more than the artifact may hold, and trusts no name in it: only
plain files inside the folder, only archive members that decompress to the size they claim.
Weights are not read through here: they stay outside (:mod:`weights`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from afd_graph.artifact.errors import ArtifactError

SUFFIX = ".afd"
MAX_BYTES = 2**28
"""Largest file of an artifact; graphs of 61 layers take some 10 MB."""

_NAME = re.compile(r"[a-z0-9_\-]+(\.[a-z0-9_\-]+)*(/[a-z0-9_\-]+(\.[a-z0-9_\-]+)*)?", re.ASCII)


class Store:
    """The files of one artifact, for reading.

    Args:
        path: a folder or an archive.

    Attributes:
        folder: where relative paths to weights start.

    Raises:
        ArtifactError: there is nothing at ``path``, or it is neither.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._archive: zipfile.ZipFile | None = None
        if self.path.is_dir():
            self.folder = self.path
        elif self.path.is_file():
            self.folder = self.path.parent
            try:
                self._archive = zipfile.ZipFile(self.path)
                names = self._archive.namelist()
            except Exception as error:  # zipfile raises a dozen kinds over damaged archives
                raise ArtifactError(
                    f"{self.path} is no artifact: it cannot be read as an archive ({error})",
                    remedy="it is truncated or something else; compile it again",
                ) from error
            if len(set(names)) != len(names):
                raise ArtifactError(f"{self.path} holds a file twice", remedy="compile it again")
        else:
            raise ArtifactError(
                f"there is no artifact at {self.path}",
                remedy="name the folder or file that afd-graph compile wrote",
            )

    def read(self, name: str, size: int | None = None) -> bytes:
        """The bytes of one file.

        Args:
            name: such as ``programs/prefill.json``.
            size: that it must have; any size up to :data:`MAX_BYTES` when None.

        Raises:
            ArtifactError: it is missing, damaged, not plain, or of another size.
        """
        if not _NAME.fullmatch(name):
            raise ArtifactError(f"the artifact names a file {name[:80]!r}, which cannot be in it")
        limit = MAX_BYTES if size is None else min(size, MAX_BYTES)
        try:
            data = self._read(name, limit)
        except ArtifactError:
            raise
        except Exception as error:  # as above
            raise ArtifactError(
                f"{name} of {self.path} cannot be read: {type(error).__name__}: {error}",
                remedy="the artifact is damaged; compile it again",
            ) from error
        if len(data) > limit or (size is not None and len(data) != size):
            raise ArtifactError(
                f"{name} of {self.path} has {'more than ' * (len(data) > limit)}"
                f"{min(len(data), limit)} bytes, expected {limit if size is None else size}",
                remedy="the artifact is truncated or was changed; compile it again",
            )
        return data

    def close(self) -> None:
        """Close the archive; idempotent."""
        if self._archive is not None:
            self._archive.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, name: str, limit: int) -> bytes:
        if self._archive is not None:
            with self._archive.open(name) as member:
                return member.read(limit + 1)
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ArtifactError(f"{name} of {self.path} is no plain file")
            return file.read(limit + 1)


def write_store(
    path: str | os.PathLike[str],
    files: Mapping[str, bytes],
    *,
    write_weights: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> None:
    """Write all ``files`` to the folder or archive ``path``, or nothing.

    A reader sees the old artifact or the new one, never a half; a folder that is replaced is away
    for an instant.

    Args:
        path: ends in ``.afd`` for an archive.
        files: name to bytes.
        write_weights: writes the artifact's own weights to a path (:func:`weights_name`).
        overwrite: replace an artifact that is there.

    Raises:
        ArtifactError: there is something at ``path``, and it is not to be overwritten or is no
            artifact.
    """
    target = Path(path)
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == SUFFIX:
        if write_weights is not None:
            with temporary(target.parent / weights_name(target)) as made:
                write_weights(made)
        with temporary(target) as made, zipfile.ZipFile(made, "w") as archive:
            for name, data in files.items():
                # A fixed date: equal artifacts are equal files.
                info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, data)
        return
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, data in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(data)
        if write_weights is not None:
            write_weights(made / weights_name(target))
        made.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(made, target)
            shutil.rmtree(old)
        else:
            os.replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def weights_name(path: str | os.PathLike[str]) -> str:
    """File that holds an artifact's own weights: in the folder, or beside the archive."""
    target = Path(path)
    stem = target.stem if target.suffix == SUFFIX else "weights"
    return f"{stem}.safetensors"


def check_target(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse a path that must not be written to; worth asking before long work."""
    target = Path(path)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if target.is_dir():
        is_artifact = target.suffix != SUFFIX and (target / "manifest.json").is_file()
    else:
        is_artifact = target.suffix == SUFFIX and zipfile.is_zipfile(target)
    if not (overwrite and is_artifact):
        raise ArtifactError(
            f"{target} exists" + ("" if is_artifact else " and is no artifact"),
            remedy="choose another path, or overwrite it" if is_artifact else "choose another path",
        )


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """A path beside ``target`` that becomes it when the block ends well, else goes away."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    made = Path(name)
    try:
        yield made
        made.chmod(0o644)
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
