"""Folders that engines and their files lie in."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from engines.folder import cache_folder, write_folder
from mtad.errors import Failed


def test_the_cache_folder_is_the_users_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAD_CACHE", "/one")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("MTAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/two/mtad")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "mtad"


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_is_said_with_the_space_that_is_left_and_leaves_nothing(
    kind: type[Exception], tmp_path: Path
) -> None:
    said = r"65536 requested and 0 written \(.* of the disk are free\)"
    with pytest.raises(Failed, match=said), write_folder(tmp_path / "pair"):
        raise kind("65536 requested and 0 written")  # NumPy's words
    assert not list(tmp_path.iterdir())
