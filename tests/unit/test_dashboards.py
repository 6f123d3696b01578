"""What is in dashboards/ is well-formed by whoever reads it, and each alert leads somewhere.

What a real Prometheus says to the queries is in tests/e2e/test_monitoring.py.
"""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from cacheflow.plugins.vllm.counts import METRICS

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "dashboards"
EACH = pytest.mark.parametrize(
    "path", sorted((BOARDS / "grafana").glob("*.json")), ids=lambda path: str(path.stem)
)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["panels"]
    return found


def without_empty(value: Any) -> Any:
    """``value`` without empty objects inside."""
    if isinstance(value, dict):
        pairs = {key: without_empty(each) for key, each in value.items()}
        return {key: each for key, each in pairs.items() if each != {}}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


@EACH
def test_grafanas_own_types_read_it_without_loss(path: Path) -> None:
    """Decoded into the models of Grafana's SDK and encoded again, nothing is missing but objects
    without contents."""
    register_default_plugins()
    written = json.loads(path.read_text(encoding="utf-8"))
    read = Dashboard.from_json(written)
    again = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(read))
    assert without_empty(again) == without_empty(written)
    assert len(read.panels or []) == len(panels(path)) >= 8


@EACH
def test_a_board_is_whole(path: Path) -> None:
    """Every variable that a query names is there, every panel says what it shows and from which
    data source, and none lies over another."""
    board = json.loads(path.read_text(encoding="utf-8"))
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables, panel["title"]
    for one, other in combinations((panel["gridPos"] for panel in board["panels"]), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_uids_are_unique() -> None:
    """Two boards with one uid would replace each other."""
    paths = sorted((BOARDS / "grafana").glob("*.json"))
    uids = [json.loads(path.read_text(encoding="utf-8"))["uid"] for path in paths]
    assert len(set(uids)) == len(paths) == 5


def test_what_is_asked_of_vllm_is_what_the_connector_counts() -> None:
    """Each counter of the connector is in a panel, and none is asked for that there is not."""
    text = (BOARDS / "grafana" / "vllm.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"vllm:cacheflow_\w+", text))
    assert asked == {f"{name}_total" for name in METRICS}


def alerts() -> list[dict[str, Any]]:
    groups = document(BOARDS / "prometheus" / "rules.yml")["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_has_a_runbook_and_a_test(alert: dict[str, Any]) -> None:
    """Its runbook line names a paragraph that is in docs/monitoring.md, and promtool tests it."""
    found = re.search(r"docs/monitoring\.md, '([^']+)'", alert["annotations"]["runbook"])
    assert found is not None
    runbook = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").split("## Runbook")[1]
    assert f"**{found[1]}.**" in runbook
    tests = document(BOARDS / "prometheus" / "rules_test.yml")["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert alert["alert"] in fired


def compose() -> dict[str, Any]:
    return document(BOARDS / "compose.yml")


def test_the_compose_file_fits_its_specification() -> None:
    """By the schema of the Compose specification."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validate(compose(), schema)


def test_docker_compose_takes_it() -> None:
    """Its own reading of the file: volumes, interpolation, dependencies. Starts nothing."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    command = ["docker-compose", "-f", str(BOARDS / "compose.yml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_mounted_is_there_and_meets_its_settings() -> None:
    """Each mounted folder exists; Grafana is told of the dashboards, and of Prometheus, where they
    are mounted and listens."""
    services = compose()["services"]
    mounts = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (BOARDS / source).is_dir(), volume
                mounts[target] = BOARDS / source
    [provider] = document(BOARDS / "provisioning/dashboards/cacheflow.yml")["providers"]
    boards = mounts[provider["options"]["path"]]
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (boards / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]
    [source] = document(BOARDS / "provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert (mounts["/etc/prometheus"] / "prometheus.yml").is_file()
    assert "/etc/grafana/provisioning" in mounts
