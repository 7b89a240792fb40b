"""Looked-up drafts in the loop, and a pair without an auxiliary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engines.folder import open_engine, read_json, write_json
from engines.placement import Placement
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from runtime.decoder.block import Block, BlockInput
from runtime.pair import store_costs
from runtime.speculation.lookup import Draft, Lookups
from tests.support.commands import Run, assert_refused
from tests.support.integrity import check_loop

REPEATED = [list(range(40, 60)) * 3, [5, 6, 7] * 12, [*range(90, 120), *range(90, 100)], "where do they live? " * 4]
"""Prompts in whose text something is found from the first block on."""
BASE = DecodingParams(max_tokens=24, ignore_eos=True, seed=5)

pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def llm(plain: LLM) -> LLM:
    return plain


@pytest.fixture(scope="module")
def lone(pair_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the pair alone, as an export without an auxiliary writes it."""
    folder = tmp_path_factory.mktemp("lone")
    shutil.copytree(pair_folders("onnx") / "target", folder / "target")
    write_json(folder / "pair.json", read_json(pair_folders("onnx"), "pair.json") | {"engines": ["target"]})
    return folder


@pytest.mark.parametrize("draft", ["lookup", "lookup+model"])
@pytest.mark.parametrize("method", ["block", "traversal", "budget"])
def test_greedy_tokens_are_those_of_the_target_alone(llm: LLM, draft: str, method: str) -> None:
    greedy = replace(BASE, temperature=0.0, seed=None)
    expected = llm.generate(REPEATED, replace(greedy, method="sample"))
    for length in ("auto", 3):
        own = DecodingParams.from_dict({"method": method, "draft": draft, "draft_len": length}, greedy)
        found = llm.generate(REPEATED, own)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert length == "auto" or sum(one.statistics.accepted for one in found) > 4


def test_a_row_that_looks_up_alone_never_runs_the_auxiliary(llm: LLM) -> None:
    with patch.object(llm.pair.auxiliary, "enqueue", wraps=llm.pair.auxiliary.enqueue) as step:
        params = replace(BASE, method="mmtad", draft="lookup", accept_threshold=0.0, draft_len=4)
        results = llm.generate(REPEATED, params)
        assert sum(one.statistics.accepted for one in results) > 10
        assert not step.called


