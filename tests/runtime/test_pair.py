"""Opening a pair folder: of an earlier version, one whose files are links, and one that knows what drafts cost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from engines.folder import read_json, write_json
from engines.kinds import KINDS
from engines.memory import Memory
from engines.placement import Placement
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import pair
from runtime.pair import open_pair, store_costs
from runtime.speculation.lengths import DraftCosts


def test_a_pair_that_names_a_method_that_has_left_opens_with_the_default_and_one_warning(
    pair_folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(pair_folders("torch"), tmp_path / "pair"))
    defaults = {"method": "threshold", "accept_threshold": 0.25, "draft_len": 3}
    write_json(folder / "pair.json", read_json(folder, "pair.json") | {"defaults": defaults})
    assert open_pair(folder).defaults == DecodingParams(draft_len=3)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "pair.json names the method threshold, which is no longer there; block takes its place"
    ]


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
    with pytest.raises(InvalidInput, match="level = "):
        drafted({"level": -1.0})


def test_an_export_measures_what_drafts_cost(pair_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair_folder, tmp_path / "pair"))
    store_costs(folder)
    costs = read_json(folder, "pair.json")["costs"]
    assert costs["level"] > 0
    assert costs["node"] >= 0
    assert open_pair(folder).costs == DraftCosts(**costs)


@pytest.mark.parametrize(("format", "measured"), [("onnx", True), ("tensorrt", False)])
def test_what_runs_on_a_gpu_whatever_is_said_is_not_measured_against_the_hosts_memory(
    format: str, measured: bool, pair_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Memory]()
    kind = next(kind for kind in KINDS if kind.format == format)
    monkeypatch.setattr(Placement, "check", lambda self, spec: kind)
    monkeypatch.setattr(pair, "_check_memory", asked.append)
    monkeypatch.setattr(pair, "open_engine", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        open_pair(pair_folder)
    assert bool(asked) == measured
