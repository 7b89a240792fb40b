"""Grammars of strangers: whatever they do to the compiler, they do it elsewhere, and for a short time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mtad.errors import InvalidInput
from runtime.constraints import grammar as grammars
from runtime.constraints.follower import MOST_GROWTH, Grammar
from runtime.constraints.grammar import Grammars
from runtime.constraints.trial_process import compile_grammar
from runtime.constraints.trials import Stopped, TooSlow, Trial, Trials
from scripts.soak import attacks
from tests.support.checkpoints import make_tokenizer
from tests.support.constrained import FREE

SLOW = attacks.pattern_properties(1200)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found: Tokenizer = make_tokenizer().backend_tokenizer
    return found


@pytest.fixture
def made(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(grammars, "QUICK_SECONDS", 0.1)
    monkeypatch.setattr(grammars, "SECONDS", 0.2)
    found = Grammars(tokenizer, 300, [0])
    yield found
    found.close()


def trials(tokenizer: Tokenizer) -> Trials:
    return Trials({"tokenizer": tokenizer.to_str(), "vocab_size": 300, "eos": [0]})


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def threads(process: int) -> list[int]:
    """Of its children."""
    return [int(path.name) for child in children(process) for path in Path(f"/proc/{child}/task").iterdir()]


def until(what: Callable[[], bool]) -> None:
    for _ in range(3000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json_schema": attacks.reference_chain(1000)}, "nested or chained too deeply"),
        *(
            pytest.param({"grammar": chain}, "nested or chained too deeply", marks=pytest.mark.slow)
            for chain in (attacks.rule_chain(5000), attacks.terminal_chain(20_000))
        ),
        ({"grammar": attacks.terminals(20_000)}, "longer than 0.2 s"),
        pytest.param({"json_schema": attacks.pattern_properties(700)}, "longer than 0.2 s", marks=pytest.mark.slow),
        ({"regex": "a" * (2**20 + 1)}, "1048577 characters"),
    ],
)
def test_what_breaks_the_compiler_is_refused_by_name_and_the_next_grammar_is_compiled(
    asked: dict[str, str], words: str, made: Grammars
) -> None:
    with pytest.raises(InvalidInput) as caught:
        asyncio.run(made.compile_soon(replace(FREE, **asked)))  # type: ignore[arg-type]
    assert caught.value.field in asked
    assert words in caught.value.problem
    assert len(str(caught.value)) < 600
    assert not made._kept, "what was refused is not kept"
    asyncio.run(made.compile_soon(replace(FREE, regex="ab*")))
    assert list(made._kept) == [("regex", "ab*")]


@pytest.mark.slow
def test_a_grammar_that_takes_all_memory_is_refused(tokenizer: Tokenizer) -> None:
    run = trials(tokenizer)
    with pytest.raises(InvalidInput, match="takes too much memory"):
        run.run(Trial(), "regex", "((a{1000}){1000}){1000}", "", 20.0)
    assert run.run(Trial(), "regex", "ab*", "", 1.0)[1] == []
    run.close()


@pytest.mark.slow
def test_a_quick_grammar_does_not_wait_for_slow_ones(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer, 300, [0])

    async def test() -> int:
        slow = [asyncio.create_task(made.compile_soon(replace(FREE, json_schema=SLOW + " " * n))) for n in range(4)]
        await asyncio.sleep(0.05)
        await made.compile_soon(replace(FREE, regex="ab*"))
        ended = sum(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return ended

    assert asyncio.run(test()) == 0
    made.close()


def test_who_no_longer_waits_ends_the_trial(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer, 300, [0])
    made.compile(replace(FREE, regex="ab*"))
    _, run = made.prepare()
    assert run._process is not None
    process = run._process.pid

    async def test() -> None:
        task = asyncio.create_task(made.compile_soon(replace(FREE, json_schema=SLOW)))
        await asyncio.to_thread(until, lambda: bool(children(process)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(until, lambda: not children(process))
        task = asyncio.create_task(made.compile_soon(replace(FREE, json_schema=SLOW)))
        await asyncio.to_thread(until, lambda: bool(children(process)))
        made.close()
        with pytest.raises(Stopped):
            await task

    asyncio.run(test())
    until(lambda: not Path(f"/proc/{process}").exists())


def test_a_trial_that_the_machine_has_no_time_for_is_too_slow(tokenizer: Tokenizer) -> None:
    """It is stopped long before it has had its 20 seconds of the processor."""
    run, began = trials(tokenizer), time.monotonic()
    with pytest.raises(TooSlow):
        run.run(Trial(), "json_schema", SLOW, "", 20.0, wait=0.05)
    run.close()
    assert time.monotonic() - began < 10


def test_a_long_trial_gives_way_to_its_parent_and_is_in_no_session_of_its_own(tokenizer: Tokenizer) -> None:
    """Between sessions of Linux, priorities do not count: a trial took as much of the processor as the engine."""
    run = trials(tokenizer)
    run.run(Trial(), "regex", "a", "", 1.0)
    assert run._process is not None
    process, trial = run._process.pid, Trial()
    content = {"field": "json_schema", "text": SLOW, "seconds": 20.0, "wait": None}
    asking = threading.Thread(target=run._ask, args=(trial, content))
    asking.start()
    until(lambda: any(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in threads(process)))
    assert os.getsid(process) == os.getsid(0)
    assert os.getpgid(process) != os.getpgid(0)  # what a terminal sends its foreground does not reach it
    trial.stop()
    asking.join()
    run.close()


def test_a_process_that_was_ended_is_started_again(tokenizer: Tokenizer) -> None:
    run = trials(tokenizer)
    assert run.run(Trial(), "regex", "a", "", 1.0)[1] == []
    assert run._process is not None
    os.kill(run._process.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{run._process and run._process.pid}/exe").exists())
    assert run.run(Trial(), "regex", "a", "", 1.0)[1] == []
    run.close()


def test_the_process_ends_with_its_parent_however_that_ends(tokenizer: Tokenizer) -> None:
    program = f"""
