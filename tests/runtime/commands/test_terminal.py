"""What a person at a terminal meets: conversations that go on, and failures that are one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.commands.terminal import answer
from runtime.scheduler.request import RequestFailed
from tests.support.commands import OPTIONS, Run, assert_refused
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, until

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


def test_a_chat_outlives_a_full_context_and_questions_that_can_never_be_read(
    run: Run, pair_folders: Callable[[str], Path], template: Path
) -> None:
    questions = ["SELECT name FROM singer WHERE age > 20"] * 8
    questions[5:5] = ["word " * 400]
    typed = b"\xff\n" + "\n".join(["/help", *questions, "/quit", "SELECT"]).encode()
    ran = run(
        "chat", pair_folders("torch"), "--chat-template", template, *OPTIONS, "--system", "Be brief.", stdin=typed
    )
    assert ran.code == 0, ran.err
    assert len(re.findall(r"\d+ tokens/s, [\d.]+ tokens per pass", ran.err)) == 8, "each question but one is answered"
    assert "the context is full: the 2 oldest messages are left out" in ran.err
    assert ran.err.count("not answered: question = ") == 1
    assert ran.err.count("not answered: messages: ") == 1, "a line that is not UTF-8"


def test_a_chat_whose_answers_may_fill_a_row_reads_questions_all_the_same(
    run: Run, pair_folders: Callable[[str], Path], template: Path
) -> None:
    capacity = json.loads((pair_folders("torch") / "target" / "engine.json").read_text())["capacity"]
    options = (
        "--chat-template",
        template,
        "--max-draft-len",
        "4",
        "--max-beam-width",
        "1",
        "--max-tokens",
        capacity - 5,
    )
    ran = run("chat", pair_folders("torch"), *options, stdin=b"Where?")
    assert (ran.code, "not answered" in ran.err) == (0, False), ran.err


@pytest.mark.parametrize("gone", [False, True])
def test_a_chat_goes_on_after_an_answer_that_failed_unless_the_engine_is_gone(
    gone: bool, run: Run, template: Path, pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    async def failing(*given: Any, **named: Any) -> str:
        asked.append(1)
        if len(asked) == 1:
            given[0].cause = RuntimeError() if gone else None
            raise RequestFailed("request 0 failed: no token is allowed")
        return await answer(*given, **named)

    monkeypatch.setattr("runtime.commands.chat.answer", failing)
    ran = run("chat", pair_folders("torch"), "--chat-template", template, *OPTIONS, stdin=b"Where?\nWhere?")
    assert (ran.code, len(asked), bool(ran.out)) == ((1, 1, False) if gone else (0, 2, True))
    assert f"{'failed' if gone else 'not answered'}: request 0 failed: no token is allowed\n" in ran.err


def test_a_cleared_chat_begins_anew(
    run: Run, pair_folders: Callable[[str], Path], template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    async def kept(*given: Any, **others: Any) -> str:
        texts.append(await answer(*given, **others))
        return texts[-1]

    monkeypatch.setattr("runtime.commands.chat.answer", kept)
    typed = b"Where?\nHow many?\n\nWhere?\n/clear\nWhere?"
    ran = run("chat", pair_folders("torch"), "--chat-template", template, *OPTIONS, "--branching", "2,1", stdin=typed)
    assert "warning: --branching has no effect with the method block\n" in ran.err
    assert ran.out == "".join(f"{text}\n" for text in texts)
    assert texts[3] == texts[0]
    assert texts[2] != texts[0], "otherwise the conversation counts"


def test_rows_that_no_machine_holds_are_refused_before_they_are_allocated(
    run: Run, pair_folders: Callable[[str], Path]
) -> None:
    ran = run("generate", pair_folders("onnx"), "S", "--rows", "100000000", "--provider", "cpu")
    assert_refused(ran, "generate", "this machine has")
    assert "export again" not in ran.err
    paged = run("generate", pair_folders("onnx"), "S", "--rows", "100000000", "--provider", "openvino")
    assert_refused(paged, "generate", "--rows = 100000000: Unable to allocate")


def test_bytes_that_are_no_text_are_refused_as_an_argument(run: Run, tmp_path: Path) -> None:
    assert_refused(run("generate", tmp_path, os.fsdecode(b"ab\xff")), "generate", "is not UTF-8")


@pytest.mark.parametrize("command", ["generate", "inspect", "check", "serve"])
def test_a_file_is_not_called_a_missing_folder(run: Run, command: str, template: Path) -> None:
    assert_refused(run(command, template), command, "a file, not a folder")


@pytest.mark.slow
def test_an_interrupt_while_libraries_load_is_one_line(tmp_path: Path) -> None:
    demo = ROOT / "scripts" / "demo" / "pair"
    words = ("export", tmp_path / "pair", "--target", demo / "target", "--auxiliary", demo / "auxiliary")
    command = [sys.executable, "-m", "runtime.commands.main", *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: "libtorch_python" in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130
    assert re.fullmatch(r"mtad( export)?: interrupted\n", said), said
    assert list(tmp_path.iterdir()) == []
