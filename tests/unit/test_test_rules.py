"""The rules of tests/conftest.py: skips stay honest, blocking and lost errors are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"


def outcome(folder: Path, text: str = "", *, require_all: bool = False) -> tuple[int, str]:
    """Exit code and output of pytest on ``folder`` with our conftest and settings."""
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    if text:
        (folder / "test_it.py").write_text(text, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    where = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *where],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "CACHEFLOW_REQUIRE_ALL": "1" if require_all else "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_skips_fail_where_nothing_may_be_missing(tmp_path: Path) -> None:
    """Under CACHEFLOW_REQUIRE_ALL a skip fails unless its reason is allowed, in a test as well as
    for a whole module; without it skips are skips."""
    for name, reason in (("cuda", "CUDA: none"), ("some", "capability: x"), ("fio", "no fio")):
        skip = f"pytest.skip({reason!r}, allow_module_level=True)"
        (tmp_path / f"test_{name}_whole.py").write_text(f"import pytest\n{skip}\n")
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\ndef test_it():\n    {skip}\n")
    code, output = outcome(tmp_path)
    assert code in (0, 5), output
    assert "6 skipped" in output
    code, output = outcome(tmp_path, require_all=True)
    assert code != 0, output
    assert "skipped although CACHEFLOW_REQUIRE_ALL is set: Skipped: no fio" in output
    assert "CUDA: none" not in output.partition("short test summary")[0]
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR "))]
    assert {line.split()[1].partition("::")[0] for line in failed} == {
        "test_fio.py",
        "test_fio_whole.py",
    }


def test_async_tests_choose_their_loops(tmp_path: Path) -> None:
    """Async tests run on uvloop, and on asyncio's own loop too when marked `both_loops`."""
    text = (
        "import asyncio, pytest\n"
        "async def test_one():\n"
        "    assert 'uvloop' in type(asyncio.get_running_loop()).__module__\n"
        "@pytest.mark.both_loops\n"
        "async def test_two():\n"
        "    pass\n"
    )
    code, output = outcome(tmp_path, text)
    assert code == 0, output
    assert "3 passed" in output


def test_async_tests_are_not_without_the_tracer(tmp_path: Path) -> None:
    """It would begin again under the watch on locks, and trip it in some later test."""
    text = "import pytest\n@pytest.mark.no_cover\n{} test_it():\n    pass\n"
    assert outcome(tmp_path, text.format("def"))[0] == 0
    assert outcome(tmp_path, text.format("async def"))[0] == 4  # a usage error


def test_lost_errors_fail_the_test(tmp_path: Path) -> None:
    """A task whose exception nobody retrieves fails the test that made it."""
    text = (
        "import asyncio\n"
        "async def boom():\n"
        "    raise ValueError('lost')\n"
        "async def test_it():\n"
        "    task = asyncio.create_task(boom())\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.sleep(0)\n"
        "    del task\n"
    )
    code, output = outcome(tmp_path, text)
    assert code == 1, output
    assert "never retrieved" in output


def test_blocking_the_loop_in_our_code_fails_the_test(tmp_path: Path) -> None:
    """A sleep of our own code on the event loop is an error; the mark `allow_blocking` permits."""
    text = (
        "import time, pytest\n"
        "from cacheflow import clock\n"
        "exec(compile('def nap():\\n    time.sleep(0.001)', clock.__file__, 'exec'))\n"
        "async def test_it():\n"
        "    nap()\n"
        "@pytest.mark.allow_blocking\n"
        "async def test_allowed():\n"
        "    nap()\n"
    )
    code, output = outcome(tmp_path, text)
    assert code == 1, output
    assert "BlockingError" in output
    assert "1 failed, 1 passed" in output
