"""Where a provider is not named: what the CPU and the models say, or a machine times both for an engine once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineSpec
from engines.folder import read_spec
from engines.placement import Placement
from runtime import fastest
from runtime.fastest import fastest_placement

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
    monkeypatch.setattr("engines.openvino.graph.read_graph", lambda path, spec: None)
    monkeypatch.setattr("engines.openvino.graph.computes_bfloat16", lambda: False)
    target = replace(spec, precision="int4")
    found, why = exact_engines(Placement(), {Path("target"): target, Path("auxiliary"): spec})
    assert (found, "faster" in why, len(timed)) == (Placement(provider="cpu"), True, 2)
    for placement, own in ((Placement(provider="openvino"), target), (Placement(kv_cache="u8"), target)):
        assert exact_engines(placement, {Path("target"): own})[0].provider == "openvino"
    assert exact_engines(Placement(), {Path("target"): spec, Path("auxiliary"): target})[0].provider == "cpu"
    assert len(timed) == 2


@pytest.fixture
def provider_of(
    pair_folders: Callable[[str], Path],
    exact_engines: Callable[..., tuple[Placement, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[str, str]]:
    """What provider `auto` is for the pair's engines, changed like this, on a device; and why."""

    def choose(device: str = "cpu", kv_cache: str | None = None, **changes: Any) -> tuple[str, str]:
        monkeypatch.setattr("engines.placement._resolve_device", lambda device: device)  # no GPU is looked for
        monkeypatch.setattr(fastest, "fastest_placement", lambda folder, spec, placement: placement)  # nothing is timed
        placement = Placement(device, kv_cache=kv_cache)
        folder = pair_folders("onnx")
        engines = {folder / name: replace(read_spec(folder / name), **changes) for name in ("target", "auxiliary")}
        chosen, why = exact_engines(placement, engines)
        return str(chosen.provider), why

    return choose


def test_auto_is_openvino_on_cpus_with_bfloat16_where_it_knows_the_models_else_onnx_runtime_and_says_why(
    provider_of: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.openvino.graph.computes_bfloat16", lambda: False)
    provider, why = provider_of()
    assert (provider, "bfloat16" in why) == ("cpu", True)
    assert provider_of(kv_cache="u8")[0] == provider_of(precision="int4")[0] == "openvino"
    monkeypatch.setattr("engines.openvino.graph.computes_bfloat16", lambda: True)
    assert provider_of()[0] == "openvino"
    assert provider_of("cuda:0") == ("cuda", "--provider auto is cuda on cuda:0")
    assert provider_of(format="torch") == ("None", "")
    provider, why = provider_of(attention="decomposed")
    assert (provider, "its attention is decomposed" in why) == ("cpu", True)
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "aarch64")
        provider, why = provider_of()
    assert (provider, "aarch64" in why) == ("cpu", True)
    monkeypatch.setitem(sys.modules, "openvino", None)
    provider, why = provider_of()
    assert (provider, "extra openvino" in why) == ("cpu", True)
