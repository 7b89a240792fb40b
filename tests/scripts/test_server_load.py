"""The server's load test: it counts every token once, and notices each answer that is not the right one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import LLM, DecodingParams
from scripts.bench import __main__ as bench
from scripts.bench.load_client import _Chunks
from scripts.bench.load_figures import Figures, Job, drive
from scripts.bench.server_load import SYSTEMS, Served, percentiles, plot, summarise, table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(plain: LLM) -> list[Job]:
    found = []
    for seed in range(5):
        params = {"max_tokens": 8 + seed, "ignore_eos": True}
        result = plain.generate("How many", DecodingParams(seed=seed, max_tokens=8 + seed, ignore_eos=True))[0]
        found.append(Job("How many", seed, params, result.token_ids, result.text))
    return found


def test_both_systems_give_every_answer_and_a_wrong_one_is_noticed(plain: LLM, jobs: list[Job]) -> None:
    broken = [*jobs, replace(jobs[0], token_ids=[1, 2]), replace(jobs[1], text="x"), replace(jobs[2], prompt="")]
    with Served(LLM(plain.pair), broken) as served:
        for system in SYSTEMS:
            for seconds in (0.6, 3.0, 15.0, 60.0):  # as long as a busy machine needs
                figures = served.slice(system, 3, seconds, 0)
                rounds = (figures.answers + len(figures.wrong)) / len(broken)
                if rounds > 1:
                    break
            assert rounds > 1, "each job had its turn"
            assert figures.answers == pytest.approx(rounds * 5, abs=3)
            assert len(figures.wrong) == pytest.approx(rounds * 3, abs=3)
            assert {words.split(":")[0] for words in figures.wrong} == {"seed 0", "seed 1", "seed 2"}
            assert len(figures.first) == pytest.approx(rounds * 7, abs=3), "all but the refused one got a first token"
            assert 0 < figures.tokens <= figures.all
            assert (figures.server > 0) == (system == "HTTP")


def test_tokens_after_the_end_are_not_throughput_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands but where an answer comes after the end of the slice."""
    job = Job("", 0, {}, [1, 2, 3, 4], "ab")
    clock, asked, begun = SimpleNamespace(now=0.0), list[int](), asyncio.Barrier(3)
    ticking = SimpleNamespace(perf_counter=lambda: clock.now, process_time=time.process_time)
    monkeypatch.setattr("scripts.bench.load_figures.time", ticking)

    async def slow(connection: int, job: Job) -> AsyncIterator[tuple[list[int], str]]:
        asked.append(connection)
        yield [1], "a"
        await begun.wait()
        clock.now = 0.1
        yield [2, 3, 4], "b"

    figures = asyncio.run(drive(slow, [job], 3, 0.05))
    assert (figures.tokens, figures.all, figures.answers, figures.wrong) == (3, 12, 3, [])
    assert sorted(asked) == [0, 1, 2]
    assert len(figures.first) == 3
    assert figures.block == [0.1] * 3

    async def lost(connection: int, job: Job) -> AsyncIterator[tuple[list[int], str]]:
        clock.now += 0.1
        yield [1], "a"

    figures = asyncio.run(drive(lost, [job], 1, 0.01))
    assert (figures.answers, len(figures.wrong)) == (0, 1)


def test_events_are_read_however_the_bytes_are_cut() -> None:
    body = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (b"data: 1\n\n", b"data: 2\n", b"\ndata: [DONE]\n\n")
    )
    body += b"0\r\n\r\n"
    for size in range(1, len(body) + 1):
        reader, found = _Chunks(), []
        for at in range(0, len(body), size):
            assert not reader.complete
            found += reader.feed(body[at : at + size])
        assert reader.complete
        assert found == [b"data: 1", b"data: 2", b"data: [DONE]"]
    with pytest.raises(ConnectionError):
        _Chunks().feed(b"")


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    def one(tokens: int) -> Figures:
        return Figures(seconds=2.0, tokens=tokens, all=tokens, answers=1, first=[0.01, 0.03], block=[0.002], server=0.1)

    row = summarise({"HTTP": [one(90), one(400), one(100)], "AsyncLLM": [one(100), one(800), one(100)]})
    assert row["ratio"] == {"median": 0.9, "lowest": 0.5, "highest": 1.0}
    assert row["HTTP"]["tokens_per_second"] == 50
    assert row["HTTP"]["server_microseconds_a_token"] == pytest.approx(0.3e6 / 590)
    assert row["HTTP"]["first_token_ms"]["p50"] == pytest.approx(20)
    assert percentiles([]) is None
    assert "0.90" in table({4: row})
    plot({1: row, 4: row}, tmp_path / "server.png")
    assert (tmp_path / "server.png").stat().st_size > 1000
    json.dumps(asdict(one(1)))


@pytest.mark.parametrize("arguments", [("--connections", "0"), ("--duration", "3")])
def test_bad_settings_are_refused(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "server", *arguments])
    with pytest.raises(SystemExit):
        bench.main()
    assert f"{arguments[0][2:]} = " in capsys.readouterr().err
