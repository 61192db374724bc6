"""Compare result files: which answers changed, whether that is more than noise, and whether the
policy that was asked for was active at all.

Two modes are compared, each by one run or by several repeated ones. Documents are paired by their
id. The answer of a document *flips* when its tokens differ. Flips between repeated runs of one mode
are noise, and say how much of the flips between the modes is.

Whether one mode is right more often is decided by the documents on which exactly one of both is
right. If the modes are equally good, each of these is as likely one as the other, so their number
follows a binomial distribution with p = 1/2: the exact McNemar test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from afd_graph.errors import ResultsError
from afd_graph.results import Document, Run, Step

NAMED = 5
"""How many documents an error message names."""


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of the exact McNemar test.

    Args:
        only_a: documents that A alone has right.
        only_b: documents that B alone has right.

    Returns:
        How likely it is, for modes that are equally good, that the discordant documents are
        distributed at least as unevenly as here.
    """
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    ways = term = 1
    for i in range(fewer):
        term = term * (discordant - i) // (i + 1)
        ways += term
    return min(1.0, 2 * ways / 2**discordant)


@dataclass(frozen=True)
class Divergence:
    """One document whose tokens differ between two runs.

    Attributes:
        id: the document.
        position: index of the first token that differs.
        tokens: that token in either run; None where the answer had ended.
        steps: the step that made the token, in either run; None where it was not recorded.
        right: whether either run has the document right; None without an expected answer.
    """

    id: str
    position: int
    tokens: tuple[int | None, int | None]
    steps: tuple[Step | None, Step | None]
    right: tuple[bool | None, bool | None]


@dataclass(frozen=True)
class Pair:
    """Two runs, document by document.

    Attributes:
        runs: names of both.
        documents: how many they have.
        divergences: the documents that flip, in the order of the first run.
        both_right, only_a, only_b, both_wrong: documents with an expected answer, by who has it.
        p_value: of the exact McNemar test; None without expected answers.
    """

    runs: tuple[str, str]
    documents: int
    divergences: tuple[Divergence, ...]
    both_right: int
    only_a: int
    only_b: int
    both_wrong: int
    p_value: float | None

    @property
    def flips(self) -> int:
        """Documents whose tokens differ."""
        return len(self.divergences)


@dataclass
class Activation:
    """What the steps of one run did, against what was asked for.

    A step is *active* when the requested policy made its cut and rows of both stages crossed to the
    experts (where the run counted rows). For the policy ``none`` it is active when it ran unsplit,
    for ``auto`` when it was split by any policy.

    Attributes:
        run: name of the run.
        requested: the policy that was asked for.
        steps: distinct steps.
        active: steps in which the policy was active.
        other: split steps whose cut another policy made, by that policy.
        unsplit: steps that ran unsplit, by reason.
        one_sided: steps counted as split of which a stage dispatched no rows.
        documents: documents of the run.
        documents_without: documents that had no active step.
    """

    run: str
    requested: str
    steps: int = 0
    active: int = 0
    other: Counter[str] = field(default_factory=Counter)
    unsplit: Counter[str] = field(default_factory=Counter)
    one_sided: int = 0
    documents: int = 0
    documents_without: int = 0

    @property
    def never(self) -> bool:
        """Whether the run shows nothing about the policy: no step had it.

        A run that asked for no split and recorded no steps, such as one of the plain model, is
        what it claims to be.
        """
        return self.active == 0 and not (self.requested == "none" and self.steps == 0)


@dataclass(frozen=True)
class Mode:
    """One configuration and its runs.

    Attributes:
        name: the configuration.
        policy: where steps were asked to be cut.
        right: right documents of every run; None without expected answers.
        activations: what the steps of every run did.
        noise: every two of its runs, compared.
    """

    name: str
    policy: str
    right: tuple[int | None, ...]
    activations: tuple[Activation, ...]
    noise: tuple[Pair, ...]

    @property
    def unstable(self) -> set[str]:
        """Documents that flip between repeated runs of this mode."""
        return {divergence.id for pair in self.noise for divergence in pair.divergences}


