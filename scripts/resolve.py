"""Resolves the extras on PyPI by uv 0.13, and records what each package found requires there (`scripts/resolutions/`).

Run by hand where pyproject.toml changes: `python -m scripts.resolve`, with uv and msgpack installed; a test checks that
what was recorded fits. What a package requires is read from uv's cache. TensorRT's own libraries are on NVIDIA's index
only; wheels with the requirements of their source distributions stand in for them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.paths import ROOT

FOLDER = ROOT / "scripts" / "resolutions"
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


CACHE = Path.home() / ".cache" / "uv"
PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_34"}
LIBRARIES = {"10.14.1.48.post1": "Requires-Dist: cuda-toolkit[cudart]<14,>=13\n", "11.4.0.106": ""}
"""Versions of `tensorrt-cu13-libs`, and what each requires."""


def requirements(name: str, version: str, machine: str) -> list[Requirement]:
    """What one package requires, by uv's cache."""
    msgpack: Any = import_module("msgpack")
    found = [LIBRARIES[version].removeprefix("Requires-Dist: ").strip()] if name == "tensorrt-cu13-libs" else None
    for file in sorted(CACHE.glob(f"wheels-*/pypi/{name}/*.msgpack")):
        unpacker = msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(file.read_bytes())
        metadata: Any = unpacker.unpack()
        if isinstance(metadata, list) and metadata[1] == version and (found is None or machine in file.name):
            found = metadata[2]
    for file in CACHE.glob(f"sdists-*/pypi/{name}/{version}/*/src/PKG-INFO") if found is None else ():
        found = re.findall(r"^Requires-Dist: (.*)$", file.read_text(), re.MULTILINE)
    assert found is not None, name
    return [Requirement(line) for line in found if line]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for version, needs in LIBRARIES.items():
            with zipfile.ZipFile(Path(temporary, f"tensorrt_cu13_libs-{version}-py3-none-any.whl"), "w") as wheel:
                files = {"METADATA": f"Metadata-Version: 2.1\nName: tensorrt-cu13-libs\nVersion: {version}\n{needs}"}
                files |= {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
                for name, text in files.items():
                    wheel.writestr(f"tensorrt_cu13_libs-{version}.dist-info/{name}", text)
        for name, (python, machine, extras) in ENVIRONMENTS.items():
            command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
            command += ["--find-links", temporary, "--python-version", python, "--python-platform", PLATFORMS[machine]]
            command += [word for extra in extras for word in ("--extra", extra)]
            compiled = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            pins = dict(line.split("==") for line in compiled.splitlines())
            given = {one: requirements(one, pins[one], machine) for one in pins}
            asked = defaultdict[str, set[str]](set)
            new = required(name)
            for _ in range(5):  # a package that is asked for with an extra may ask for another with one
                for own in new:
                    asked[canonicalize_name(own.name)] |= own.extras
                new = [own for one in pins for own in active(given[one], environment_of(python, machine), asked[one])]
            lines = []
            for one, version in sorted(pins.items()):
                needs_of = active(given[one], environment_of(python, machine), asked[one])
                known = {
                    f"{canonicalize_name(r.name)}{r.specifier}" for r in needs_of if canonicalize_name(r.name) in pins
                }
                lines.append(" ".join([f"{one}=={version}", *sorted(known)]))
            (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
