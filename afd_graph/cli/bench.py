"""``afd-graph bench``: the programs in ``benchmarks/``, by name, and what they found."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

import afd_graph
from afd_graph.cli.output import json_option, note, print_json
from afd_graph.errors import ConfigError

_VERDICT = re.compile(r"verdict: (.+) = ([-+.\deinfa]+) \((.+)\): (yes|NO)")


@dataclass(frozen=True)
class Claim:
    """One line that a benchmark printed: a value, its bound, and whether it holds."""

    claim: str
    value: float
    bound: str
    holds: bool


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="Say what there is, run nothing.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the benchmarks lie, if not beside the package.",
)
@click.option("--args", "arguments", default="", help="Arguments for them, such as '--rounds 5'.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    only_list: bool,
    directory: Path | None,
    arguments: str,
    as_json: bool,
) -> None:
    """Run benchmarks by NAME, all without one; exit with 1 when a bound is missed.

    Those of vLLM are left out where it is not installed, unless they are named.

    They compare things in one run, in turns, and print ratios. They need a checkout of the
    repository, the extras 'hf' and 'cluster', two cores, and a machine that does nothing else.

    \b
    Examples:
      afd-graph bench --list
      afd-graph bench real_compute memory
      afd-graph bench pass_time --args '--layers 8 16' --json
    """
    found = _benchmarks(directory)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ConfigError(
            f"no benchmark is called {', '.join(unknown)}", remedy=f"use {', '.join(found)}"
        )
    chosen = {name: found[name] for name in names or found}
    if not names and not only_list and importlib.util.find_spec("vllm") is None:
        for name in [name for name in chosen if name.startswith("vllm_")]:
            note(f"left out without vLLM: {name}")
            del chosen[name]
    if only_list:
        lines = {name: _first_line(path) for name, path in chosen.items()}
        if as_json:
            print_json({"benchmarks": lines})
        for name, line in {} if as_json else lines.items():
            click.echo(f"{name:20} {line}")
        return
    results = {name: _run(path, arguments, as_json) for name, path in chosen.items()}
    missed = [name for name, result in results.items() if result["exit_code"]]
    if as_json:
        print_json({"benchmarks": results, "missed": missed})
    else:
        click.echo("\n".join(["", "verdicts", *_lines(results)]))
    ctx.exit(1 if missed else 0)


def _benchmarks(directory: Path | None) -> dict[str, Path]:
    folder = directory or Path(afd_graph.__file__).parents[1] / "benchmarks"
    found = {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}
    if not found:
        raise ConfigError(
            f"there are no benchmarks in {folder}",
            remedy="they are part of the repository, not of the package: give --directory",
        )
    return found


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def _run(path: Path, arguments: str, quiet: bool) -> dict[str, object]:
    """Run one, passing its lines on: to standard error when the answer is JSON."""
    note(f"== {path.stem}")
    begin = time.perf_counter()
    claims = []
    command = [sys.executable, "-u", str(path), *shlex.split(arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=path.parents[1]
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(line.rstrip("\n"), err=quiet)
            found = _VERDICT.match(line)
            if found is not None:
                claims.append(Claim(found[1], float(found[2]), found[3], found[4] == "yes"))
    return {
        "claims": [asdict(claim) for claim in claims],
        "exit_code": process.returncode,
        "seconds": time.perf_counter() - begin,
    }


def _lines(results: dict[str, dict[str, object]]) -> list[str]:
    lines = []
    for name, result in results.items():
        claims = result["claims"]
        assert isinstance(claims, list)
        for claim in claims:
            verdict = "met" if claim["holds"] else "MISSED"
            lines.append(
                f"  {name:20} {claim['value']:>9.4g}  {claim['bound']:18} {verdict:6} "
                f"{claim['claim']}"
            )
        if not claims:
            lines.append(f"  {name:20} ended with {result['exit_code']} and no verdict")
    return lines
