"""Opening a pair folder that an earlier version has written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtad.methods import REMOVED
from mtad.params import DecodingParams
from runtime.pair import open_pair


@pytest.mark.parametrize("method", REMOVED)
def test_a_pair_that_names_a_method_that_has_left_opens_with_the_default_and_one_warning(
    method: str, pair_folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pair"
    shutil.copytree(pair_folders("onnx"), folder)
    values = json.loads((folder / "pair.json").read_text())
    values["defaults"] = {"method": method, "accept_threshold": 0.25, "draft_len": 3}
    (folder / "pair.json").write_text(json.dumps(values))
    assert open_pair(folder).defaults == DecodingParams(draft_len=3)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"pair.json names the method {method}, which is no longer there; block takes its place"
    ]
