"""A pair folder: one of links opens; costs of drafts and a tuning are kept in it, or nothing changes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.folder import read_json, write_json
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.pair import open_pair, store_costs, write_tuning
from runtime.speculation.planner import DraftCosts

EXPORTED: dict[str, Any] = {"method": "mtad", "accept_threshold": 0.4, "top_k": 7}


@pytest.mark.parametrize("linked", ["every file", "weights"])
def test_a_pair_opens_from_a_cache_whose_files_are_links(linked: str, pair_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "pair"
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(path for path in pair_folder.rglob("*") if path.is_file())):
        place, blob = folder / path.relative_to(pair_folder), tmp_path / "blobs" / str(number)
        place.parent.mkdir(parents=True, exist_ok=True)
        if linked == "weights" and path.suffix not in (".data", ".safetensors"):
            place.write_bytes(path.read_bytes())
            continue
        blob.write_bytes(path.read_bytes())
        place.symlink_to(os.path.relpath(blob, place.parent))
    (tmp_path / "pair").symlink_to(folder)
    assert LLM(tmp_path / "pair", RuntimeConfig(threads=1)).generate("S")[0].token_ids


def test_costs_in_the_pairs_folder_decide_how_long_seeded_drafts_are(pair_folder: Path, tmp_path: Path) -> None:
    def drafted(costs: object) -> float:
        folder = Path(shutil.copytree(pair_folder, tmp_path / "pair", dirs_exist_ok=True))
        write_json(folder / "pair.json", read_json(folder, "pair.json") | {"costs": costs})
        params = DecodingParams(method="mtad", draft_len="auto", max_tokens=24, ignore_eos=True, seed=5)
        (result,) = LLM(folder, RuntimeConfig(threads=1)).generate("S", params)
        return result.statistics.drafted / result.statistics.target_passes

    assert drafted({"level": 0.01, "node": 0.0}) > 3 * drafted({"level": 9.0, "node": 0.0})
    with pytest.raises(InvalidInput, match="costs level"):
        drafted({"level": -1.0})


def test_an_export_measures_what_drafts_cost(pair_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair_folder, tmp_path / "pair"))
    store_costs(folder)
    costs = read_json(folder, "pair.json")["costs"]
    assert costs["level"] > 0
    assert costs["node"] >= 0
    assert open_pair(folder).costs == DraftCosts(**costs)


@pytest.fixture
def pair(pair_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to write to, with defaults."""
    folder = Path(shutil.copytree(pair_folders("torch"), tmp_path / "pair"))
    write_json(folder / "pair.json", read_json(folder, "pair.json") | {"defaults": EXPORTED})
    return folder


def test_tuning_lies_over_what_was_exported_and_the_next_one_replaces_it(pair: Path) -> None:
    write_tuning(pair, {"method": "mmtad", "draft_len": 6, "temperature": 0.5}, {"goal": "first"})
    first = open_pair(pair).defaults
    assert first == DecodingParams(**{**EXPORTED, "method": "mmtad", "draft_len": 6, "temperature": 0.5})
    write_tuning(pair, {"beam_width": 2}, {"goal": "second"})
    assert open_pair(pair).defaults == DecodingParams(**EXPORTED, beam_width=2)
    assert read_json(pair, "pair.json")["tuning"] == {"goal": "second", "exported_defaults": EXPORTED}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = (pair / "pair.json").read_bytes(), sorted(pair.iterdir())
    with pytest.raises(InvalidInput, match="gamma"):
        write_tuning(pair, {"gamma": 3}, {})
    with pytest.raises(ValueError, match="JSON"):
        write_tuning(pair, {"beam_width": 2}, {"speed": math.nan})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInput, match="No space"):
        write_tuning(pair, {"beam_width": 2}, {})
    assert (pair / "pair.json").read_bytes() == before
    assert sorted(pair.iterdir()) == files


def test_a_reader_never_sees_half_a_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = pair / "pair.json", []
    real = os.fsync

    def look(descriptor: int) -> None:
        seen.append(json.loads(path.read_text()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_json(path, {"defaults": {}})
    assert "vocabulary_hash" in seen[0], "while the new one is written, the old one is there"
    assert json.loads(path.read_text()) == {"version": 1, "defaults": {}}


@pytest.mark.parametrize("damage", [{"tuning": 3}, {"tuning": {}}, {"tuning": {"exported_defaults": None}}])
def test_a_damaged_tuning_is_refused_by_name(pair: Path, damage: dict[str, Any]) -> None:
    write_json(pair / "pair.json", {**read_json(pair, "pair.json"), **damage})
    with pytest.raises(InvalidInput) as caught:
        write_tuning(pair, {}, {})
    assert caught.value.field == "pair.json defaults"
