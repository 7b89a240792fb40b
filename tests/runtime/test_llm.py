"""The loop over two engines: independence of the batch, stop conditions, statistics."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import CapacityExceeded, InvalidInput
from runtime.prompts import Prompt
from runtime.scheduler.request import Request, Result
from tests.support.integrity import check_loop
from tests.support.log_probabilities import assert_log_probabilities

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many", "S", "where do they live? " * 4]
ONE_TOKEN = [7]
EVERY_PROMPT: list[Prompt] = [*PROMPTS, ONE_TOKEN]
METHODS = ("sample", "speculative", "block", "traversal", "mtad", "mmtad", "relaxed", "mmtad_sample")
BASE = DecodingParams(max_tokens=24, ignore_eos=True, seed=5)

pytestmark = pytest.mark.usefixtures("idle_afterwards")
DAILY = ("sample", "speculative", "traversal", "mtad", "mmtad")
"""One of each form of draft, and the paper's; a rule alone has tests of its own, which know no engine."""
FOLDERS = [
    *(("onnx", name) for name in DAILY),
    *(pytest.param("torch", name, marks=pytest.mark.slow) for name in ("speculative", "mmtad")),
]
every_method = pytest.mark.parametrize(("pair_folder", "method"), FOLDERS, indirect=["pair_folder"])
"""Few on the second engine, whose tokens are the first's (`test_both_engines_give_the_same_tokens`)."""


@pytest.fixture(scope="session")
def torch_llm(pair_folders: Callable[[str], Path]) -> LLM:
    return LLM(pair_folders("torch"), RuntimeConfig(threads=1, max_draft_len=8, max_beam_width=8))


def mixed() -> list[DecodingParams]:
    """Requests that differ in every parameter."""
    return [
        replace(BASE, method="mtad", seed=1),
        replace(BASE, method="sample", seed=2, temperature=0.7),
        replace(BASE, method="mmtad", seed=3, beam_width=3, draft_len=2, top_k=0, max_tokens=9),
        replace(BASE, method="speculative", seed=4, draft_len=5, top_p=1.0),
        replace(BASE, method="mtad", seed=5, beam_width=2, draft_len=1, accept_threshold=0.0),
        replace(BASE, method="mmtad", seed=6, temperature=0.0),
        replace(BASE, method="sample", seed=7, temperature=0.0, max_tokens=3),
        replace(BASE, method="mtad", seed=8, temperature=2.0, top_k=3, beam_width=8),
        replace(BASE, method="traversal", seed=9),
        replace(BASE, method="block", seed=10, draft_confidence=0.2),
        replace(BASE, method="mtad", seed=11, draft_len=6, draft_confidence=0.1),
        replace(BASE, method="relaxed", seed=12),
        replace(BASE, method="ensemble", seed=13),
        replace(BASE, method="budget_tree", seed=14),
        replace(BASE, method="mmtad_sample", seed=15, beam_width=6, draft_len=3),
        replace(BASE, method="traversal", seed=16),
        replace(BASE, method="block", seed=17, draft="lookup"),
        replace(BASE, method="traversal", seed=18, draft="lookup+model", draft_len=5),
        replace(BASE, method="mmtad_sample", seed=19, draft="lookup", draft_len=2, accept_threshold=0.0),
    ]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[str, DecodingParams, Result]]:
    """Each mixed request with the result it gets when nothing else runs; drafts are looked up in what repeats."""
    requests = [(PROMPTS[4 if params.draft else i % len(PROMPTS)], params) for i, params in enumerate(mixed())]
    results = [llm.generate(prompt, params)[0] for prompt, params in requests]
    assert results[-1].statistics.accepted, "nothing was looked up"
    return [(*request, result) for request, result in zip(requests, results, strict=True)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_request_that_joins_at_any_time_gets_the_tokens_it_gets_alone(
    llm: LLM, alone: list[tuple[str, DecodingParams, Result]], seed: int
) -> None:
    chance = random.Random(seed)
    order = chance.sample(range(len(alone)), len(alone))
    added: dict[int, Request] = {}
    finished: list[Request] = []
    while order or not llm.loop.scheduler.idle:
        for _ in range(min(chance.choice([0, 0, 1, 2]), len(order))):
            index = order.pop()
            added[index] = llm.add(*alone[index][:2])
        finished += llm.step()
        check_loop(llm.loop)
    assert {request.id for request in finished} == {request.id for request in added.values()}
    assert len(finished) == len(alone)
    tolerance = 0.0 if llm.pair.target.spec.format == "onnx" else 1e-5
    for index, request in added.items():
        found, expected = Result.of(request), alone[index][2]
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=tolerance, rel=0)