from runtime.constraints.trials import Trial, Trials
run = Trials({{"tokenizer": {tokenizer.to_str()!r}, "vocab_size": 300, "eos": [0]}})
run.run(Trial(), "regex", "a", "", 1.0)
print(run._process.pid, flush=True)
run.run(Trial(), "json_schema", {SLOW!r}, "", 20.0)
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
    assert all(0 < grammar.bytes < 2**23 for grammar in each)
    assert made.compile(replace(FREE, regex="a{2}")) is each[1]
    each[1].spoilt = True
    assert made.compile(replace(FREE, regex="a{2}")) is not each[1], "one that met a limit is forgotten"
    each[2].followed = 2.0
    assert each[2].bytes == each[2].compiled + MOST_GROWTH, "lexers grow"
    monkeypatch.setattr(grammars, "KEPT_BYTES", MOST_GROWTH)
    made.compile(replace(FREE, regex="b"))
    assert list(made._kept)[-1] == ("regex", "b")
    assert ("regex", "a{3}") not in made._kept
    kept = made.compile(replace(FREE, regex="b"))
    made.forget()
    assert made.compile(replace(FREE, regex="b")) is not kept
    monkeypatch.setattr(grammars, "KEPT_BYTES", 0)
    made.compile(replace(FREE, regex="c"))
    assert not made._kept


def test_others_run_while_one_compiles_here(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going = threading.Event(), threading.Event()

    def held(*args: object) -> object:
        begun.set()
        assert going.wait(60)
        return compile_grammar(*args)  # type: ignore[arg-type]

    made.compile(replace(FREE, regex="known"))
    monkeypatch.setattr(grammars, "compile_grammar", held)

    async def test() -> Grammar:
        task = asyncio.create_task(made.compile_soon(replace(FREE, regex="slow")))
        await asyncio.to_thread(begun.wait)
        await made.compile_soon(replace(FREE, regex="known"))
        going.set()
        return await task

    assert asyncio.run(test()).start is not None
