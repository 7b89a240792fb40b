"""The wheel works without extras and without a checkout, and the code of the README runs as printed."""

from __future__ import annotations

import contextlib
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
from typing import Any

import pytest
from packaging.requirements import Requirement

from runtime.commands.main import COMMANDS
from tests.support.pages import blocks
from tests.support.pages import commands as commands_of
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, STARTING, until

PACKAGES = ("engines", "export", "mtad", "runtime")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=STARTING,
    )
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
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
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-I", "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-compile", wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    link(site)
    run(*pip, "check", cwd=folder)
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
    outside = {"PYTHONPATH": ""}
    _, _, exports, serves = blocks(ROOT / "README.md", "bash")
    commands = run("bash", "-ec", exports, cwd=elsewhere, **outside)
    (code,) = blocks(ROOT / "README.md", "python")
    python = run(installed / "python", "-c", code, cwd=elsewhere, **outside)
    assert "build/my-pair\n" in commands.stdout
    assert "mtad generate build/my-pair" in commands.stderr, "the next command is said"
    assert "tokens per pass" in commands.stderr
    assert python.stdout.strip()
    assert "SELECT AVG(age) FROM singer" in commands.stdout, "what the README says it answers"
    environment = {**os.environ, **outside}
    where: dict[str, Any] = {"cwd": elsewhere, "env": environment, "capture_output": True, "text": True}
    refused = subprocess.run([installed / "mtad", "serve", "build/my-pair"], **where, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "the extra serve installs it" in refused.stderr
    (elsewhere / "build" / "demo-pair").symlink_to("my-pair")
    (elsewhere / "build" / "prompts.jsonl").write_text('{"prompt": "import os"}\n' * 4)
    seen = {words[0] for words in commands_of(ROOT / "README.md", "mtad ")}
    few = "--method=block", "--dry-run", '--params={"max_tokens": 16}'
    for page, less in (("quickstart", ()), ("check", ()), ("triton", ()), ("tuning", few)):
        for words in commands_of(ROOT / "docs" / f"{page}.md", "mtad "):
            if words[0] not in seen:
                run(installed / "mtad", *words, *less, cwd=elsewhere, **outside)
                seen.add(words[0])
    assert seen == COMMANDS.keys()
    link(next((installed.parent / "lib").glob("python*/site-packages")), "serve")
    assert_serves(serves, elsewhere, {**environment, "PATH": f"{installed}:{os.environ['PATH']}"})


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
