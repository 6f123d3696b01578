"""What is in deploy/ is well-formed by the schemas of those who read it, and sets what there is."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cacheflow.pool import StoreSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
PREFIX = "CACHEFLOW_STORE_"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))
    return found


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text(encoding="utf-8")))


def environments() -> list[dict[str, str]]:
    """What each store is started with."""
    [stateful] = [each for each in manifests() if each["kind"] == "StatefulSet"]
    [container] = stateful["spec"]["template"]["spec"]["containers"]
    in_kubernetes = {each["name"]: each["value"] for each in container["env"]}
    return [in_kubernetes, *(each["environment"] for each in compose()["services"].values())]


def test_compose_file_fits_its_specification() -> None:
    """By the schema of the Compose specification."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validate(compose(), schema)


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: str(each["kind"]))
def test_manifests_fit_kubernetes(manifest: dict[str, Any]) -> None:
    """By the schemas of Kubernetes, strictly: no field that it would drop."""
    kubernetes_validate.validate(manifest, "1.34", strict=True)


@pytest.mark.parametrize("environment", environments())
def test_stores_start_with_settings_that_there_are(environment: dict[str, str]) -> None:
    """Every variable is a setting of a store, and together they are accepted."""
    values = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items()}
    assert all(name.startswith(PREFIX) for name in environment)
    assert set(values) <= set(StoreSettings.model_fields)
    settings = StoreSettings(**values, token="a token of more than 16")
    assert settings.spill == Path("/spill")


def test_memory_limits_leave_room_beside_the_arena() -> None:
    """The container may use more than its arena, and gets more time to stop than it may take."""
    [stateful] = [each for each in manifests() if each["kind"] == "StatefulSet"]
    pod = stateful["spec"]["template"]["spec"]
    [container] = pod["containers"]
    settings = StoreSettings(
        **{e["name"].removeprefix(PREFIX).lower(): e["value"] for e in container["env"]},
        token="a token of more than 16",
    )
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert settings.arena + (2 << 30) <= limit
    assert settings.drain_seconds < pod["terminationGracePeriodSeconds"]


def test_a_store_needs_no_torch() -> None:
    """What deploy/Dockerfile installs is enough: importing the store neither needs nor loads
    torch."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import cacheflow.cli.store.serving, cacheflow.pool.server\n"
        "import cacheflow.storage_backends.pool.tcp, cacheflow.storage_backends.nvme\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(tops & {'numpy', 'transformers', 'safetensors', 'obstore'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
