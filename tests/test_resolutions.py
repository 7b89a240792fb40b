"""Every extra can be installed: what a resolver found for it on PyPI fits this package and each other.

`tests/support/resolutions/` holds, by environment, the packages that uv found and what each of them requires there, by
their own metadata; `tests/support/record_resolutions.py` records them. TensorRT-LLM's is that of its source
distributions, which is its wheels'.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from engines.tensorrt_llm.library import RELEASE
from runtime.tensorrt_llm.compat import WORKER
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "support" / "resolutions"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
APART = ("tensorrt", "tensorrt-llm", "tensorrt-llm-worker")
ENVIRONMENTS = {
    "linux": ("3.11", "x86_64", tuple(extra for extra in EXTRAS if extra not in APART)),
    "tensorrt": ("3.11", "x86_64", ("serve", "tensorrt")),
    "tensorrt-llm": ("3.12", "x86_64", ("tensorrt-llm",)),
    "tensorrt-llm-worker": ("3.12", "x86_64", ("tensorrt-llm-worker",)),
    "jetpack-7": ("3.12", "aarch64", ("serve", "gpu", "tensorrt")),
}
"""Python, machine, and the extras that are installed together; JetPack brings TensorRT itself."""


def environment_of(python: str, machine: str) -> dict[str, str]:
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    versions = {"python_version": python, "python_full_version": f"{python}.0", "implementation_version": f"{python}.0"}
    return {**system, **versions, "implementation_name": "cpython", "platform_python_implementation": "CPython"}


def active(
    requirements: Iterable[Requirement], environment: dict[str, str], extras: Collection[str] = ()
) -> list[Requirement]:
    """Those that count in an environment, with these extras of what requires them."""
    found = [{**environment, "extra": extra} for extra in ("", *extras)]
    return [one for one in requirements if one.marker is None or any(map(one.marker.evaluate, found))]


def recorded(name: str) -> dict[str, tuple[Version, list[Requirement]]]:
    lines = (line.split() for line in (FOLDER / f"{name}.txt").read_text().splitlines())
    split = ((*first.split("=="), rest) for first, *rest in lines)
    return {package: (Version(version), [*map(Requirement, rest)]) for package, version, rest in split}


def required(name: str) -> list[Requirement]:
    """What this package requires in an environment, with its extras."""
    python, machine, extras = ENVIRONMENTS[name]
    asked, seen, todo = list(PROJECT["dependencies"]), set[str](), list(extras)
    while todo:
        if (extra := todo.pop()) not in seen:
            seen.add(extra)
            asked += EXTRAS[extra]
            todo += [own for line in EXTRAS[extra] if (r := Requirement(line)).name == "mtad" for own in r.extras]
    return [r for r in active(map(Requirement, asked), environment_of(python, machine)) if r.name != "mtad"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_was_found_for_the_extras_fits_together(name: str) -> None:
    found = recorded(name)
    needs = [("mtad", required(name)), *((package, own) for package, (_, own) in found.items())]
    for package, requirements in needs:
        for one in requirements:
            other = found.get(canonicalize_name(one.name))
            assert other, f"{package} needs {one}, which was not recorded"
            assert one.specifier.contains(other[0], prereleases=True), f"{package} needs {one}, but there is {other[0]}"


def test_every_extra_was_resolved() -> None:
    assert {extra for _, _, extras in ENVIRONMENTS.values() for extra in extras} == EXTRAS.keys()


@pytest.mark.parametrize(("name", "release"), [("tensorrt-llm", RELEASE), ("tensorrt-llm-worker", WORKER)])
def test_the_library_is_the_release_that_this_is_written_for(name: str, release: str) -> None:
    assert recorded(name)["tensorrt-llm"][0] == Version(release)
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
        assert found[canonicalize_name(package)][0] == Version(version), package
