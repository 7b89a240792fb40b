"""What the benchmark of steps runs, and what it makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import Engine, Step
from runtime import LLM
from scripts.bench.steps import Model, Point, measure_points, take_turns
from scripts.bench.steps_report import plot, table
from scripts.demo import inflate


@pytest.fixture
def ran(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Engine, Step]]:
    """Steps that the engines of the random pair were given."""
    noted: list[tuple[Engine, Step]] = []
    for engine in (plain.pair.target, plain.pair.auxiliary):
        monkeypatch.setattr(engine, "step", lambda step, engine=engine: noted.append((engine, step)))
    return noted


def test_a_step_runs_behind_a_context_that_was_written(plain: LLM, ran: list[tuple[Engine, Step]]) -> None:
    target = plain.pair.target
    points = [Point(1, 1, 64), Point(2, 5, 64), Point(1, 5, 128)]
    found = measure_points(target, points, 4, 1.0)
    written = torch.zeros(2, target.spec.capacity, dtype=torch.bool)
    for _, step in ran:
        rows, (start, count) = len(step.tokens), (int(step.write_at[0]), step.tokens.shape[1])
        assert written[:rows, :start].all()
        written[:rows, start : start + count] = True
    assert [(row["rows"], row["tokens"], row["context"]) for row in found] == [(1, 1, 64), (2, 5, 64), (1, 5, 128)]
    assert sum(step.tokens.shape == (2, 5) for _, step in ran) == 3 + 4


def test_turns_end_early_where_they_take_long() -> None:
    taken = take_turns({"a": lambda: 1.0, "b": lambda: 2.0}, 100, 20.0)
    assert {name: len(values) for name, values in taken.items()} == {"a": 7, "b": 7}


def test_a_model_has_the_size_and_the_vocabulary_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflate, "SIZES", {"10M": (10_000_000, 1_000_000)})
    Model("10M", 4096, 256).checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 256)
    assert 20e6 <= (tmp_path / "model.safetensors").stat().st_size < 22e6


def test_tables_and_plot_show_every_sweep(tmp_path: Path) -> None:
    figure = {"median": 1.5, "low": 1.0, "high": 2.0}

    def row(sweep: str, tokens: int, **values: Any) -> dict[str, Any]:
        own = {"engine": "torch f32", "size": "demo", "vocabulary": 2048, "rows": 1, "context": 128}
        return {"sweep": sweep, **own, "tokens": tokens, "ms": {**figure, "median": float(tokens)}, **values}

    sets: dict[str, list[dict[str, Any]]] = {
        sweep: [row(sweep, n, **{sweep: value}) for value in values for n in (1, 5, 17)]
        for sweep, values in {"rows": (1, 8), "context": (128, 512), "vocabulary": (2048,)}.items()
    }
    sets["size"] = [row("size", n, size=size) for size in ("demo", "78M") for n in (1, 5, 17)]
    assert "| torch f32 | demo | 512     | 1.00" in table(sets["context"])
    assert "17.00" in table(sets["size"]).splitlines()[-1]
    plot(sets, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000
