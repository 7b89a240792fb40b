"""`LLM` on a real pair, as it runs on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.cache.paged import SPARE, by_page
from engines.folder import read_json, write_json
from engines.placement import Placement
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.pair import Pair, open_pair
from tests.support.replayed import ReplayRecorder

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    for device in ("cuda", "cuda:3", "gpu", "mps", ""):
        with pytest.raises(InvalidInput, match=f"device = '{device}': "):
            Placement(device)


@pytest.fixture(scope="module")
def torch_pair(pair_folders: Callable[[str], Path]) -> Pair:
    """The random Llama pair."""
    return open_pair(pair_folders("torch"))


@pytest.mark.slow
def test_captured_blocks_of_a_llama_pair_give_the_tokens_of_the_host(torch_pair: Pair) -> None:
    """`LLM` as it runs on a GPU, on memory of the host; what padded rows write and read may be no number."""
    base = DecodingParams(max_tokens=8, ignore_eos=True, seed=5, draft_len=3, beam_width=2)
    prompts = ["SELECT name FROM", "def largest(values):", "S", "where do they live? " * 4]
    methods = enumerate(("mtad", "mmtad", "speculative", "block"))
    params = [replace(base, method=method, seed=seed, top_logprobs=2 * (seed % 2)) for seed, method in methods]
    expected = LLM(torch_pair, RuntimeConfig(prefix_tokens=0)).generate(prompts, params)
    device = LLM(torch_pair, RuntimeConfig(max_prefill_tokens=16), recorder=ReplayRecorder(), record=())
    for engine in (torch_pair.target, torch_pair.auxiliary):
        by_page(engine.cache.kv)[:, :, :, SPARE] = math.nan
    found = device.generate(prompts, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        tops = [[[token for token, _ in row] for row in one.top_logprobs] for one in (ours, theirs)]
        assert tops[0] == tops[1]
    assert device.blocks
    assert len(device.blocks._blocks) > 2
    assert not device.blocks.unrecorded
    automatic = replace(base, method="speculative", draft_len="auto", temperature=0.0)
    greedy = replace(base, method="sample", temperature=0.0)
    assert device.generate(prompts[0], automatic)[0].token_ids == device.generate(prompts[0], greedy)[0].token_ids


@pytest.mark.slow
def test_blocks_of_a_target_alone_are_captured_unless_they_look_drafts_up(
    pair_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(pair_folders("torch") / "target")
    write_json(tmp_path / "pair.json", read_json(pair_folders("torch"), "pair.json") | {"engines": ["target"]})
    device = LLM(tmp_path, RuntimeConfig(prefix_tokens=0), recorder=ReplayRecorder())
    assert device.blocks
    sample = DecodingParams(method="sample", max_tokens=8, ignore_eos=True, seed=5)
    expected = LLM(tmp_path, RuntimeConfig(prefix_tokens=0)).generate("SELECT name FROM", sample)[0].token_ids
    assert device.generate("SELECT name FROM", sample)[0].token_ids == expected
    assert not device.blocks.unrecorded
    device.generate("SELECT name FROM", replace(sample, method="block"))
    assert set(device.blocks.unrecorded) == {"drafts are looked up on the host"}
