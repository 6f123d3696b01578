"""Settings: what they accept, and that each mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheflow.errors import ConfigError
from cacheflow.settings import Settings, TierSettings, default_cache_dir


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"CACHEFLOW_{name.upper()}", raising=False)


def test_defaults_need_nothing() -> None:
    """Without any setting there are usable defaults and no tier."""
    settings = Settings()
    assert settings.policy == "adaptive"
    assert settings.tiers == ()
    assert settings.salt_bytes == b""
    assert settings.load_deadline == 30


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CACHEFLOW_*` variables set what arguments set; lists are JSON, sizes may carry a unit."""
    monkeypatch.setenv("CACHEFLOW_STAGING_BYTES", "64MiB")
    monkeypatch.setenv("CACHEFLOW_POLICY", "load")
    monkeypatch.setenv("CACHEFLOW_SALT", "tenant")
    monkeypatch.setenv(
        "CACHEFLOW_TIERS", '[{"name": "disk", "backend": "nvme", "options": {"path": "/x"}}]'
    )
    settings = Settings()
    assert settings.staging_bytes == 64 << 20
    assert settings.policy == "load"
    assert settings.salt_bytes == b"tenant"
    assert settings.tiers[0].options == {"path": "/x"}


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is passed is used, whatever the environment says."""
    monkeypatch.setenv("CACHEFLOW_POLICY", "load")
    assert Settings(policy="recompute").policy == "recompute"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polcy": "load"}, r"setting polcy: there is no such setting \(known: cache_dir"),
        ({"policy": "fastest"}, "setting policy: .*'adaptive', 'staircase', .*'recompute'"),
        ({"load_deadline": 0}, "setting load_deadline: .*greater than 0"),
        ({"load_deadline": float("inf")}, "setting load_deadline: "),
        ({"staging_bytes": "much"}, "setting staging_bytes: "),
        ({"staging_bytes": 1}, "setting staging_bytes: "),
        ({"tiers": [{"name": "a"}]}, r"setting tiers.0.backend: .*required"),
        (
            {"tiers": [{"name": "a", "backend": "x", "z": 1}]},
            "tiers.0.z: there is no such field",
        ),
        ({"tiers": [{"name": "a", "backend": "x"}] * 2}, "setting tiers: two tiers .* 'a'"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], message: str) -> None:
    """A value that cannot be used is a ConfigError that names the setting."""
    with pytest.raises(ConfigError, match=message):
        Settings(**values)


def test_mistakes_of_a_tier_alone_are_named() -> None:
    """All of them, as those of the settings, though no settings are made of it; never the values,
    which may be secrets."""
    with pytest.raises(ConfigError) as caught:
        TierSettings(name="a", backend="x", ttl=-3.25, z="s3cret")  # type: ignore[call-arg]
    assert "tier setting ttl: " in str(caught.value)
    assert "tier setting z: there is no such field (known: name, backend" in str(caught.value)
    assert not {"s3cret", "-3.25"} & set(str(caught.value).split())


def test_all_mistakes_are_named_at_once() -> None:
    """Those in the tiers among them, each with its place."""
    tiers = [{"name": "a", "backend": "x", "ttl": -1}, {"backend": "y", "eviction": "none"}]
    with pytest.raises(ConfigError) as caught:
        Settings(tiers=tiers, policy="fastest")
    for where in ("tiers.0.ttl", "tiers.1.name", "tiers.1.eviction", "policy"):
        assert f"setting {where}: " in str(caught.value)


def test_bad_json_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is not JSON is a ConfigError too."""
    monkeypatch.setenv("CACHEFLOW_TIERS", "disk")
    with pytest.raises(ConfigError, match=r"setting tiers: .*JSON"):
        Settings()


def test_salt_is_never_shown() -> None:
    """The tenant salt shows up neither in the settings' text nor in an error about them."""
    assert "s3cret" not in repr(Settings(salt="s3cret"))
    with pytest.raises(ConfigError) as caught:
        Settings(salt=b"\xffs3cret", policy="s3cret")
    assert "s3cret" not in str(caught.value)


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Converted models live in XDG_CACHE_HOME where that is set, else in ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "cacheflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "cacheflow"


async def test_a_path_with_a_nul_is_refused() -> None:
    """The message names the setting or option, before anything is opened."""
    from cacheflow.storage_backends.nvme import NvmeBackend

    with pytest.raises(ConfigError, match=r"cache_dir.*NUL"):
        Settings(cache_dir="a\0b")
    with pytest.raises(ConfigError, match=r"'path'.*NUL"):
        await NvmeBackend.open({"path": "a\0b"})
