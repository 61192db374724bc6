"""What every step of a run really did, from the counters of the backend.

A configuration says what was asked for. This records what happened: which policy made the cut of a
step, or why there was none, and how many rows of each stage crossed to the experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from afd_graph.report import StepTaken
from afd_graph.results import Step

if TYPE_CHECKING:
    from afd_graph.backend import AFDBackend
    from afd_graph.runtime import Event


class StepLog:
    """Records the steps of one backend, for result files.

        log = StepLog(backend, prefix="rank0.")
        with log.record() as steps:
            compiled(input_ids)
        Document(..., steps=tuple(steps))

    Args:
        backend: the backend that compiled the model.
        prefix: in front of the number in the id of every step; names the rank or replica where
            several write one file.
    """

    def __init__(self, backend: AFDBackend, prefix: str = "") -> None:
        self._backend = backend
        self._prefix = prefix
        self._count = 0

    @contextmanager
    def record(self) -> Iterator[list[Step]]:
        """Collect the steps that run inside; the list grows as they end."""
        steps: list[Step] = []
        rows: Counter[int] = Counter()

        def crossed(event: Event) -> None:
            if event.kind == "dispatch":
                rows[event.stage] += event.rows

        def taken(step: StepTaken) -> None:
            steps.append(
                Step(
                    policy=step.policy,
                    split=step.split,
                    reason=step.reason,
                    rows=tuple(rows[stage] for stage in range(max(rows, default=-1) + 1)),
                    id=f"{self._prefix}{self._count}",
                )
            )
            self._count += 1
            rows.clear()

        events, report = self._backend.channel.observers, self._backend.report()
        events.append(crossed)
        report.observers.append(taken)
        try:
            yield steps
        finally:
            events.remove(crossed)
            report.observers.remove(taken)
