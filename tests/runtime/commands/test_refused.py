"""What is refused or interrupted: nothing of it runs on, and nothing of it is left behind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from tests.runtime.test_llm import BASE, PROMPTS

pytestmark = pytest.mark.usefixtures("idle_afterwards")

BAD = [
    ("prompt", "", {}),
    ("prompt", [], {}),
    ("prompt", [5, 300], {}),
    ("prompt", [True], {}),
    ("prompt", ["a", "b"], {}),
    ("prompt", None, {}),
    ("prompt", b"bytes", {}),
    ("prompt", [5] * 192, {"max_tokens": 1}),
    ("prompt", "word " * 1000, {}),
    ("max_tokens", "S", {"max_tokens": 192}),
    ("regex", "S", {"regex": "(unclosed", "ignore_eos": False}),
    ("logit_bias", "S", {"logit_bias": {100_000: 1.0}}),
]


@pytest.mark.parametrize("pair_folder", ["onnx"], indirect=True)
@pytest.mark.parametrize(("field", "prompt", "values"), BAD)
def test_bad_input_is_refused_by_field_and_nothing_of_its_batch_runs(
    llm: LLM, field: str, prompt: object, values: dict[str, Any]
) -> None:
    """Before it reaches an engine, so that one format shows it."""
    before = llm.pair.target.cache.kv.clone()
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        llm.generate(["S", prompt, "S"], [BASE, replace(BASE, **values), BASE])  # type: ignore[arg-type, list-item]
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        llm.add(prompt, replace(BASE, **values))  # type: ignore[arg-type]
    assert llm.loop.scheduler.idle
    assert torch.equal(llm.pair.target.cache.kv, before)


def test_parameters_must_be_one_or_one_for_each_prompt_and_a_single_request_has_one_choice(llm: LLM) -> None:
    for count in (0, 1, 3):
        with pytest.raises(InvalidInput, match="params"):
            llm.generate(["S", "S"], [BASE] * count)
    with pytest.raises(InvalidInput, match="n = 3"):
        llm.add("S", replace(BASE, n=3))
    assert llm.loop.scheduler.idle


@pytest.mark.parametrize(
    ("field", "values"),
    [("max_draft_len", {"max_draft_len": 32, "max_beam_width": 8}), ("max_prefill_tokens", {"max_prefill_tokens": 0})],
)
def test_limits_that_leave_no_room_are_refused(llm: LLM, field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        LLM(llm.pair, RuntimeConfig(**values))


@pytest.mark.parametrize("role", ["auxiliary", "target"])
@pytest.mark.parametrize("call", [0, 5, 20])
def test_an_interrupted_generate_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, role: str, call: int
) -> None:
    expected = llm.generate(PROMPTS[0], replace(BASE, seed=1))[0]
    engine, calls = getattr(llm.pair, role), itertools.count()
    step = engine.enqueue

    def interrupted(*arguments: object) -> object:
        if next(calls) == call:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 3, replace(BASE, seed=0))
    assert llm.loop.scheduler.idle
    assert llm.generate(PROMPTS[0], replace(BASE, seed=1))[0].token_ids == expected.token_ids


def test_of_an_interrupted_generate_only_what_was_queued_counts_and_no_later_step_meets_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = LLM(llm.pair, RuntimeConfig(max_waiting=2))
    calls, step = itertools.count(), llm.pair.target.enqueue

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(llm.pair.target, "enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.generate([PROMPTS[0]] * 40, replace(BASE, seed=0))
    ended = small.loop.totals.to_dict()["requests"]
    assert 2 <= sum(ended.values()) <= 2 + small.loop.scheduler.rows, "what never left the list was not cancelled"
    mine = small.add(PROMPTS[0], replace(BASE, seed=1))
    seen = []
    while not small.loop.scheduler.idle:
        seen += small.step()
    assert seen == [mine]
    assert mine.finish_reason in ("stop", "length")
