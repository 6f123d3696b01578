"""What an installed wheel contains, and under which names its modules are imported."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPING = {
    "cacheflow": ROOT / "cacheflow",
    "cacheflow/plugins": ROOT / "plugins",
    "cacheflow/storage_backends": ROOT / "storage_backends",
}

NEEDS_VLLM = tuple(
    f"cacheflow.plugins.vllm.{name}"
    for name in ("connector", "halves", "messages", "metrics", "scheduler")
)
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
assert importlib.util.find_spec("storage_backends") is None, "storage_backends is importable"
assert importlib.util.find_spec("plugins") is None, "plugins is importable"
import cacheflow
names = {}
assert Path(cacheflow.__file__).is_relative_to(sys.argv[1]), cacheflow.__file__
for module in pkgutil.walk_packages(cacheflow.__path__, "cacheflow."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # vLLM has an environment of its own
        assert error.name == "vllm" and module.name in sys.argv[2].split(), module.name
        names[importlib.util.find_spec(module.name).origin] = [module.name]
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith(sys.argv[1]):
        names.setdefault(file, []).append(name)
twice = {file: found for file, found in names.items() if len(found) > 1}
assert not twice, twice
print(len(names))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("cacheflow", "storage_backends", "plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run([sys.executable, *command], cwd=source, check=True, capture_output=True)
    return next((source / "dist").glob("*.whl"))


def test_wheel_holds_exactly_the_sources(wheel: Path) -> None:
    """Every module of the three folders is in the wheel under `cacheflow`, and nothing else is."""
    expected = {"cacheflow/py.typed", "cacheflow/__init__.pyi"}
    for package, folder in MAPPING.items():
        expected |= {f"{package}/{p.relative_to(folder)}" for p in folder.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected, "is the package listed in pyproject.toml, [tool.setuptools]?"


def test_wheel_is_called_as_documented(wheel: Path) -> None:
    """The distribution is `cacheflow-kv`, its only top-level name `cacheflow`, with a licence."""
    with zipfile.ZipFile(wheel) as archive:
        info = next(n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n)
        metadata = archive.read(f"{info}/METADATA").decode()
        points = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["cacheflow"]
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "Name: cacheflow-kv\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "cacheflow = cacheflow.cli:main" in points


def test_installed_modules_have_one_name_each(wheel: Path, tmp_path: Path) -> None:
    """From an installed wheel all modules import without a warning, each file under one name, and
    neither `storage_backends` nor `plugins` is importable."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(site), " ".join(NEEDS_VLLM)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(len(list(f.rglob("*.py"))) for f in MAPPING.values())


@pytest.mark.parametrize(
    "folder", ["cacheflow", "storage_backends", "plugins", "tests", "benchmarks", "examples"]
)
def test_no_source_imports_the_generic_names(folder: str) -> None:
    """No file of the checkout imports `storage_backends` or `plugins` from the top level."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            tops = {name.partition(".")[0] for name in names}
            assert not tops & {"storage_backends", "plugins"}, f"{path}:{node}"


def test_lock_pins_everything() -> None:
    """Each line of the lock files pins one version exactly, and names no host, path or index."""
    for name in ("demo.txt", "dev.txt", "oldest.txt", "vllm.txt"):
        for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("#") or line == "-r demo.txt":
                continue
            package, _, version = line.partition("==")
            assert package, line
            assert version[:1].isdigit(), line
            assert "+" not in version, f"{line}: a local version exists on one machine only"
            assert "/" not in line, line


def test_the_oldest_transformers_is_the_one_that_is_tested() -> None:
    """`make test-oldest` runs the engine on the lower bound that pyproject.toml promises."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [bound] = (
        requirement
        for requirement in project["optional-dependencies"]["transformers"]
        if requirement.startswith("transformers>=")
    )
    pins = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    assert f"{bound.replace('>=', '==')}.0" in pins
