"""The wheel works without extras and without a checkout, and the code of the README runs as printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from runtime.commands.main import COMMANDS
from tests.support.pages import blocks
from tests.support.pages import commands as commands_of
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, STARTING, until

PACKAGES = ("engines", "export", "mtad", "runtime")


JOBS = """
import json, os, sys
import numba, onnxruntime, torch, transformers.modeling_utils  # what takes long to import; nothing of it is ours

for job in json.load(sys.stdin):
    child = os.fork()
    if not child:
        break
    assert os.waitpid(child, 0)[1] == 0, job
else:
    sys.exit()
if isinstance(job, str):
    exec(job)
else:
    sys.argv = ["mtad", *job]
    from runtime.commands.main import main

    main()
"""
"""Runs code, and `mtad` with words, each in a fork that has imported nothing of ours before."""


def outside() -> dict[str, str]:
    """The environment of a process that does not find this checkout."""
    return {**os.environ, "PYTHONPATH": ""}


def run(*command: str | Path, cwd: Path, code: int = 0, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that ends with this code."""
    ran = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=outside(),
        input=input,
        capture_output=True,
        text=True,
        check=False,
        timeout=STARTING,
    )
    assert ran.returncode == code, f"{command}: {ran.stdout}{ran.stderr}"
    return ran


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment: the wheel, links to what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("install")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / "source").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / "source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    there = (*pip, "--python", python)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*there, "install", "--no-deps", "--no-compile", wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    link(site)
    run(*there, "check", cwd=folder)
    return python.parent


def link(site: Path, extra: str = "") -> None:
    """What the wheel that is installed there requires, with an extra of its own."""
    (own,) = site.glob("mtad-*.dist-info")
    for place in required(metadata.Distribution.at(own).requires or [], extra):
        if not (site / place.name).exists():
            (site / place.name).symlink_to(place)


def required(requirements: Sequence[str], extra: str) -> Iterator[Path]:
    """What distributions here put beside each other: those that meet the requirements, and what they require."""
    waiting, known = [(text, extra) for text in requirements], set[tuple[str, str]]()
    while waiting:
        text, extra = waiting.pop()
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        for each in ("", *wanted.extras):
            if (wanted.name, each) not in known:
                known.add((wanted.name, each))
                theirs = requirements if wanted.name == "mtad" else metadata.requires(wanted.name)
                waiting += [(text, each) for text in theirs or []]
        if wanted.name == "mtad":  # an extra of ours that has another
            continue
        found = metadata.distribution(wanted.name)
        yield from {Path(str(found.locate_file(file.parts[0]))) for file in found.files or [] if file.parts[0] != ".."}


@pytest.fixture
def elsewhere(installed: Path, tmp_path: Path) -> Path:
    """A folder in which the README's commands find what they name, the wheel's environment, and write beside it."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / ".venv").symlink_to(installed.parent)
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_pages_runs_as_printed_on_the_wheel(installed: Path, elsewhere: Path) -> None:
    """Without extras, but for the server. README's first block installs, and its second downloads.

    Of other pages, those that the README lacks: that the options of all exist, the tests of the pages show.
    """
    _, _, exports, serves = blocks(ROOT / "README.md", "bash")
    commands = run("bash", "-ec", exports, cwd=elsewhere)
    assert "build/my-pair\n" in commands.stdout
    assert "mtad generate build/my-pair" in commands.stderr, "the next command is said"
    assert "tokens per pass" in commands.stderr
    assert "SELECT AVG(age) FROM singer" in commands.stdout, "what the README says it answers"
    refused = run(installed / "mtad", "serve", "build/my-pair", cwd=elsewhere, code=2)
    assert "the extra serve installs it" in refused.stderr
    (elsewhere / "build" / "demo-pair").symlink_to("my-pair")
    (elsewhere / "build" / "prompts.jsonl").write_text('{"prompt": "import os"}\n' * 4)
    jobs: list[str | list[str]] = [*blocks(ROOT / "README.md", "python")]
    seen = {words[0] for words in commands_of(ROOT / "README.md", "mtad ")}
    few = "--method=block", "--dry-run", '--params={"max_tokens": 4}'
    for page, less in (("quickstart", ()), ("check", ()), ("triton", ()), ("tuning", few)):
        for words in commands_of(ROOT / "docs" / f"{page}.md", "mtad "):
            if words[0] not in seen:
                jobs.append([*words, *less])
                seen.add(words[0])
    assert seen == COMMANDS.keys()
    ran = run(installed / "python", "-c", JOBS, cwd=elsewhere, input=json.dumps(jobs))
    assert re.match(r".+? (stop|length) \d\.\d+\n", ran.stdout, re.DOTALL), "what the README's code prints"
    link(next((installed.parent / "lib").glob("python*/site-packages")), "serve")
    assert_serves(serves, elsewhere, {**outside(), "PATH": f"{installed}:{os.environ['PATH']}"})


def assert_serves(text: str, folder: Path, environment: dict[str, str]) -> None:
    """The server that a block starts answers at the address that the block names, and ends when it is told to.

    The client on the page about the server gets a text from it.
    """
    address = re.search(r"http://[\w.:]+", text)
    assert address is not None
    command = ["bash", "-ec", f"exec {text}"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:

        def answers() -> bool:
            assert server.poll() is None, server.communicate()[1]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address.group()}/health", timeout=5) as answer:
                return bool(answer.status == 200)
            return False

        try:
            until(answers, STARTING)
            (asks, _) = blocks(ROOT / "docs" / "serving.md", "python")
            exec(asks.replace("demo-pair", "my-pair"), {})
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
