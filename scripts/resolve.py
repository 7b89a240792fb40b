"""Resolves the extras on PyPI by uv 0.13, and records the versions that it found (`scripts/resolutions/`).

Run by hand where pyproject.toml changes: `python -m scripts.resolve`, with uv installed; a test checks that what was
recorded fits. TensorRT's own libraries are on NVIDIA's index only; wheels with the requirements of their source
distributions stand in for them.
"""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

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


def required(name: str) -> list[Requirement]:
    """What this package requires in an environment, with its extras."""
    python, machine, extras = ENVIRONMENTS[name]
    environment = {**environment_of(python, machine), "extra": ""}
    asked, seen, todo = list(PROJECT["dependencies"]), set[str](), list(extras)
    while todo:
        if (extra := todo.pop()) not in seen:
            seen.add(extra)
            asked += EXTRAS[extra]
            todo += [own for line in EXTRAS[extra] if (r := Requirement(line)).name == "mtad" for own in r.extras]
    found = [r for r in map(Requirement, asked) if r.marker is None or r.marker.evaluate(environment)]
    return [r for r in found if r.name != "mtad"]


PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_34"}
LIBRARIES = {"10.14.1.48.post1": "Requires-Dist: cuda-toolkit[cudart]<14,>=13\n", "11.4.0.106": ""}
"""Versions of `tensorrt-cu13-libs`, and what each requires."""


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
            (FOLDER / f"{name}.txt").write_text(compiled)


if __name__ == "__main__":
    main()
