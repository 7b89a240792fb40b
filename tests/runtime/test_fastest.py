"""Where a provider is not named, a machine times both for an engine once, and goes by it from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines.base import EngineSpec
from engines.folder import read_spec
from engines.placement import Placement
from runtime import fastest
from runtime.fastest import choose_provider, fastest_placement

OPENVINO = Placement(provider="openvino", threads=2, compute="float32")


@pytest.fixture
def spec(pair_folders: Callable[[str], Path]) -> EngineSpec:
    return read_spec(pair_folders("onnx") / "target")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Placement]:
    """Where engines were opened, on a machine on which ONNX Runtime is the faster one and that has timed none."""
    opened = list[Placement]()

    def open_engine(folder: Path, placement: Placement, rows: int) -> str:
        opened.append(placement)
        return str(placement.provider)

    monkeypatch.setattr(fastest, "open_engine", open_engine)
    monkeypatch.setattr(fastest, "draft_seconds", lambda engine, rows: {"openvino": 2.0, "cpu": 1.0}[engine])
    monkeypatch.setattr(fastest, "cache_folder", lambda: tmp_path)
    return opened


def test_the_faster_provider_is_found_once_for_an_engine_and_its_threads(
    spec: EngineSpec, timed: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Placement(provider="cpu", threads=2)
    assert fastest_placement(Path("a"), spec, OPENVINO) == cpu
    assert timed == [OPENVINO, cpu]
    monkeypatch.setattr(fastest, "draft_seconds", lambda engine, rows: {"openvino": 1.0, "cpu": 2.0}[engine])
    assert fastest_placement(Path("moved"), spec, OPENVINO) == cpu
    assert len(timed) == 2
    for other, threads in ((replace(spec, build_hash="another"), 2), (spec, 1)):
        own = replace(OPENVINO, threads=threads)
        assert fastest_placement(Path("a"), other, own) is own
    assert len(timed) == 6


def test_auto_times_both_for_a_quantized_target_and_for_nothing_else(
    spec: EngineSpec,
    timed: list[Placement],
    exact_engines: Callable[..., tuple[Placement, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Placement, "chosen", exact_engines)
    monkeypatch.setattr("engines.openvino.graph.read_graph", lambda path, spec: None)
    monkeypatch.setattr("engines.openvino.graph.computes_bfloat16", lambda: False)
    target = replace(spec, precision="int4")
    found, why = choose_provider(Placement(), {Path("target"): target, Path("auxiliary"): spec})
    assert (found, "faster" in why, len(timed)) == (Placement(provider="cpu"), True, 2)
    for placement, own in ((Placement(provider="openvino"), target), (Placement(kv_cache="u8"), target)):
        assert choose_provider(placement, {Path("target"): own})[0].provider == "openvino"
    assert choose_provider(Placement(), {Path("target"): spec, Path("auxiliary"): target})[0].provider == "cpu"
    assert len(timed) == 2
