"""The engine of TensorRT-LLM's plans, on a plan that checks what the library checks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engines.base import KV_PAGE, Step
from engines.cache.paged import SPARE
from engines.tensorrt_llm.cache import spare_pages
from engines.tensorrt_llm.engine import TensorRTLLMEngine
from engines.tensorrt_plan import TensorRtPlan
from export.checkpoint.find import find
from export.verification.verify import TOLERANCE, expect, verify
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.decoder.engine_role import EngineRole
from runtime.pair import Pair, open_pair
from tests.support import fake_tensorrt_llm
from tests.support.fake_tensorrt_llm import Abort
from tests.support.quick_filters import quick_filters
from tests.support.replayed import ReplayRecorder
from tests.support.steps import make_step, more_tokens, some_tokens

ROWS, CAPACITY, TOKENS, PREFILL = 4, 256, 33, 40


def opened(folder: Path, checkpoint: Path, **changes: Any) -> TensorRTLLMEngine:
    """An engine on the fake."""
    folder.mkdir(exist_ok=True)
    plan = TensorRtPlan("10.14.1.48", "GPU", ("9.0",), ROWS, TOKENS, PREFILL)
    spec = find("target", str(checkpoint)).spec(ROWS, CAPACITY, "float32", "tensorrt-llm")
    built = {"rows": ROWS, "tokens": TOKENS, "prefill": PREFILL, "columns": CAPACITY + KV_PAGE * spare_pages(TOKENS)}
    fake_tensorrt_llm.write_plan(folder, checkpoint, **(built | changes))
    engine = TensorRTLLMEngine(folder, replace(spec, plan=plan), fake_tensorrt_llm, "cpu")  # type: ignore[arg-type]
    engine._engine.pool = lambda: engine.cache.kv
    return engine


@pytest.fixture
def engine(checkpoints: tuple[Path, Path], tmp_path: Path) -> TensorRTLLMEngine:
    return opened(tmp_path / "target", checkpoints[0])


@pytest.fixture
def pairs(
    checkpoints: tuple[Path, Path], tmp_path: Path, pair_folders: Callable[[str], Path]
) -> Iterator[tuple[Pair, Pair]]:
    """The pair on the fake, and on the PyTorch engine."""
    plain = open_pair(pair_folders("torch"))
    engines = [opened(tmp_path / name, folder) for name, folder in zip("ta", checkpoints, strict=True)]
    with quick_filters():
        yield replace(plain, target=engines[0], auxiliary=engines[1]), plain
    gc.collect()


def test_logits_of_prompts_and_trees_are_the_checkpoints(
    engine: TensorRTLLMEngine, reference: LlamaForCausalLM
) -> None:
    assert verify(engine, expect(reference, engine.spec)) <= TOLERANCE["float32"]


def test_a_level_gives_what_one_step_over_its_draft_gives_whatever_was_drafted_before(
    engine: TensorRTLLMEngine,
) -> None:
    """Rows have drafts of different lengths, as those of a mixed batch."""
    starts, counts = [7, 70], [2, 1]  # tokens of each row, and nodes of its first level
    for row, start in enumerate(starts):
        engine.step(make_step(some_tokens(row, start)[None], [0], first_row=row, keep=[]))
    engine.step(make_step(more_tokens(2, 8), starts))  # leaves a mask in which every token sees those before it
    tokens, base = more_tokens(2, 4), torch.tensor(starts)[:, None]
    sees = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    sees[0, 2, 0] = sees[0, 3, 1] = sees[1, 1:, 0] = True  # the second level's parents
    behind = torch.arange(128) - base
    mask = (behind < 0)[:, None].repeat(1, 4, 1)
    for row, start in enumerate(starts):
        mask[row, :, start : start + 4] = sees[row]
    positions, every = base + sees.sum(2) - 1, torch.arange(2)
    whole = Step(tokens, positions, base[:, 0], mask[:, None], torch.arange(4))
    expected = engine.step(whole).clone()
    engine.step(make_step(more_tokens(2, 8), starts))
    first = replace(whole, tokens=tokens[:, :2], positions=positions[:, :2], mask=mask[:, None, :2], keep=every)
    engine.step(first)
    at = torch.tensor(counts)[:, None] + torch.arange(2)
    rows = torch.arange(2)[:, None]
    second = Step(tokens[rows, at], positions[rows, at], base[:, 0] + at[:, 0], mask[rows, at][:, None], every)
    found = engine.step(replace(second, drafted=max(counts)))
    torch.testing.assert_close(found, expected[rows, at])


def test_scored_prompts_take_no_contexts(engine: TensorRTLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shapes are many; contexts are kept for blocks that may be captured, and are few."""
    monkeypatch.setattr("engines.tensorrt_llm.engine.MAX_CONTEXTS", 5)
    role = EngineRole(engine, engine.spec.vocab_size)
    for row, length in enumerate((5, 70, 130)):
        tokens = some_tokens(row, length)
        found = torch.cat([part.clone() for part in role.logits(row, tokens.tolist(), 0)])
        assert not engine._bound
        expected = engine.step(make_step(tokens[None], [0], first_row=row))[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        engine._bound.clear()
    stand_on = engine.captured_on
    for length in range(1, 7):
        assert engine.captured_on is stand_on
        engine.step(make_step(some_tokens(0, 1 + length % 32)[None], [length], keep=[0] * (1 + length // 32)))
    assert engine.captured_on is not stand_on
    assert len(engine._bound) == 1


METHODS = ("mtad", "mmtad", "speculative", "block", "sample", "traversal")
PROMPTS = ["SELECT name FROM", "def largest(values):", "S", "where do they live? " * 4, "SELECT name FROM singer", "q"]


def params_of(methods: tuple[str, ...]) -> list[DecodingParams]:
    base = DecodingParams(max_tokens=10, ignore_eos=True, draft_len=3, beam_width=2)
    return [replace(base, method=method, seed=number) for number, method in enumerate(methods)]


def test_every_drafting_form_gives_the_tokens_of_the_pytorch_engine(pairs: tuple[Pair, Pair]) -> None:
    """In-flight batching, kept prefixes, pages: the loop is the same code."""
    params = params_of(METHODS)
    ours, theirs = (LLM(pair, RuntimeConfig(max_prefill_tokens=16, max_draft_len=8)) for pair in pairs)
    for _ in range(2):  # the second time, prompts are kept
        found, expected = (llm.generate(PROMPTS, params) for llm in (ours, theirs))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    asked = DecodingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0, seed=1)
    scores = [llm.generate(PROMPTS[3], asked)[0].prompt_logprobs for llm in (ours, theirs)]
    assert scores[0]
    assert [one.logprob for one in scores[0]] == pytest.approx([one.logprob for one in scores[1] or ()], abs=1e-4)


@pytest.mark.slow
def test_captured_blocks_give_the_tokens_of_the_host(pairs: tuple[Pair, Pair]) -> None:
    """A replay reads nothing on the host: what the library reads there is as it was when the block was captured."""
    params = params_of(METHODS[:5])
    expected = LLM(pairs[1], RuntimeConfig(prefix_tokens=0, max_draft_len=8)).generate(PROMPTS[:5], params)
    device = LLM(pairs[0], RuntimeConfig(max_prefill_tokens=16, max_draft_len=8), recorder=ReplayRecorder(), record=())
    assert isinstance(pairs[0].target, TensorRTLLMEngine)
    pairs[0].target.cache.kv[SPARE] = torch.nan  # what padded rows write
    found = device.generate(PROMPTS[:5], params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert device.blocks
    assert len(device.blocks._blocks) > 1
    assert not device.blocks.unrecorded


BROKEN: dict[str, Callable[[Any], Any]] = {
    "host_request_types": lambda x: x[::-1] * 0 + [1, *[0] * (len(x) - 1)],
    "host_past_key_value_lengths": lambda x: x * 0,
    "host_max_attention_window_sizes": lambda x: x - 1,
    "host_kv_cache_pool_pointers": lambda x: x + 64,
    "sequence_length": lambda x: x * 0,
    "kv_cache_block_offsets": lambda x: x[:, :, ::-1],
    "last_token_ids": lambda x: x - 1,
    "spec_decoding_use": lambda x: x * 0,
    "spec_decoding_packed_mask": lambda x: x[:, :1],
    "spec_decoding_position_offsets": lambda x: x[:, 1:],
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_fake_ends_where_the_library_would(name: str, engine: TensorRTLLMEngine) -> None:
    for row in range(2):
        engine.step(make_step(some_tokens(row, 7)[None], [0], first_row=row, keep=[]))
    step = make_step(more_tokens(2, 3), [7, 7])
    engine.step(step)
    engine._engine.broken[name] = BROKEN[name]
    with pytest.raises(Abort):
        engine.step(step)


def test_a_plan_that_was_built_otherwise_is_refused_before_it_runs(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"spec_decoding_packed_mask \(INT32, at most 64x1\)"):
        opened(tmp_path / "narrow", checkpoints[0], tokens=16)
    with pytest.raises(InvalidInput, match=r"cache_indirection \(INT32, at most 4x1x256\)"):
        opened(tmp_path / "short", checkpoints[0], columns=CAPACITY)
    monkeypatch.setattr(fake_tensorrt_llm.Plan, "num_io_tensors", 3)
    with pytest.raises(InvalidInput, match="spec_decoding_use"):
        opened(tmp_path / "other", checkpoints[0])


def test_drafts_beyond_the_plan_are_refused_when_the_pair_is_opened(pairs: tuple[Pair, Pair]) -> None:
    with pytest.raises(InvalidInput, match="room for 32 drafted tokens"):
        LLM(pairs[0], RuntimeConfig(max_draft_len=8, max_beam_width=8))
