"""Result files: what a run generated for each prompt, and what each of its steps really did.

A result file is JSON lines in UTF-8, one document a line, and holds one run of one mode::

    {"id": "7", "prompt": "417+85=", "expected": "205", "tokens": [4, 2, 7, 1], "text": "205",
     "policy_requested": "token", "mode": "token, sequence parallel",
     "steps": [{"id": "0.12", "policy": "token", "split": true, "reason": null, "rows": [24, 24]},
               {"id": "0.13", "policy": null, "split": false, "reason": "single_token",
                "rows": [12, 0]}]}

======================  ============================================================================
``id``                  names the document in every run; text or a number
``prompt``              what the model was given
``expected``            the right answer; may be missing, then nothing is said about right or wrong
``tokens``              ids that were generated, the end token included
``text``                the same as text, without the end token
``policy_requested``    where steps were asked to be cut (``AFDConfig.split``)
``mode``                name of the configuration; ``policy_requested`` when missing
``steps``               the model's steps that made the tokens, in order, as the counters had them
======================  ============================================================================

A step tells the policy that really made its cut, or null and the reason for running unsplit.
``rows`` (optional) counts the rows that crossed to the experts per stage. Prompts of one batch
share their steps: ``id`` (optional), unique within the run, keeps them from being counted twice.
:class:`afd_graph.activation.StepLog` records steps. Keys that are not named here are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from afd_graph.errors import ResultsError


@dataclass(frozen=True)
class Step:
    """What one step of the model did.

    Attributes:
        policy: the policy that made the cut; None when the step ran unsplit.
        split: whether it ran in two stages.
        reason: why it ran unsplit; None when it was split.
        rows: rows dispatched to the experts per stage, over all layers, on the recording rank.
        id: names the step within the run.
    """

    policy: str | None
    split: bool
    reason: str | None = None
    rows: tuple[int, ...] | None = None
    id: str | None = None


@dataclass(frozen=True)
class Document:
    """One prompt and what a run made of it; the fields are those of the file."""

    id: str
    prompt: str
    tokens: tuple[int, ...]
    text: str
    policy_requested: str
    steps: tuple[Step, ...] = ()
    expected: str | None = None
    mode: str = ""

    def __post_init__(self) -> None:
        if not self.mode:
            object.__setattr__(self, "mode", self.policy_requested)

    @property
    def right(self) -> bool | None:
        """Whether the text is the expected one, spaces around it aside; None if not known."""
        return None if self.expected is None else self.text.strip() == self.expected.strip()


@dataclass(frozen=True)
class Run:
    """One result file: every document of one run of one mode."""

    name: str
    documents: tuple[Document, ...]

    @property
    def mode(self) -> str:
        """Name of the configuration that ran."""
        return self.documents[0].mode

    @property
    def policy(self) -> str:
        """Where steps were asked to be cut."""
        return self.documents[0].policy_requested


class ResultWriter:
    """Writes a result file document by document; each is on disk when the call returns.

    Raises:
        ResultsError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise _unusable(self._path, "written", error) from error

    def write(self, document: Document) -> None:
        """Append one document."""
        try:
            self._file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unusable(self._path, "written", error) from error

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_results(path: str | Path, documents: Iterable[Document]) -> None:
    """Write a whole result file."""
    with ResultWriter(path) as writer:
        for document in documents:
            writer.write(document)


def read_results(path: str | Path) -> Run:
    """Read and check a result file.

    Raises:
        ResultsError: it cannot be read, is empty, or a line of it is not a document; the message
            has the file, the line and the field.
    """
    path = Path(path)
    documents: list[Document] = []
    lines: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                document = _Line(path, number).document(line)
                first = documents[0] if documents else document
                for name in ("policy_requested", "mode"):
                    mine, others = getattr(document, name), getattr(first, name)
                    if mine != others:
                        raise ResultsError(
                            f"{path}:{number}: {name} is {mine!r}, line {lines[first.id]} "
                            f"has {others!r}",
                            remedy="write every run to a file of its own",
                        )
                if document.id in lines:
                    raise ResultsError(
                        f"{path}:{number}: document {document.id!r} is also on line "
                        f"{lines[document.id]}",
                        remedy="give every document of a run an id of its own",
                    )
                lines[document.id] = number
                documents.append(document)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, "read", error) from error
    if not documents:
        raise ResultsError(
            f"{path} holds no documents", remedy="check that the run that wrote it came to its end"
        )
    return Run(str(path), tuple(documents))


def _unusable(path: Path, what: str, error: Exception) -> ResultsError:
    return ResultsError(f"{path} cannot be {what}: {error}", remedy="check the path")


class _Line:
    """Checks one line, and knows where it stands."""

    def __init__(self, path: Path, number: int) -> None:
        self._where = f"{path}:{number}"

    def document(self, line: str) -> Document:
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ResultsError(
                f"{self._where}: not JSON: {error}",
                remedy="if it is the last line, the run that wrote it was cut short; run it again",
            ) from error
        fields = self._expect("the line", value, dict)
        name = self._get(fields, "id", str, int)
        tokens = self._get(fields, "tokens", list)
        steps = self._get(fields, "steps", list)
        return Document(
            id=str(name),
            prompt=self._get(fields, "prompt", str),
            expected=self._get(fields, "expected", str, type(None)),
            tokens=tuple(self._expect("tokens", token, int) for token in tokens),
            text=self._get(fields, "text", str),
            policy_requested=self._get(fields, "policy_requested", str),
            mode=self._get(fields, "mode", str, type(None)) or "",
            steps=tuple(self._step(i, step) for i, step in enumerate(steps)),
        )

    def _step(self, index: int, value: Any) -> Step:
        where = f"steps[{index}]"
        fields = self._expect(where, value, dict)
        rows = self._get(fields, "rows", list, type(None), within=where)
        name = self._get(fields, "id", str, int, type(None), within=where)
        step = Step(
            policy=self._get(fields, "policy", str, type(None), within=where),
            split=self._get(fields, "split", bool, within=where),
            reason=self._get(fields, "reason", str, type(None), within=where),
            rows=None if rows is None else tuple(self._expect("rows", n, int) for n in rows),
            id=None if name is None else str(name),
        )
        if step.split != (step.policy is not None) or step.split == (step.reason is not None):
            raise self._wrong(
                f"{where}: a split step has a policy and no reason, an unsplit one a reason and no "
                f"policy; here split={step.split}, policy={step.policy!r}, reason={step.reason!r}"
            )
        return step

    def _get(self, fields: dict[str, Any], name: str, *types: type, within: str = "") -> Any:
        where = f"{within}.{name}" if within else name
        if name not in fields and type(None) not in types:
            raise self._wrong(f"{where} is missing")
        return self._expect(where, fields.get(name), *types)

    def _expect(self, where: str, value: Any, *types: type) -> Any:
        # A bool is an int in Python, not in JSON.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(_JSON_NAMES[t] for t in types)
            raise self._wrong(f"{where} must be {wanted}, not {json.dumps(value)[:80]}")
        return value

    def _wrong(self, what: str) -> ResultsError:
        return ResultsError(
            f"{self._where}: {what}", remedy="the format is described in afd_graph/results.py"
        )


_JSON_NAMES = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