@dataclass(frozen=True)
class Comparison:
    """The answer of :func:`compare`.

    Attributes:
        documents: documents of every run.
        modes: mode A and mode B; A alone when all runs are of one mode.
        pairs: every run of A with every run of B; the first is the pair that was asked for. Empty
            when all runs are of one mode.
    """

    documents: int
    modes: tuple[Mode, ...]
    pairs: tuple[Pair, ...]

    @property
    def never_active(self) -> list[Activation]:
        """Runs that show nothing about the policy that was asked for."""
        return [run for mode in self.modes for run in mode.activations if run.never]

    @property
    def flips(self) -> int:
        """Most flips between two runs, of different modes or of one."""
        every = [*self.pairs, *(pair for mode in self.modes for pair in mode.noise)]
        return max((pair.flips for pair in every), default=0)


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs of one or two modes; the first run is of mode A.

    Raises:
        ResultsError: fewer than two runs, more than two modes, or runs of different documents.
    """
    if len(runs) < 2:
        raise ResultsError("one run cannot be compared", remedy="give two result files or more")
    for run in runs[1:]:
        _check_documents(runs[0], run)
    by_mode: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_mode.setdefault((run.mode, run.policy), []).append(run)
    if len(by_mode) > 2:
        raise ResultsError(
            f"the runs are of {len(by_mode)} modes: {', '.join(repr(mode) for mode, _ in by_mode)}",
            remedy="compare two modes at a time; further files are repeated runs of either",
        )
    sides = list(by_mode.values())
    return Comparison(
        documents=len(runs[0].documents),
        modes=tuple(_mode(side) for side in sides),
        pairs=tuple(compare_pair(a, b) for a, b in product(*sides)) if len(sides) == 2 else (),
    )


def compare_pair(a: Run, b: Run) -> Pair:
    """Compare two runs document by document; both must have the same documents."""
    others = {document.id: document for document in b.documents}
    verdicts: Counter[tuple[bool, bool]] = Counter()
    divergences = []
    for mine in a.documents:
        other = others[mine.id]
        if mine.right is not None and other.right is not None:
            verdicts[mine.right, other.right] += 1
        if mine.tokens != other.tokens:
            divergences.append(_divergence(mine, other))
    only_a, only_b = verdicts[True, False], verdicts[False, True]
    return Pair(
        runs=(a.name, b.name),
        documents=len(a.documents),
        divergences=tuple(divergences),
        both_right=verdicts[True, True],
        only_a=only_a,
        only_b=only_b,
        both_wrong=verdicts[False, False],
        p_value=mcnemar(only_a, only_b) if verdicts else None,
    )


def is_active(requested: str, step: Step) -> bool:
    """Whether a step did what was asked for: see :class:`Activation`."""
    if requested == "none":
        return not step.split
    return step.split and (requested == "auto" or step.policy == requested) and not _one_sided(step)


def activation(run: Run) -> Activation:
    """What the steps of a run did, against what was asked for; every step counts once."""
    found = Activation(run.name, run.policy, documents=len(run.documents))
    seen: set[str] = set()
    for document in run.documents:
        if not any(is_active(run.policy, step) for step in document.steps):
            found.documents_without += 1
        for step in document.steps:
            if step.id is not None:
                if step.id in seen:
                    continue
                seen.add(step.id)
            found.steps += 1
            found.active += is_active(run.policy, step)
            if not step.split:
                found.unsplit[step.reason or ""] += 1
            elif _one_sided(step):
                found.one_sided += 1
            elif run.policy != "auto" and step.policy != run.policy:
                found.other[step.policy or ""] += 1
    return found


def _one_sided(step: Step) -> bool:
    return step.split and step.rows is not None and not (len(step.rows) > 1 and all(step.rows))


def _mode(runs: Sequence[Run]) -> Mode:
    right = []
    for run in runs:
        known = [document.right for document in run.documents if document.right is not None]
        right.append(sum(known) if known else None)
    return Mode(
        name=runs[0].mode,
        policy=runs[0].policy,
        right=tuple(right),
        activations=tuple(map(activation, runs)),
        noise=tuple(compare_pair(a, b) for a, b in combinations(runs, 2)),
    )


def _divergence(a: Document, b: Document) -> Divergence:
    length = min(len(a.tokens), len(b.tokens))
    position = next((i for i in range(length) if a.tokens[i] != b.tokens[i]), length)

    def at(values: Sequence[object]) -> object:
        return values[position] if position < len(values) else None

    return Divergence(
        id=a.id,
        position=position,
        tokens=(at(a.tokens), at(b.tokens)),  # type: ignore[arg-type]
        steps=(at(a.steps), at(b.steps)),  # type: ignore[arg-type]
        right=(a.right, b.right),
    )


def _check_documents(first: Run, other: Run) -> None:
    mine = {document.id: document for document in first.documents}
    theirs = {document.id: document for document in other.documents}
    for missing, where in ((mine.keys() - theirs, other), (theirs.keys() - mine, first)):
        if missing:
            raise ResultsError(
                f"{where.name} lacks {len(missing)} documents of the other file: "
                + _named(sorted(missing)),
                remedy="compare runs over the same prompts",
            )
    for name in ("prompt", "expected"):
        differ = [i for i in mine if getattr(mine[i], name) != getattr(theirs[i], name)]
        if differ:
            raise ResultsError(
                f"{first.name} and {other.name}: the {name} of {len(differ)} documents differs: "
                + _named(differ),
                remedy="compare runs over the same prompts",
            )


def _named(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:NAMED])) + (", ..." if len(ids) > NAMED else "")
