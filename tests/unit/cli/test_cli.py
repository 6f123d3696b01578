"""The command as a whole: help, version, clean errors, and what it costs to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow import __version__
from cacheflow.cli import app


def test_version() -> None:
    """`--version` prints the version of the installed distribution."""
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"cacheflow {__version__}"


def test_help_names_each_command() -> None:
    """`--help` and a bare call list the commands."""
    for arguments in (["--help"], ["-h"], []):
        output = CliRunner().invoke(app, arguments).output
        assert "doctor" in output
        assert "store" in output


def test_unknown_command_is_one_message() -> None:
    """A command that is not there exits with 2 and no traceback."""
    result = CliRunner().invoke(app, ["stroe"])
    assert result.exit_code == 2
    assert "No such command" in result.output
    assert "Traceback" not in result.output


def test_starting_does_not_import_torch() -> None:
    """Help stays instant: neither torch nor matplotlib is imported to show it."""
    code = (
        "import sys, cacheflow.cli\n"
        "print([n for n in ('torch', 'matplotlib', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_errors_reach_the_shell_as_one_line() -> None:
    """Run as a person runs it, an error is one line on standard error and exit code 2."""
    command = [sys.executable, "-c", "from cacheflow.cli import main; main()"]
    done = subprocess.run(
        [*command, "store", "ls", "/nowhere/at/all"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["simulate", "--requests", "2"], ["--help"]])
def test_output_to_a_full_disk_is_one_line(arguments: list[str]) -> None:
    """And not the traceback of whoever draws tables."""
    command = "from cacheflow.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.strip() == "error: output cannot be written: No space left on device"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    """Their numbers are not given to files and sockets, which libuv could not close then."""
    command = f'"{sys.executable}" -c "from cacheflow.cli import main; main()" store ls "$1"'
    (tmp_path / "tenant").mkdir()
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}", "sh", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 2  # this folder is no store
    assert bool(done.stderr) is ("2>" not in closed)
