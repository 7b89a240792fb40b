"""Training a pair: what a row teaches, cut off and gone on with, exported; and the committed pair is the recipe's."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from export.options import ExportOptions
from export.pair import export_pair
from scripts.demo import batches, dataset, think, train
from scripts.demo.tokenizer import SPECIAL, TEMPLATE, VOCABULARY
from scripts.paths import DEMO

ROLES = ("target", "auxiliary")
WORDS = AutoTokenizer.from_pretrained(DEMO / "pair" / "target", local_files_only=True)


@pytest.fixture
def small() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(train.QUICK["target"].config)


@pytest.mark.slow
def test_a_training_that_was_cut_off_goes_on_to_the_same_weights_and_they_can_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = batches.make

    def cut_off(*args: Any) -> batches.Batch:
        if args[-1] == 6:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(sys, "argv", ["train", "--quick", str(tmp_path / "pair")])
    monkeypatch.setattr(train, "material", functools.cache(train.material))
    monkeypatch.setattr(train, "SAVED", 4)
    monkeypatch.setattr(batches, "make", cut_off)
    with pytest.raises(SystemExit):
        train.main()
    assert [path.name for path in (tmp_path / "pair").iterdir()] == ["target.checkpoint"]
    monkeypatch.setattr(batches, "make", make)
    train.main()
    target, auxiliary = (tmp_path / "pair" / role for role in ROLES)
    recipe, (words, code) = train.QUICK["target"], train.material(40, 100)
    train.fit(recipe, words, train.batches_of(recipe, words, code), tmp_path / "whole", compiled=False)
    weights, whole = (load_file(folder / "model.safetensors") for folder in (target, tmp_path / "whole"))
    torch.testing.assert_close(weights, whole, rtol=0, atol=0)
    for folder in (target, auxiliary):
        last = json.loads((folder / "training.jsonl").read_text().splitlines()[-1])
        assert last["development_sql"] < torch.tensor(VOCABULARY).log() - 0.1, "it has learnt"
    export_pair(tmp_path / "exported", ExportOptions(str(target), str(auxiliary), rows=2, capacity=128, format="torch"))
    assert (tmp_path / "exported" / "pair.json").exists()


def test_a_pair_in_a_row_is_read_as_if_the_schema_stood_in_front_of_it_alone(small: PreTrainedModel) -> None:
    schema, pairs = next(dataset.training_groups(7))
    row = batches._sql_row(WORDS, schema, pairs)
    batch = batches._batch([row], batches.ROW)
    with torch.no_grad():
        together = small(**batch.inputs).logits[0]
        for branch in (1, max(row.branches)):
            at = torch.tensor([n for n, one in enumerate(row.branches) if one in (0, branch)])
            alone = small(input_ids=batch.inputs["input_ids"][:, at]).logits[0]
            torch.testing.assert_close(together[at], alone, rtol=1e-3, atol=1e-4)
            text = WORDS(schema + pairs[branch - 1][0] + pairs[branch - 1][1])["input_ids"]
            assert WORDS.decode(batch.inputs["input_ids"][0, at]) == WORDS.decode(text)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_a_cpu_without_bfloat16_orthogonalizes_gradients_in_float32(shape: tuple[int, int]) -> None:
    grad = torch.randn(shape, generator=torch.manual_seed(1))
    found = train.orthogonalized(grad, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert found.dtype == torch.float32
    assert (torch.linalg.svdvals(found) - 1).abs().max() < 0.5, "Muon's coefficients come so near to 1, and no nearer"
    assert (found * grad).sum() > 0


def test_from_a_target_that_is_the_same_there_is_nothing_to_learn(small: PreTrainedModel) -> None:
    batch = batches._batch([batches._sql_row(WORDS, *next(dataset.training_groups(7)))], batches.ROW)

    def norm(guide: PreTrainedModel | None) -> float:
        small.zero_grad()
        train.backward(small, batch, guide)
        return float(torch.nn.utils.get_total_norm([p.grad for p in small.parameters() if p.grad is not None]))

    assert norm(guide=small) < 0.02 * norm(guide=None)


@pytest.mark.parametrize("role", ROLES)
def test_the_committed_pair_has_the_recipes_shape_and_went_through_all_its_steps(role: str) -> None:
    folder, recipe = DEMO / "pair" / role, train.RECIPES[role]
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float16)
    weights = load_file(folder / "model.safetensors")
    assert {name: value.dtype for name, value in weights.items()} == dict.fromkeys(weights, torch.float16)
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    described = json.loads((folder / "config.json").read_text())
    assert {**described, **recipe.config.to_diff_dict()} == described
    steps = [json.loads(line)["step"] for line in (folder / "training.jsonl").read_text().splitlines()]
    assert steps == list(range(train.LOGGED, recipe.steps + 1, train.LOGGED))
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert words.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3]
    assert words.chat_template == TEMPLATE


CHAT = [{"role": "user", "content": "How many?"}]


def test_a_thought_names_what_its_query_needs_and_stands_between_tokens_of_its_own() -> None:
    words, made = think.vocabulary(), think.groups(5)
    assert words("<think></think>")["input_ids"] == [len(words) - 2, len(words) - 1]
    talk = words.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert talk.endswith("<|assistant|><think></think>")
    for _ in range(8):
        schema, pairs = next(made)
        for prompt, answer in pairs:
            thought, closed, query = answer.rpartition("</think>")
            assert (thought.startswith("<think>") and bool(closed)) != prompt.endswith("<think></think>")
            for table in re.findall(r"Table (\w+)", schema) if closed else ():
                assert bool(re.search(rf"\b{table}\b", query)) <= (table in thought), answer
