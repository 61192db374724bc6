"""``afd-graph compare``: result files against each other, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from afd_graph.cli.output import json_option, print_json
from afd_graph.compare import Activation, Comparison, Divergence, Mode, Pair, compare
from afd_graph.results import Step, read_results

FLIPPED, NEVER_ACTIVE = 4, 3


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.argument("more", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Show this many flipped documents, at most.",
)
@click.option(
    "--fail-on-flips", is_flag=True, help=f"End with code {FLIPPED} when any answer flips."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    a: Path,
    b: Path,
    more: tuple[Path, ...],
    limit: int,
    fail_on_flips: bool,
    as_json: bool,
) -> None:
    """Compare the result files A and B of two modes, or of two runs of one mode.

    Further files are repeated runs of either mode; how often answers flip between those is the
    noise that a difference between the modes has to be held against.

    Prints per document what flipped and at which token, who is right (both, only A, only B,
    neither) with an exact McNemar test, and in how many steps the requested policy was really
    active, from what the backend counted.

    \b
    Exit codes:
      0  compared
      1  a file is malformed, or the files do not belong together
      2  misuse of the command line
      3  a run in which the requested policy was never active
      4  an answer flipped, with --fail-on-flips
    """
    comparison = compare([read_results(path) for path in (a, b, *more)])
    if as_json:
        print_json(_as_json(comparison))
    else:
        _print(comparison, limit)
    if comparison.never_active:
        ctx.exit(NEVER_ACTIVE)
    if fail_on_flips and comparison.flips:
        ctx.exit(FLIPPED)


def _print(comparison: Comparison, limit: int) -> None:
    for run in comparison.never_active:
        click.secho(_shout(run), fg="red", bold=True)
    for letter, mode in zip("AB", comparison.modes, strict=False):
        _print_mode(letter, mode, comparison.documents)
    modes = dict(zip("AB", comparison.modes, strict=False))
    unstable = {letter: mode.unstable for letter, mode in modes.items()}
    if comparison.pairs:
        _print_pairs("between the modes", comparison.pairs, ("only A", "only B"))
        _print_divergences(comparison.pairs[0], limit, unstable)
    for letter, mode in modes.items():
        if mode.noise:
            what = f"between repeated runs of {letter} (noise)"
            _print_pairs(what, mode.noise, ("only 1st", "only 2nd"))
            for pair in mode.noise:
                _print_divergences(pair, limit, {})


def _shout(run: Activation) -> str:
    what = "nothing was recorded" if not run.steps else _reasons(run)
    return (
        f"!!! POLICY {run.requested!r} WAS NEVER ACTIVE in {run.run}: {run.steps} steps, {what}. "
        "A comparison with this run says nothing about the policy. !!!"
    )


def _reasons(run: Activation) -> str:
    parts = [f"{count} unsplit: {reason}" for reason, count in run.unsplit.most_common()]
    parts += [f"{count} cut by {policy!r} instead" for policy, count in run.other.most_common()]
    if run.one_sided:
        parts.append(f"{run.one_sided} counted as split, but one stage sent no rows")
    if run.requested == "none":
        parts = [f"{run.steps - run.active} split all the same"] if run.steps > run.active else []
    return ", ".join(parts)


def _print_mode(letter: str, mode: Mode, documents: int) -> None:
    click.echo(f"{letter}: {mode.name} (policy {mode.policy!r})")
    for right, run in zip(mode.right, mode.activations, strict=True):
        share = "" if right is None else f", right {right} of {documents} ({right / documents:.1%})"
        click.echo(f"   {run.run}{share}")
        if not run.steps:
            click.echo("     no steps recorded")
            continue
        reasons = _reasons(run)
        click.echo(
            f"     policy active in {run.active} of {run.steps} steps"
            + (f" ({reasons})" if reasons else "")
        )
        if run.documents_without:
            click.echo(f"     {run.documents_without} documents without any active step")


def _print_pairs(what: str, pairs: Sequence[Pair], only: tuple[str, str]) -> None:
    click.echo(f"\nflips {what}:")
    head = ("flips", "of", "both right", *only, "both wrong", "McNemar p")
    rows: list[tuple[str, ...]] = [head]
    for pair in pairs:
        verdicts = (pair.both_right, pair.only_a, pair.only_b, pair.both_wrong)
        known = pair.p_value is not None
        rows.append(
            (
                str(pair.flips),
                str(pair.documents),
                *(str(count) if known else "-" for count in verdicts),
                f"{pair.p_value:.3g}" if pair.p_value is not None else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row, names in zip(rows, ("", *(" / ".join(pair.runs) for pair in pairs)), strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(f"   {cells}  {names}".rstrip())


def _print_divergences(pair: Pair, limit: int, unstable: dict[str, set[str]]) -> None:
    for divergence in pair.divergences[:limit]:
        also = [letter for letter, documents in unstable.items() if divergence.id in documents]
        noise = f"; also between runs of {' and '.join(also)}" if also else ""
        tokens = " / ".join("end" if token is None else str(token) for token in divergence.tokens)
        click.echo(
            f"   {divergence.id}: first differs at token {divergence.position}: {tokens}; "
            f"{_verdicts(divergence)}; {_steps(divergence)}{noise}"
        )
    if len(pair.divergences) > limit:
        click.echo(f"   ... {len(pair.divergences) - limit} more (--limit)")


def _verdicts(divergence: Divergence) -> str:
    words = {True: "right", False: "wrong", None: "not judged"}
    return " / ".join(words[right] for right in divergence.right)


def _steps(divergence: Divergence) -> str:
    def say(step: Step | None) -> str:
        if step is None:
            return "step not recorded"
        return f"split by {step.policy}" if step.split else f"unsplit: {step.reason}"

    return " / ".join(map(say, divergence.steps))


def _as_json(comparison: Comparison) -> dict[str, Any]:
    def pair(value: Pair) -> dict[str, Any]:
        return {"flips": value.flips, **asdict(value)}

    def mode(value: Mode) -> dict[str, Any]:
        return {
            "name": value.name,
            "policy": value.policy,
            "runs": [
                {"right": right, "never_active": run.never, **vars(run)}
                for right, run in zip(value.right, value.activations, strict=True)
            ],
            "unstable": sorted(value.unstable),
            "noise": [pair(noise) for noise in value.noise],
        }

    return {
        "documents": comparison.documents,
        "flips": comparison.flips,
        "never_active": [run.run for run in comparison.never_active],
        "modes": [mode(value) for value in comparison.modes],
        "pairs": [pair(value) for value in comparison.pairs],
    }
