"""Every extra can be installed: what a resolver found for it on PyPI fits what this package asks for.

`scripts/resolve.py` recorded what. TensorRT-LLM's metadata is that of its source distributions, which is its wheels'.
"""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from engines.tensorrt_llm.library import RELEASE
from runtime.tensorrt_llm.worker import WORKER
from scripts.paths import ROOT
from scripts.resolve import ENVIRONMENTS, EXTRAS, FOLDER, required


def recorded(name: str) -> dict[str, Version]:
    lines = (line.split("==") for line in (FOLDER / f"{name}.txt").read_text().splitlines())
    return {package: Version(version) for package, version in lines}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_was_found_for_the_extras_fits_what_they_ask_for(name: str) -> None:
    found = recorded(name)
    for one in required(name):
        assert canonicalize_name(one.name) in found, f"{one} was not recorded"
        assert one.specifier.contains(found[canonicalize_name(one.name)], prereleases=True), one


def test_every_extra_was_resolved() -> None:
    assert {extra for _, _, extras in ENVIRONMENTS.values() for extra in extras} == EXTRAS.keys()


@pytest.mark.parametrize(("name", "release"), [("tensorrt-llm", RELEASE), ("tensorrt-llm-worker", WORKER)])
def test_the_library_is_the_release_that_this_is_written_for(name: str, release: str) -> None:
    assert recorded(name)["tensorrt-llm"] == Version(release)
    (asked,) = map(Requirement, EXTRAS[name])
    for system, python, wanted in (("Linux", "3.12", True), ("Linux", "3.11", False), ("Windows", "3.12", False)):
        assert asked.marker is not None
        assert asked.marker.evaluate({"platform_system": system, "python_version": python}) == wanted


def test_the_pinned_tests_run_with_the_librarys_versions() -> None:
    """`scripts/pinned_tests.sh` runs the tests with what TensorRT-LLM 1.2.1 pins of what is used here."""
    lines = (ROOT / "constraints-tensorrt-llm.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    found = recorded("tensorrt-llm")
    for package, version in pins:
        assert found[canonicalize_name(package)] == Version(version), package
