"""Grammars of strangers: whatever they do to the compiler, they do it elsewhere, and for a short time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from mtad.errors import Failed, InvalidInput
from runtime.constraints import grammar as grammars
from runtime.constraints.follower import MAX_GROWTH
from runtime.constraints.grammar import Grammars
from runtime.constraints.trial_process import compile_grammar
from runtime.constraints.trials import Trials
from tests.support.checkpoints import make_tokenizer
from tests.support.constrained import FREE
from tests.support.hostile import BODIES, pattern_properties
from tests.support.waiting import PATIENCE, until

SLOW = pattern_properties(1200)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found: Tokenizer = make_tokenizer().backend_tokenizer
    return found


@pytest.fixture
def made(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, 300, [0])
    yield found
    found.close()


@pytest.fixture
def patient(tokenizer: Tokenizer) -> Iterator[Trials]:
    found = Trials("compiling it", Grammars(tokenizer, 300, [0])._settings, seconds=20.0, gives_way=False)
    yield found
    found.close()


def pid(trials: Trials) -> int:
    assert trials._process is not None
    return trials._process.pid


def test_a_trial_leaves_the_processor_to_the_engine(patient: Trials) -> None:
    patient.run("grammar", 'start: "a"')
    assert os.getpriority(os.PRIO_PROCESS, pid(patient)) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.parametrize(
    ("name", "seconds", "words"),
    [
        ("chained references", 20.0, "nested or chained too deeply"),
        pytest.param("chained rules", 20.0, "nested or chained too deeply", marks=pytest.mark.slow),
        pytest.param("many terminals", 0.2, "longer than 0.2 s", marks=pytest.mark.slow),
    ],
)
async def test_what_breaks_the_compiler_is_refused_by_name_and_the_next_grammar_is_compiled(
    name: str, seconds: float, words: str, made: Grammars
) -> None:
    made._pool.quick.seconds, made._pool.slow.seconds = seconds / 2, seconds
    with pytest.raises(InvalidInput) as caught:
        await made.compile_soon(replace(FREE, **BODIES[name]))
    assert caught.value.field in BODIES[name]
    assert words in caught.value.problem
    assert len(str(caught.value)) < 600
    assert not made._kept, "what was refused is not kept"
    await made.compile_soon(replace(FREE, regex="ab*"))
    assert list(made._kept) == [("regex", "ab*")]


@pytest.mark.slow
def test_a_grammar_that_takes_all_memory_is_refused(patient: Trials) -> None:
    with pytest.raises(InvalidInput, match="more than 192 MiB of memory"):
        patient.run("regex", "((a{1000}){1000}){1000}")
    assert patient.run("regex", "ab*")["problems"] == []


@pytest.mark.slow
async def test_a_quick_grammar_does_not_wait_for_slow_ones(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer, 300, [0])
    slow = [asyncio.create_task(made.compile_soon(replace(FREE, json_schema=SLOW + " " * n))) for n in range(4)]
    await asyncio.sleep(0.05)
    await made.compile_soon(replace(FREE, regex="ab*"))
    assert not all(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    made.close()


async def test_who_no_longer_waits_leaves_the_queue_and_closing_ends_every_trial(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer, 300, [0])
    slow = made._pool.slow
    slow.run("regex", "ab*")
    process = pid(slow)
    tasks = [asyncio.create_task(made.compile_soon(replace(FREE, json_schema=SLOW + " " * n))) for n in range(3)]
    await asyncio.to_thread(until, lambda: bool(children(process)))
    tasks[2].cancel()
    made.close()
    for task, error in zip(tasks, (Failed, Failed, asyncio.CancelledError), strict=True):
        with pytest.raises(error):
            await task  # which would have been refused as too slow, if closing waited for it
    with pytest.raises(Failed):
        made.compile(replace(FREE, regex="a"))
    until(lambda: not Path(f"/proc/{process}/exe").exists())


def test_a_slow_trial_runs_where_nothing_else_would_and_is_in_no_session_of_its_own(patient: Trials) -> None:
    """Between sessions of Linux, priorities do not count: a trial took as much of the processor as the engine."""
    patient.gives_way = True
    patient.run("regex", "a")
    process = pid(patient)
    asking = ThreadPoolExecutor(1).submit(patient.run, "json_schema", SLOW)
    until(lambda: bool(children(process)))
    assert os.sched_getscheduler(int(children(process)[0])) == os.SCHED_IDLE
    assert os.getsid(process) == os.getsid(0)
    assert os.getpgid(process) != os.getpgid(0)  # what a terminal sends its foreground does not reach it
    patient.close()
    assert isinstance(asking.exception(), Failed)


def test_a_process_that_was_ended_is_started_again(patient: Trials) -> None:
    assert patient.run("regex", "a")["problems"] == []
    first = pid(patient)
    os.kill(first, signal.SIGKILL)
    assert patient.run("regex", "a")["problems"] == []
    assert pid(patient) != first


def test_the_answer_to_an_interrupted_trial_is_not_taken_for_the_next_ones(
    patient: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patient.run("regex", "a")["problems"] == []
    with monkeypatch.context() as patch:
        patch.setattr(patient._process, "stdout", Mock(readline=Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            patient.run("regex", "(")
    assert patient.run("regex", "a")["problems"] == []


def test_the_process_ends_with_its_parent_however_that_ends(tokenizer: Tokenizer) -> None:
    program = f"""
from runtime.constraints.trials import Trials
settings = dict(tokenizer={tokenizer.to_str()!r}, vocab_size=300, eos=[0])
run = Trials("compiling it", lambda: settings, seconds=1.0, gives_way=False)
run.run("regex", "a")
print(run._process.pid, flush=True)
run.run("json_schema", {SLOW!r})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        until(lambda: bool(children(process)))
        (child,) = children(process)
        parent.kill()
    until(lambda: not Path(f"/proc/{process}").exists() and not Path(f"/proc/{child}").exists())


def test_grammars_are_kept_as_far_as_their_memory_allows(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    each = [made.compile(replace(FREE, regex=f"a{{{n}}}")) for n in range(1, 4)]
    assert all(0 < grammar.bytes < 2**20 for grammar in each), "without what all share"
    assert made.compile(replace(FREE, regex="a{2}")) is each[1]
    each[1].hit_limit = True
    assert made.compile(replace(FREE, regex="a{2}")) is not each[1], "one that met a limit is forgotten"
    each[2].followed = 2.0
    assert each[2].bytes == each[2].compiled + MAX_GROWTH, "lexers grow"
    monkeypatch.setattr(grammars, "KEPT_BYTES", MAX_GROWTH)
    again = made.compile(replace(FREE, regex="a{2}"))
    assert list(made._kept) == [("regex", "a{2}")], "also where nothing new is compiled"
    again.hit_limit = True
    made.compile(replace(FREE, regex="b"))
    assert list(made._kept) == [("regex", "b")], "and whoever asks for another"
    monkeypatch.setattr(grammars, "KEPT_BYTES", 0)
    made.compile(replace(FREE, regex="c"))
    assert not made._kept


async def test_others_run_while_one_compiles_here(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going = threading.Event(), threading.Event()

    def held(*args: object) -> object:
        begun.set()
        assert going.wait(PATIENCE)
        return compile_grammar(*args)  # type: ignore[arg-type]

    made.compile(replace(FREE, regex="known"))
    monkeypatch.setattr(grammars, "compile_grammar", held)
    task = asyncio.create_task(made.compile_soon(replace(FREE, regex="slow")))
    await asyncio.to_thread(begun.wait)
    await made.compile_soon(replace(FREE, regex="known"))
    going.set()
    assert (await task).start is not None
