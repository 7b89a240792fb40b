"""Folders that engines and their files lie in."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.folder import cache_folder


def test_the_cache_folder_is_the_users_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAD_CACHE", "/one")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("MTAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/two/mtad")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "mtad"
