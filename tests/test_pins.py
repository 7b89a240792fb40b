"""The versions that TensorRT-LLM's environment has are ones this package says it runs with."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from runtime.tensorrt_llm.compat import ENGINES, WORKER
from tests.support.paths import ROOT

THEIRS = (
    *("h5py==3.12.1", "numpy<2", "nvidia-modelopt[torch]~=0.37.0", "onnx>=1.18,<1.20", "setuptools<80"),
    *("tensorrt~=10.14.1", "torch>=2.9.1,<=2.10.0a0", "transformers==4.57.3"),
)
"""Of the metadata of TensorRT-LLM 1.2.1 (its source distribution's PKG-INFO), what concerns packages used here."""
PYTHON, TORCH = "3.12.0", "2.9.1"
"""Of its wheels, 3.10 and 3.12; the torch it comes with."""


def versions() -> dict[str, Version]:
    """What constraints-tensorrt-llm.txt pins, and torch."""
    lines = (ROOT / "constraints-tensorrt-llm.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pins} | {"torch": Version(TORCH)}


def ours() -> list[Requirement]:
    """What this package requires, with the extra of its server."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["serve"]]))


@pytest.mark.parametrize("requirement", THEIRS)
def test_the_pins_are_the_librarys(requirement: str) -> None:
    asked = Requirement(requirement)
    pin = versions().get(canonicalize_name(asked.name))
    assert pin is None or asked.specifier.contains(pin)


def test_the_workers_torch_is_within_what_this_package_requires() -> None:
    """TensorRT-LLM 1.4.0rc1 comes with torch 2.14 and Triton 3.8, and needs no constraints beside its own pins."""
    for asked in ours():
        if asked.name == "torch":
            assert asked.specifier.contains("2.14.0")


def test_the_pins_are_within_what_this_package_requires() -> None:
    pins, met = versions(), set()
    for asked in ours():
        pin = pins.get(canonicalize_name(asked.name))
        if pin is not None:
            assert asked.specifier.contains(pin), f"{asked} and {pin}"
            met.add(canonicalize_name(asked.name))
    assert met >= {"numpy", "onnx", "tokenizers", "torch", "transformers", "huggingface-hub"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(PYTHON)


@pytest.mark.parametrize(("extra", "release"), [("tensorrt-llm", ENGINES), ("tensorrt-llm-worker", WORKER)])
def test_the_extra_names_the_version_this_is_written_for(extra: str, release: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = map(Requirement, project["optional-dependencies"][extra])
    assert str(asked.specifier) == f"=={release}"
    for platform, python, wanted in (("Linux", "3.12", True), ("Linux", "3.11", False), ("Windows", "3.12", False)):
        environment = {"platform_system": platform, "python_version": python}
        assert asked.marker is not None
        assert asked.marker.evaluate(environment) == wanted
