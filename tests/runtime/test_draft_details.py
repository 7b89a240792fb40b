"""Details of drafts are those of plain forward passes of both checkpoints, and change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mtad import LLM, DecodingParams
from mtad.batch import ScoredTrees, Trees
from mtad.methods import METHODS
from runtime.decoder.draft_details import TokenDetails, details_of
from runtime.scheduler.request import Result

PROMPT = "SELECT name FROM"
PARAMS = DecodingParams(
    max_tokens=40, ignore_eos=True, seed=5, temperature=0.7, top_k=20, draft_len=4, draft_details=True
)


@pytest.fixture(scope="module")
def auxiliary(checkpoints: tuple[Path, Path]) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoints[1], dtype=torch.float32).eval()


def check(result: Result, target: LlamaForCausalLM, auxiliary: LlamaForCausalLM, vocab_size: int) -> None:
    assert sum(one.accepted is not None for one in result.details) == result.statistics.accepted
    text = list(result.prompt_token_ids)
    for token, logprob, one in zip(result.token_ids, result.logprobs, result.details, strict=True):
        path = [one.accepted] if one.accepted else one.rejected
        if one.accepted:
            assert one.accepted.token == token
            assert one.accepted.p == pytest.approx(np.exp(logprob), abs=1e-6)
            assert not one.rejected
        if path:
            tokens = torch.tensor([text + [drafted.token for drafted in path]])
            with torch.inference_mode():
                own, drafts = (
                    model(tokens).logits[0, len(text) - 1 : -1, :vocab_size] for model in (target, auxiliary)
                )
            kept = drafts / PARAMS.temperature
            kept = kept.masked_fill(kept < kept.topk(PARAMS.top_k).values[:, -1:], -torch.inf)
            for at, drafted in enumerate(path):
                assert drafted.p == pytest.approx(float(own[at].softmax(-1)[drafted.token]), abs=1e-4)
                assert drafted.q == pytest.approx(float(kept[at].softmax(-1)[drafted.token]), abs=1e-4)
        text.append(token)


@pytest.mark.parametrize("method", METHODS)
def test_details_are_the_probabilities_of_both_checkpoints(
    plain: LLM, reference: LlamaForCausalLM, auxiliary: LlamaForCausalLM, method: str
) -> None:
    asked = replace(PARAMS, method=method)
    (result,) = plain.generate(PROMPT, asked)
    (without,) = plain.generate(PROMPT, replace(asked, draft_details=False))
    assert (result.token_ids, without.details) == (without.token_ids, [])
    check(result, reference, auxiliary, plain.pair.vocab_size)
    assert bool(result.statistics.drafted) == any(one.accepted or one.rejected for one in result.details)
    assert len(result.to_dict()["details"]) == 40


def test_beams_are_those_of_the_last_level() -> None:
    # two beams: both go on from node 0, and the beam of node 1 is lost; the target keeps node 0 alone
    nodes, minus = np.zeros((1, 4), np.int64), np.log([[0.5, 0.25, 0.2, 0.1]])
    flags = np.ones((1, 4), np.bool_)
    trees = Trees(
        np.array([[5, 6, 7, 8]]), np.array([[-1, -1, 0, 0]]), minus, flags, flags, ~flags, np.array([[0, 2, 4]])
    )
    whole, rest = np.array([[0, 1, 2, 3]]), (~flags, np.zeros((1, 3)))
    scored = ScoredTrees(trees.tokens, trees.parents, nodes, flags, *rest, whole, np.array([4]), np.array([2]))
    first, own = details_of(0, trees, scored, [0], np.zeros((5, 10), np.float32))
    assert first.accepted is not None
    assert (first.accepted.token, first.accepted.beams) == (5, 2)
    assert [(one.token, one.beams) for one in own.rejected] == [(7, 1)]
    assert own.rejected[0].q == pytest.approx(0.4)
    (own,) = details_of(0, trees, scored, [], np.zeros((5, 10), np.float32))
    assert [(one.token, one.beams) for one in own.rejected] == [(5, 2), (7, 1)], "the likeliest of each level"
    (own,) = details_of(0, trees, scored._replace(counts=np.array([0])), [], np.zeros((5, 10), np.float32))
    assert own == TokenDetails(), "a block without a draft"