def test_a_draft_stops_where_the_auxiliary_is_unsure(llm: LLM) -> None:
    """No path of a likelihood below 1 is continued, so each block drafts one token, in one auxiliary step."""
    params = replace(BASE, method="mtad", top_k=0, top_p=1.0, draft_confidence=1.0)
    with patch.object(llm.pair.auxiliary, "enqueue", wraps=llm.pair.auxiliary.enqueue) as step:
        result = llm.generate([ONE_TOKEN], params)[0]  # a prompt of one token is not stored beforehand
    assert result.statistics.drafted == result.statistics.target_passes == step.call_count


@pytest.mark.parametrize("prompts", [None, 5, (word for word in "ab"), {"a": 1}, "half \ud800", ["\ud800"]])
def test_a_prompt_that_is_none_is_refused_before_anything_runs(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidInput, match="prompt"):
        llm.generate(prompts, BASE)
    assert llm.loop.scheduler.idle


def test_a_prompt_that_fills_its_row_is_refused_whatever_is_asked_for(llm: LLM) -> None:
    room = llm.loop.scheduler.room_for_tokens
    for params in (DecodingParams(min_tokens=4), DecodingParams(min_tokens=4, max_tokens=None)):
        with pytest.raises(CapacityExceeded, match="prompt"):
            llm.requests([7] * room, params)
    with pytest.raises(CapacityExceeded, match=r"prompt \(\d+\) and new tokens"):
        llm.requests([7] * (room - 2), DecodingParams(min_tokens=4, max_tokens=None))
    (scored,) = llm.generate([[7] * room], DecodingParams(max_tokens=0, prompt_logprobs=0))
    assert len(scored.prompt_logprobs) == room - 1, "a prompt alone may fill it"


def test_requests_that_end_while_others_are_generated_are_the_next_steps(llm: LLM) -> None:
    request = llm.add("S", replace(BASE, max_tokens=1))
    llm.generate("S", BASE)
    assert llm.step() == [request]


def test_several_choices_are_refused_for_one_request_be_they_the_pairs_own(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "pair", replace(llm.pair, defaults=replace(BASE, n=2)))
    with pytest.raises(InvalidInput, match="n = 2"):
        llm.add("S")


def test_llms_of_one_pair_take_turns_and_one_that_does_not_loses_its_own_requests_alone(llm: LLM) -> None:
    other, alone = LLM(llm.pair), [llm.generate(prompt, BASE)[0].token_ids for prompt in ("How many", "S")]
    lost = [llm.add(prompt, BASE) for prompt in PROMPTS[:2]]
    llm.step()
    kept = other.add("How many", BASE)
    other.step()
    assert llm.step() == lost
    assert all("another one of this pair ran" in str(request.error) for request in lost)
    while not other.loop.idle:
        other.step()
    assert kept.tokens == alone[0], "nobody wrote to its row"
    assert llm.generate("S", BASE)[0].token_ids == alone[1]


def test_an_llm_that_nobody_holds_takes_no_memory(pair_folders: Callable[[str], Path]) -> None:
    held = LLM(pair_folders("onnx"), RuntimeConfig(threads=1))
    held.generate("S", BASE)
    target = weakref.ref(held.pair.target)
    del held
    assert target() is None


def test_threads_that_generate_at_once_get_their_texts_one_after_another(llm: LLM) -> None:
    prompts = [[word] for word in PROMPTS[:4]]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda own: llm.generate(own, BASE)[0].token_ids, prompts))
    assert texts == [llm.generate(own, BASE)[0].token_ids for own in prompts]


def test_what_is_no_configuration_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="config"):
        LLM(llm.pair, {"rows": 4})  # type: ignore[arg-type]


def test_a_bad_word_that_is_no_text_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="bad_words"):
        llm.generate("S", replace(BASE, bad_words=("\ud800",)))