@pytest.mark.parametrize("method", ["relaxed", "traversal"])
@pytest.mark.parametrize("prompt", [REPEATED[2], list(range(90, 120))], ids=["after drafts", "from the start"])
def test_a_row_for_which_nothing_was_found_has_no_draft_beside_one_that_the_auxiliary_drafts_for(
    llm: LLM, method: str, prompt: list[int]
) -> None:
    found: list[int] = []

    def find(*given: Any) -> list[Draft]:
        drafts = Lookups.find(llm.loop.lookups, *given)
        found.append(sum(len(draft[0]) for draft in drafts if draft))
        return drafts

    with patch.object(llm.loop.lookups, "find", find):
        params = DecodingParams.from_dict({"method": method, "draft": "lookup", "draft_len": 3, "max_tokens": 40}, BASE)
        model = replace(params, draft="model", max_tokens=120)  # runs longer, so each block has its draft
        result, _ = llm.generate([prompt, REPEATED[3]], [params, model])
    assert 0 in found
    assert bool(found[0]) == (prompt in REPEATED)
    assert result.statistics.drafted == sum(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_looked_up_keeps_to_constraints(llm: LLM, temperature: float) -> None:
    """What the prompts repeat is forbidden by a regular expression, or a banned word."""
    methods = [name for name, method in METHODS.items() if method.form]
    base = replace(BASE, temperature=temperature, draft="lookup", draft_len=4)
    for forbids in ({"regex": "[0-9 ]{60}", "ignore_eos": False}, {"bad_words": ("x", "y")}):
        asked = [DecodingParams.from_dict({**forbids, "method": name}, base) for name in methods]
        results = llm.generate(["1 2 x 1 2 y 1 2 x 1 2 y 1 2"] * len(methods), asked)
        assert sum(one.statistics.drafted for one in results) > 20
        for name, one in zip(methods, results, strict=True):
            assert not set("xy").intersection(one.text), (name, one.text)
            assert "regex" not in forbids or not one.text.strip("0123456789 "), (name, one.text)


@pytest.mark.parametrize("method", ["traversal", "budget_tree"])
def test_none_of_many_continuations_is_accepted_that_the_target_cannot_write(llm: LLM, method: str) -> None:
    """In float32 the fourth has no share of the draft, and what has none was drawn for certain."""
    after, prompt = [41, 42, 43, 44], [1, 2, 41, 1, 2, 42, 1, 2, 43, 1, 2, 44, 9, 1, 2]
    params = replace(BASE, method=method, draft="lookup", draft_len=1, branching=(4,), max_tokens=1, n=20)
    results = llm.generate([prompt], replace(params, logit_bias=dict.fromkeys(after, -1e9)))
    assert sum(one.statistics.drafted for one in results) == 20
    assert not {token for one in results for token in one.token_ids} & set(after)


@pytest.mark.parametrize("method", ["block", "traversal"])
def test_the_auxiliary_catches_up_with_what_was_looked_up_before_it_drafts_again(
    llm: LLM, pair_folders: Callable[[str], Path], method: str
) -> None:
    """An auxiliary that is the target's twin drafts what the target says, as long as its cache is right."""
    twin = open_engine(pair_folders("onnx") / "target", Placement(threads=1))
    both = LLM(replace(llm.pair, auxiliary=twin), RuntimeConfig(max_draft_len=8, max_beam_width=8))
    blocks: list[Block] = []
    run = both.runner.run

    def record(given: BlockInput) -> Block:
        blocks.append(run(given))
        return blocks[-1]

    with patch.object(both.runner, "run", record):
        both.generate(REPEATED, replace(BASE, method=method, temperature=0.0, draft="lookup+model", draft_len=4))
    rows = [(block, row) for block in blocks for row in range(len(block.tokens))]
    drawn = [len(block.tokens[row]) for block, row in rows if block.given.params[row].uses_model]
    assert len(rows) - len(drawn) > 10, "hardly anything was looked up"
    assert len(drawn) > 5
    assert set(drawn) == {5}


@pytest.mark.parametrize("method", ["block", "traversal"])
def test_a_second_request_drafts_what_the_first_has_written(llm: LLM, method: str) -> None:
    keeping = LLM(llm.pair, RuntimeConfig(max_draft_len=8, max_beam_width=8, lookup_tokens=1000))
    greedy = replace(BASE, method=method, temperature=0.0, seed=None, draft="lookup", draft_len=4)
    first, second = (keeping.generate("where do they live?", greedy)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.statistics.target_passes == 5 < first.statistics.target_passes


def test_a_pair_without_an_auxiliary_decodes_as_the_target_does(lone: Path, llm: LLM) -> None:
    store_costs(lone)
    alone = LLM(lone, RuntimeConfig(threads=1, max_draft_len=8, max_beam_width=8))
    assert read_json(lone, "pair.json")["costs"]["level"] == 0.0
    assert alone.memory.row == llm.memory.row - llm.pair.auxiliary.spec.kv_bytes // llm.pair.auxiliary.spec.rows
    for method in ("block", "mtad"):
        params = replace(BASE, method=method, draft_len=4)
        expected = llm.generate(REPEATED, replace(params, draft="lookup"))
        assert [one.token_ids for one in alone.generate(REPEATED, params)] == [one.token_ids for one in expected]
    for draft in ("model", "lookup+model"):
        with pytest.raises(InvalidInput, match="no auxiliary"):
            alone.generate("S", replace(BASE, draft=draft))  # type: ignore[arg-type]
    assert alone.pair.settled(DecodingParams(method="sample", thinking_method="block")).thinking.draft == "lookup"
    check_loop(alone.loop)


@pytest.mark.slow
def test_a_target_alone_is_exported(run: Run, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    target = checkpoints[0]
    asked = run("generate", target, "where do they live? where do", "--max-tokens", 4, "--threads", 1)
    assert (asked.code, "auxiliary: none" in asked.err) == (0, True)
    (folder,) = (Path(line.removeprefix("pair: ")) for line in asked.err.splitlines() if line.startswith("pair: "))
    assert read_json(folder, "pair.json")["engines"] == ["target"]
    assert {path.name for path in folder.iterdir()} == {"pair.json", "target"}
    assert run("check", folder).code == 0
    for option in (["--auxiliary-precision", "float16"], ["--defaults", '{"draft": "model"}']):
        assert_refused(run("export", tmp_path / "pair", "--target", target, *option), "export", "auxiliary")
    assert "102,720" not in run("export", tmp_path / "pair", "--target", target, "--dry-run").out
    assert_refused(run("generate", tmp_path / "nothing", "S"), "generate", "no such folder")


def test_commands_take_a_pair_without_an_auxiliary(lone: Path, run: Run, checkpoints: tuple[Path, Path]) -> None:
    assert "auxiliary" not in run("inspect", lone).out
    assert run("check", lone, "--checkpoint", checkpoints[0]).code == 2, "it works on one engine"
    asked = run("generate", lone, "S", "--max-tokens", 4, "--threads", 1)
    assert (asked.code, asked.err.count("error")) == (0, 0)
    assert_refused(run("generate", lone, "S", "--draft", "model"), "generate", "no auxiliary")
    write_json(lone / "pair.json", read_json(lone, "pair.json") | {"engines": ["auxiliary"]})
    assert_refused(run("inspect", lone), "inspect", "engines")
