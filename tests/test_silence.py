"""The toolkit talks to nobody, and its libraries write nothing about who runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.checkpoint import opening
from mtad.compiled import cache_folder
from tests.support.paths import ROOT

PACKAGES = ("engines", "export", "runtime")
VARIABLES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED")
ALONE = ["unshare", "--map-root-user", "--net", "--mount"]


def alone(code: str, folder: Path) -> dict[str, Any]:
    """Run a program in a network of its own: what it looked up, and what it wrote into an empty home."""
    if subprocess.run([*ALONE, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces for users here")
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["NUMBA_CACHE_DIR"] = str(cache_folder().parent)  # what is compiled is not what it is about
    command = [*ALONE, sys.executable, "-m", "tests.support.silent", code, str(folder)]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["status"] == 0, found["error"]
    return found


def test_a_name_that_is_looked_up_would_be_noticed(tmp_path: Path) -> None:
    code = "import contextlib, socket\nwith contextlib.suppress(OSError): socket.getaddrinfo('example.org', 80)"
    assert "example.org" in alone(code, tmp_path)["asked"]


@pytest.mark.parametrize("package", PACKAGES)
def test_telemetry_is_off_before_a_library_is_imported(package: str) -> None:
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("onnxruntime", "huggingface_hub", "ray"):
            missing = [one for one in {VARIABLES} if one not in os.environ]
            assert not missing, (name, missing)
sys.meta_path.insert(0, Watch())
import {package}
import mtad
assert all(name in os.environ for name in {VARIABLES})
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


@pytest.mark.slow
def test_a_pair_is_opened_and_decodes_without_asking_anybody_and_openvino_reports_to_a_stub(
    pair_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    code = f"""
from engines.openvino.graph import load_openvino
from mtad import LLM
llm = LLM({str(pair_folders("onnx"))!r})
assert llm.generate("S", None)[0].token_ids
load_openvino()
from openvino.tools.ovc import telemetry_utils
assert telemetry_utils.tm.__name__ == "openvino.tools.ovc.telemetry_stub", telemetry_utils.tm
"""
    found = alone(code, tmp_path)
    assert found["asked"] == []
    assert not [path for path in found["written"] if "Microsoft" in path], "ONNX Runtime's device id"


def test_no_code_of_a_checkpoint_is_ever_run() -> None:
    calls = ("from_pretrained(", "from_config(")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text().replace("PeftModel.from_pretrained(", "")  # it reads weights and one JSON file
            for call in calls:
                for part in text.split(f".{call}")[1:]:
                    given = part.split(")\n")[0].replace("**given", "**opening(")  # which is made of it
                    assert "trust_remote_code=False" in given or "**opening(" in given, f"{path.name}: {call}"
    assert opening(None)["trust_remote_code"] is False