def test_a_forked_child_is_told_that_it_has_no_engine(llm: LLM) -> None:
    """The engines' threads are not in it, so it would wait forever."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            try:
                llm.generate("S", BASE)
            except InvalidInput as error:
                os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@every_method
def test_a_seed_reproduces_and_another_seed_differs(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, top_k=0, top_p=1.0, draft_len=4)
    first, again, other = llm.generate([PROMPTS[0]] * 3, [params, params, replace(params, seed=6)])
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    drawn, another = llm.generate([PROMPTS[0]] * 2, replace(params, seed=None))
    assert drawn.token_ids != another.token_ids
    assert llm.generate(PROMPTS[0], replace(params, seed=drawn.seed))[0].token_ids == drawn.token_ids


@every_method
def test_max_tokens_is_exact_and_less_is_a_prefix_of_more(llm: LLM, method: str) -> None:
    counts = [1, 2, 3, 5, 6, 11, 24]
    params = replace(BASE, method=method, accept_threshold=0.0)
    results = llm.generate([PROMPTS[1]] * len(counts), [replace(params, max_tokens=count) for count in counts])
    longest = results[-1]
    for count, result in zip(counts, results, strict=True):
        assert result.token_ids == longest.token_ids[:count]
        assert result.logprobs == pytest.approx(longest.logprobs[:count], abs=1e-5)
        assert result.finish_reason == "length"


@every_method
def test_an_end_of_sequence_inside_a_block_ends_the_text_there(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, ignore_eos=False, accept_threshold=0.1)
    free = llm.generate(PROMPTS[0], replace(params, ignore_eos=True))[0]
    cut = 0
    for token in list(dict.fromkeys(free.token_ids))[:8]:
        ending = LLM(replace(llm.pair, eos=(token,)))
        result = ending.generate(PROMPTS[0], params)[0]
        check_loop(ending.loop)
        assert ending.loop.scheduler.idle
        ends = result.token_ids[-1] == token
        assert token not in result.token_ids[:-1]
        assert result.finish_reason == ("stop" if ends else "length")
        tokens = result.token_ids[:-1] if ends else result.token_ids
        assert result.text == llm.pair.tokenizer.decode(tokens, skip_special_tokens=True)
        statistics = result.statistics
        cut += statistics.accepted + statistics.target_passes > statistics.tokens
        if params.spec.form != "beams":  # an ended beam leaves room for others
            assert result.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert cut or not params.drafts, "no text ended inside a block, so nothing was tested"


@pytest.mark.parametrize("pair_folder", ["onnx"], indirect=True)
@pytest.mark.parametrize(
    "method", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_both_engines_give_the_same_tokens(plain: LLM, torch_llm: LLM, method: str) -> None:
    params = [replace(BASE, method=method, seed=seed) for seed in range(len(EVERY_PROMPT))]
    ours, theirs = plain.generate(EVERY_PROMPT, params), torch_llm.generate(EVERY_PROMPT, params)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]


@pytest.mark.parametrize("method", ["sample", "speculative", DecodingParams.method])
def test_temperature_zero_is_the_checkpoints_greedy_decoding(
    llm: LLM, reference: LlamaForCausalLM, method: str
) -> None:
    results = llm.generate(EVERY_PROMPT, replace(BASE, method=method, temperature=0.0, seed=None))
    for result in results:
        prompt = torch.tensor([result.prompt_token_ids])
        greedy = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, eos_token_id=-1
        )
        assert result.token_ids == greedy[0, prompt.shape[1] :].tolist()


@every_method
def test_log_probabilities_and_alternatives_are_those_of_a_plain_forward_pass(
    llm: LLM, reference: LlamaForCausalLM, method: str
) -> None:
    base = replace(BASE, method=method, temperature=1.3, accept_threshold=0.1)
    params = [replace(base, top_logprobs=count) for count in (0, 1, 5, 20, 3)]
    for asked, result in zip(params, llm.generate(PROMPTS, params), strict=True):
        assert_log_probabilities(result, reference, asked.top_logprobs)


def test_a_long_prompt_delays_those_that_run_by_a_bounded_number_of_tokens_a_turn(llm: LLM) -> None:
    bounded = LLM(llm.pair, RuntimeConfig(max_prefill_tokens=8, prefix_tokens=0))
    with patch.object(llm.pair.target, "enqueue", wraps=llm.pair.target.enqueue) as enqueue:
        running = bounded.add(PROMPTS[0], replace(BASE, method="sample", max_tokens=60))
        while not running.tokens:
            bounded.step()
        late = bounded.add([5] * 100, BASE)
        while not late.tokens:
            enqueue.reset_mock()
            before = len(running.tokens)
            bounded.step()
            steps = [call.args[0] for call in enqueue.call_args_list]
            assert sum(step.tokens.shape[1] for step in steps if not step.keep.numel()) <= 8
            assert len(running.tokens) == before + 1, "a turn did not decode"
        assert len(running.tokens) >= 99 // 8
    bounded.cancel(running, late)


def test_more_prompts_than_the_queue_holds_are_fed_as_it_empties(llm: LLM) -> None:
    small = LLM(llm.pair, RuntimeConfig(max_waiting=2))
    params = replace(BASE, max_tokens=3)
    results = small.generate([[5 + i] for i in range(15)], params)
    assert [r.prompt_token_ids for r in results] == [[5 + i] for i in range(15)]
    assert [r.token_ids for r in results] == [r.token_ids for r in llm.generate([[5 + i] for i in range(15)], params)]


@every_method
def test_statistics_are_what_their_definitions_say(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, draft_len=3, beam_width=2)
    for result in llm.generate(PROMPTS, params):
        s, tokens = result.statistics, len(result.token_ids)
        assert s.tokens == tokens == len(result.logprobs)
        assert s.drafted == params.drafted * s.target_passes
        assert s.accepted + s.target_passes in (tokens, tokens + 1), "a block is its accepted tokens and one more"
        assert s.block_efficiency == tokens / s.target_passes
        assert s.acceptance_rate == (s.accepted / s.drafted if params.drafted else 0.0)
        assert min(s.prefill_seconds, s.draft_seconds, s.score_seconds) >= 0
        assert (s.draft_seconds > 0) == params.drafts
        if not params.drafts:
            assert (s.target_passes, s.accepted) == (tokens, 0)


def test_drafts_are_accepted_and_rejected(llm: LLM) -> None:
    """Else the other tests would not reach what they are about."""
    for method in METHODS[1:]:
        results = llm.generate(PROMPTS, replace(BASE, method=method, top_k=10, top_p=0.9))
        rate = sum(r.statistics.accepted for r in results) / sum(r.statistics.drafted for r in results)
        assert 0.15 < rate < 0.95, method


@every_method
def test_a_request_may_fill_its_row_to_the_last_column(llm: LLM, method: str) -> None:
    scheduler = llm.loop.scheduler
    room = scheduler.capacity - scheduler.max_draft_len * scheduler.max_beam_width
    params = replace(BASE, method=method, draft_len=8, beam_width=8, max_tokens=12, accept_threshold=0.0)
    full = [3 + i % 250 for i in range(room - 12)]
    alone = llm.generate(full, params)[0]
    assert len(alone.token_ids) == 12
    prompts: list[Prompt] = [full, PROMPTS[0], full]
    together = llm.generate(prompts, [params, replace(BASE, method="mmtad", beam_width=8), params])
    assert [together[0].token_ids, together[2].token_ids] == [alone.token_ids] * 2
    with pytest.raises(CapacityExceeded):
        llm.generate([*full, 3], params)


def test_padded_vocabulary_entries_are_never_produced(llm: LLM) -> None:
    assert llm.pair.auxiliary.spec.vocab_size > llm.pair.vocab_size
    for method in METHODS:
        params = replace(BASE, method=method, top_k=0, top_p=1.0, temperature=50.0, accept_threshold=0.0)
        tokens = itertools.chain.from_iterable(r.token_ids for r in llm.generate(PROMPTS, params))
        assert max(tokens) < llm.pair.vocab_size


def test_parameters_not_given_are_the_pairs_own(llm: LLM) -> None:
    tuned = LLM(replace(llm.pair, defaults=replace(BASE, max_tokens=3)))
    assert tuned.generate("S")[0].token_ids == llm.generate("S", replace(BASE, max_tokens=3))[0].token_ids
