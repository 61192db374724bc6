"""The command line as a whole: help, unknown commands, exit codes, what is printed where."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from afd_graph.cli.group import COMMANDS, afd_graph


def run(*args: str):
    return CliRunner().invoke(afd_graph, list(args))


def test_help_lists_every_command():
    answer = run("--help")
    assert answer.exit_code == 0
    for name, line in COMMANDS.items():
        assert name in answer.output
        assert line.split()[0] in answer.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name):
    answer = run(name, "--help")
    assert answer.exit_code == 0
    assert "Usage" in answer.output


def test_unknown_command_is_misuse():
    answer = run("dispatch")
    assert answer.exit_code == 2
    assert "dispatch" in answer.output
