"""Resolves the extras on PyPI by uv 0.13, and records what each package found requires (`tests/support/resolutions/`).

Run by hand where pyproject.toml changes: `python -m tests.support.record_resolutions`, with uv and msgpack installed.
What a package requires is read from uv's cache. TensorRT's own libraries are on NVIDIA's index only; wheels with
the requirements of their source distributions stand in for them.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import msgpack
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from tests.test_resolutions import ENVIRONMENTS, FOLDER, active, environment_of

PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_34"}
LIBRARIES = {  # versions, and what each requires
    "10.14.1.48.post1": "cuda-toolkit[cudart]<14,>=13",
    "11.4.0.106": "",
}


def requirements(cache: Path, name: str, version: str, machine: str) -> list[str]:
    """What one package requires, by uv's cache."""
    found = None
    for file in sorted(cache.glob(f"wheels-*/pypi/{name}/*.msgpack")):
        unpacker = msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(file.read_bytes())
        metadata: Any = unpacker.unpack()
        if isinstance(metadata, list) and metadata[1] == version and (found is None or machine in file.name):
            found = metadata[2]
    for file in cache.glob(f"sdists-*/pypi/{name}/{version}/*/src/PKG-INFO") if found is None else ():
        found = re.findall(r"^Requires-Dist: (.*)$", file.read_text(), re.MULTILINE)
    assert found is not None or name == "tensorrt-cu13-libs", name
    return found or []


def main() -> None:
    cache = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for version, needs in LIBRARIES.items():
            with zipfile.ZipFile(Path(temporary, f"tensorrt_cu13_libs-{version}-py3-none-any.whl"), "w") as wheel:
                info, metadata = (
                    f"tensorrt_cu13_libs-{version}.dist-info",
                    "Metadata-Version: 2.1\nName: tensorrt-cu13-libs\nVersion: {}\n{}",
                )
                wheel.writestr(
                    f"{info}/METADATA", metadata.format(version, f"Requires-Dist: {needs}\n" if needs else "")
                )
                wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{info}/RECORD", "")
        for name, (python, machine, extras) in ENVIRONMENTS.items():
            command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
            command += ["--find-links", temporary, "--python-version", python, "--python-platform", PLATFORMS[machine]]
            command += [word for extra in extras for word in ("--extra", extra)]
            compiled = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            pins = dict(line.split("==") for line in compiled.splitlines())
            given = {one: [*map(Requirement, requirements(cache, one, pins[one], machine))] for one in pins}
            asked: dict[str, set[str]] = {one: set() for one in pins}
            todo = [
                *project["dependencies"],
                *(line for extra in extras for line in project["optional-dependencies"][extra]),
            ]
            new = active(map(Requirement, todo), environment_of(python, machine), extras)
            while new:  # a package may be asked for with an extra, which brings others
                for own in new:
                    asked.setdefault(canonicalize_name(own.name), set()).update(own.extras)
                before = sum(map(len, asked.values()))
                new = [r for one in pins for r in active(given[one], environment_of(python, machine), asked[one])]
                for own in new:
                    asked[canonicalize_name(own.name)].update(own.extras)
                if sum(map(len, asked.values())) == before:
                    break
            lines = []
            for one, version in sorted(pins.items()):
                own = active(given[one], environment_of(python, machine), asked[one])
                lines.append(
                    " ".join([f"{one}=={version}", *sorted({f"{canonicalize_name(r.name)}{r.specifier}" for r in own})])
                )
            (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
