"""A real Prometheus scrapes a live run; every query of every dashboard and rule is asked of it.

Grafana itself is not run: it cannot be installed here. What its panels show comes from these
queries; the dashboards' JSON is made by Grafana's own SDK types.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.metrics import PrometheusObserver, serve_metrics, watch
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.types import (
    Evicted,
    LoadEnded,
    LoadOutcome,
    Span,
    StoreDropped,
    TierDown,
    TierUp,
    TileGrid,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "dashboards"
PROMPT = [(7 * i) % 320 for i in range(300)]

ABNORMAL = (
    LoadEnded("x", "disk", 0, Span(0, 1), 1, 10, 0.0, 0.1, LoadOutcome.FAILED, "gone"),
    LoadEnded("x", "disk", 0, Span(0, 1), 1, 10, 0.1, 0.2, LoadOutcome.DROPPED),
    StoreDropped("disk", "leased", 1, 10, 0.0),
    Evicted("disk", "capacity", 1, 10, 0.0),
    TierDown("disk", "load", "it failed", 0.0),
    TierUp("disk", "load", 1.0, 1.0),
)
"""What a healthy run has none of, told to the observer as the core would."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A server with the project's rules, and the port that it scrapes every second."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    port, scraped = _free_port(), _free_port()
    rules = (BOARDS / "prometheus" / "rules.yml").read_text()
    (folder / "rules.yml").write_text(rules.replace("interval: 30s", "interval: 1s"))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": "cacheflow",
                "scrape_timeout": "1s",
                "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(f"{url}/-/ready"), "prometheus is ready")
        yield url, scraped
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def observer(prometheus: tuple[str, int]) -> Iterator[PrometheusObserver]:
    """One whose endpoint is the one that is scraped."""
    observer = PrometheusObserver()
    with serve_metrics(observer, prometheus[1]):
        yield observer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _until(true: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Ask another process again and again: it cannot call us back."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def _query(server: str, expr: str) -> list[dict[str, Any]]:
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expr}: {error.read().decode()}") from error
    return found


@contextmanager
def _sources() -> Iterator[None]:
    """The dashboards' scripts import each other by bare name."""
    sys.path.insert(0, str(BOARDS / "source"))
    try:
        yield
    finally:
        sys.path.remove(str(BOARDS / "source"))


@asynccontextmanager
async def _serving(model: Path, store: Path, observer: PrometheusObserver) -> AsyncIterator[Any]:
    engine = await TransformersEngine.open_model(
        model, dtype="float32", grid=TileGrid((32, 32, 64), 128), chunk_tokens=16, kv_bytes=1 << 28
    )
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(store)}}
    settings = Settings(
        tiers=[{**tier, "capacity_bytes": 1 << 26}], staging_bytes=1 << 22, policy="adaptive"
    )
    try:
        async with CacheFlow.open(settings, engine=engine, observer=observer) as flow:
            with watch(
                observer, flow.restorer, sessions=flow, model="tiny", policy=settings.policy
            ):
                yield flow
    finally:
        await engine.aclose()


async def _turn(flow: Any, name: str, prompt: list[int]) -> None:
    session = flow.session(name)
    async for _ in session.generate(prompt, max_new_tokens=2):
        pass
    await session.forget()


async def test_every_panel_and_rule_has_data(
    prometheus: tuple[str, int], observer: PrometheusObserver, model_folder: Path, tmp_path: Path
) -> None:
    """Of our own dashboards every query gives series; vLLM's, which is not run here, are taken by
    the server and give none. A renamed metric fails here."""
    with _sources():
        from queries import queries
    url, _ = prometheus
    async with _serving(model_folder, tmp_path / "store", observer) as flow:
        await _turn(flow, "a", PROMPT)
        for event in ABNORMAL:
            observer(event)
        await asyncio.to_thread(_more_scrapes, url)
        await _turn(flow, "b", PROMPT)
        await asyncio.to_thread(_more_scrapes, url)
        asked = list(queries(BOARDS / "grafana", window="1m"))
        empty = await asyncio.to_thread(_empty, url, asked)
        assert [query for query in empty if "vllm:" not in query.expr] == []
        rules = await asyncio.to_thread(_rules, url)
    assert len(rules) >= 15
    assert {rule["health"] for rule in rules} == {"ok"}, rules


def _empty(server: str, asked: list[Any], seconds: float = 30) -> list[Any]:
    """Queries that give nothing however often they are asked: on a busy machine a scrape may come
    too late, and then nothing is known for the moment. Those for vLLM are asked once."""
    deadline, left = time.monotonic() + seconds, asked
    while True:
        left = [query for query in left if not _query(server, query.expr)]
        ours = [query for query in left if "vllm:" not in query.expr]
        if not ours or time.monotonic() > deadline:
            return left
        _more_scrapes(server)


def _more_scrapes(server: str) -> None:
    """Wait for four successful ones from now on."""
    scrapes = 'sum(sum_over_time(up{job="cacheflow"}[10m]))'

    def done() -> float:
        return float((_query(server, scrapes) or [{"value": [0, 0]}])[0]["value"][1])

    before = done()
    _until(lambda: done() >= before + 4, "four more scrapes")


def _rules(server: str) -> list[dict[str, Any]]:
    """All rules once each has been evaluated."""
    rules: list[dict[str, Any]] = []

    def evaluated() -> bool:
        with urllib.request.urlopen(f"{server}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        rules[:] = [rule for group in groups for rule in group["rules"]]
        return bool(rules) and all(rule["health"] != "unknown" for rule in rules)

    _until(evaluated, "all rules are evaluated")
    return rules


def test_rules_pass_their_own_tests() -> None:
    """promtool: configuration, syntax, and what each alert says of made-up series."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    folder = BOARDS / "prometheus"
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_up_to_date() -> None:
    """The committed JSON is what the code makes."""
    command = [sys.executable, str(BOARDS / "source" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr


async def test_the_preview_page_shows_the_panels(
    prometheus: tuple[str, int], observer: PrometheusObserver, model_folder: Path, tmp_path: Path
) -> None:
    """Opened in a real headless browser: every panel's title, and a value where there is one."""
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with _sources():
        from preview import page
    url, _ = prometheus
    async with _serving(model_folder, tmp_path / "store", observer) as flow:
        await _turn(flow, "a", PROMPT)
        await asyncio.to_thread(_more_scrapes, url)
        await _turn(flow, "b", PROMPT)
        await asyncio.to_thread(_more_scrapes, url)
        html = await asyncio.to_thread(page, url, BOARDS / "grafana")
    (tmp_path / "preview.html").write_text(html)
    seen = await asyncio.to_thread(_opened_in_a_browser, tmp_path)
    for board in (BOARDS / "grafana").glob("*.json"):
        for panel in json.loads(board.read_text())["panels"]:
            assert f"<h3>{panel['title']}</h3>" in seen
    assert "<li>hit: " in seen, "requests by outcome"
    assert "<polyline" in seen


def _opened_in_a_browser(folder: Path) -> str:
    command = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}", "--dump-dom"),
        (folder / "preview.html").as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout
