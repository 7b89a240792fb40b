"""Pairs of two vocabularies: a byte-level target, and an auxiliary with the tokens of SentencePiece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from engines.vocabulary import Translation, contents
from export.checkpoint.vocabulary import describe_vocabularies
from export.options import ExportOptions
from export.pair import export_pair
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from runtime.commands.inspect_folder import inspect
from runtime.decoder.translated import UNKNOWN
from runtime.pair import open_pair
from runtime.scheduler.request import Result
from tests.support.checkpoints import byte_tokenizer, make_checkpoint, make_other_tokenizer
from tests.support.integrity import check_loop
from tests.support.once import once

CONFIG = RuntimeConfig(threads=1, max_draft_len=4, max_beam_width=4)
ROOM = 256 - 4 * 4 - 8
SHARED = "How many singers are older than twenty, and where do they live? " * 2
PROMPTS = ["S", "naïve 日本語", "ECT" * 100, SHARED + "SELECT name", SHARED + "def largest(", "ECTive", SHARED]
"""The third has twice as many tokens in the auxiliary's vocabulary, and so more than its capacity."""


@pytest.fixture(scope="module")
def checkpoints(shared: Path, traced_once: None) -> tuple[Path, Path]:
    """The auxiliary is the target, as far as it has its tokens."""

    def write(folder: Path) -> None:
        target = make_checkpoint(folder / "target", seed=1)
        words = make_other_tokenizer()
        auxiliary = make_checkpoint(folder / "auxiliary", seed=2, tokenizer=words, eos_token_id=2, bos_token_id=1)
        drafted = Translation.of(*map(AutoTokenizer.from_pretrained, (target, auxiliary))).drafted
        known, other = (LlamaForCausalLM.from_pretrained(one).state_dict() for one in (target, auxiliary))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            other[name][drafted[drafted >= 0]] = known[name][drafted >= 0]
        model = LlamaForCausalLM.from_pretrained(auxiliary)
        model.load_state_dict(known | {name: other[name] for name in ("model.embed_tokens.weight", "lm_head.weight")})
        model.save_pretrained(auxiliary)

    folder = once(shared / "two-vocabularies", write)
    return folder / "target", folder / "auxiliary"


@pytest.fixture(scope="module")
def options(checkpoints: tuple[Path, Path]) -> Callable[[str], ExportOptions]:
    """Of the pair in a format."""
    return lambda name: ExportOptions(*map(str, checkpoints), rows=4, capacity=256, format=name)


@pytest.fixture(scope="module")
def exported(options: Callable[[str], ExportOptions], shared: Path) -> Callable[[str], Path]:
    """The folder of the pair in a format; exported when first asked for."""

    def write(name: str, folder: Path) -> None:
        export_pair(folder, options(name))

    return lambda name: once(shared / f"two-vocabularies-{name}", partial(write, name))


@pytest.fixture(scope="module", params=["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, exported: Callable[[str], Path]) -> Iterator[LLM]:
    """The pair on pages, and on OpenVINO, whose columns are an account."""
    config = CONFIG if request.param == "torch" else replace(CONFIG, provider="openvino", compute="float32")
    made = LLM(exported(request.param), config)
    yield made
    check_loop(made.loop)
    assert made.loop.scheduler.idle


@pytest.fixture(scope="module")
def words(checkpoints: tuple[Path, Path]) -> Translation:
    return Translation.of(*map(AutoTokenizer.from_pretrained, checkpoints))


def check(result: Result, words: Translation, auxiliary: LlamaForCausalLM, bias: dict[int, float]) -> int:
    """Compare what a result's tokens were drafted from with the checkpoint; returns how many there were."""
    text, path, count = list(result.prompt_token_ids), list[int](), 0
    added, lacks = torch.zeros(len(words.drafted)), torch.tensor(words.drafted < 0)
    added[list(bias)] = torch.tensor(list(bias.values()))
    for at, one in enumerate(result.details, 1):
        for draft in [one.accepted] if one.accepted else one.rejected:
            own = np.concatenate([[0], words.sizes[text].cumsum()])
            over = len(words.lead) + own[-1] - ROOM
            first = np.flatnonzero(own >= -(-over // (ROOM // 2)) * (ROOM // 2))[0] if over > 0 else 0
            read = [*words.lead, *words.spell(np.array(text[first:])), *words.pieces[words.ends[path] - 1]]
            with torch.inference_mode():
                logits = auxiliary(torch.tensor([read])).logits[0, -1, words.drafted.clip(0)]
            law = (torch.where(lacks, UNKNOWN, logits) + added).softmax(-1)
            assert draft.q == pytest.approx(float(law[draft.token]), abs=1e-4)
            path.append(draft.token)
            count += 1
        if one.accepted is None:
            text, path = [*result.prompt_token_ids, *result.token_ids[:at]], []
    return count


@pytest.fixture(scope="module")
def auxiliary(checkpoints: tuple[Path, Path]) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoints[1], dtype=torch.float32).eval()


def test_drafts_are_drawn_from_what_the_auxiliary_says_of_the_tokens_that_both_have(
    llm: LLM, auxiliary: LlamaForCausalLM, words: Translation
) -> None:
    base = DecodingParams(draft_len=4, draft="model", max_tokens=64, ignore_eos=True, draft_details=True, seed=3)
    asked = [replace(base, method=("block", "traversal", "mtad", "mmtad")[n % 4], branching=(3, 1)) for n in range(7)]
    results = llm.generate(PROMPTS, asked)
    assert sum(check(result, words, auxiliary, {}) for result in results) > 150
    assert sum(result.statistics.accepted for result in results) > 30
    tokens = {token for result in results for token in (*result.token_ids, *result.prompt_token_ids)}
    assert words.sizes[list(tokens)].max() > 1, "some tokens are several of the auxiliary's"


@pytest.mark.parametrize("draft", ["model", "lookup+model"])
def test_greedy_decoding_gives_what_the_target_gives_alone(llm: LLM, draft: Any) -> None:
    params = DecodingParams(temperature=0.0, max_tokens=24, draft_len=4, branching=(3, 1), draft=draft)
    alone = [llm.generate([prompt], replace(params, method="sample", draft=None))[0].token_ids for prompt in PROMPTS]
    lossless = [name for name, method in METHODS.items() if method.exact and name != "sample"]
    many = [(prompt, name) for name in lossless for prompt in PROMPTS]
    results = llm.generate([prompt for prompt, _ in many], [replace(params, method=name) for _, name in many])
    assert [result.token_ids for result in results] == alone * len(lossless)
    assert sum(result.statistics.accepted for result in results) > 100
    assert sum(result.statistics.reused_tokens for result in results) > 64


def test_what_the_auxiliary_lacks_is_drafted_where_a_request_leaves_nothing_else_or_asks_for_it(
    llm: LLM, auxiliary: LlamaForCausalLM, words: Translation
) -> None:
    only = np.flatnonzero((words.drafted < 0) & (words.sizes > 1))[:3].tolist()
    forbidding = {token: -1e9 for token in range(300) if token not in only}
    base = DecodingParams(draft="model", draft_len=3, branching=(2, 1), max_tokens=24, seed=1, draft_details=True)
    for bias in (forbidding, {only[0]: 8 - UNKNOWN}):
        asked = [replace(base, method=name, logit_bias=bias) for name in ["block", "traversal"] * 2]
        results = llm.generate(PROMPTS[:4], asked)
        assert {token for result in results for token in result.token_ids} <= set(only)
        assert sum(check(result, words, auxiliary, bias) for result in results) > 40
        assert sum(result.statistics.accepted for result in results) > 10


def test_a_pair_says_what_its_vocabularies_share_and_whatever_is_wrong_of_them_is_refused(
    options: Callable[[str], ExportOptions], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, stages = Path(shutil.copytree(exported("torch"), tmp_path / "pair")), list[str]()
    assert export_pair(folder, options("torch"), False, stages.append) is False
    assert "279 of the target's 300 tokens are in both vocabularies" in stages
    said = inspect(folder)
    assert (said["vocab_size"], said["shared_tokens"]) == (300, 279)
    assert said["engines"]["auxiliary"]["vocabulary_hash"] != said["vocabulary_hash"]
    with pytest.raises(InvalidInput, match="capacity"):
        open_pair(folder, RuntimeConfig(max_draft_len=16, max_beam_width=15))
    for own in (None, 1, "another", said["vocabulary_hash"]):
        values = {**json.loads((folder / "pair.json").read_text()), "auxiliary_vocabulary_hash": own}
        (folder / "pair.json").write_text(json.dumps(values))
        with pytest.raises(InvalidInput, match="export again"):
            open_pair(folder)


def test_the_same_token_stands_for_the_end_of_a_text_in_every_process() -> None:
    """Of two that could: the target's own end, which the auxiliary lacks, and another token, which it ends with."""
    target = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer("<end>"), eos_token="<end>")
    for name, words in (("<eos>", ()), ("<last>", ("<first>", "<last>"))):  # ids before and behind the target's end
        shared = byte_tokenizer("<end>", *words)
        target = PreTrainedTokenizerFast(tokenizer_object=shared, eos_token="<end>")
        auxiliary = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(*words), eos_token=name)
        for _ in range(12):  # a tokenizer gives its tokens in another order each time
            assert Translation.of(target, auxiliary).drafted[target.eos_token_id] == auxiliary.eos_token_id
    endless = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    with pytest.raises(InvalidInput, match=r"in both vocabularies .*, but the one that ends a text must be"):
        describe_vocabularies(target, endless, len(target), len(endless))


def test_added_tokens_of_spaces_are_spaces() -> None:
    tokenizer = make_other_tokenizer()
    tokenizer.add_tokens(["▁▁"])
    assert contents(tokenizer)[len(tokenizer) - 1] == b"  "
