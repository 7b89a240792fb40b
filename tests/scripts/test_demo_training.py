"""The demo's committed weights are the output of its committed recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from scripts.demo import batches, chat
from scripts.demo.recipes import LONG, RECIPES
from scripts.demo.schedule import Limit
from scripts.demo.train import LOGGED, Material, Trainer, build, code_texts
from scripts.paths import DEMO

ROLES = ("target", "auxiliary")


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "pair" / "target", local_files_only=True)


@pytest.fixture(scope="module")
def material(words: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(words, batches.code_tokens(words, tmp_path_factory.mktemp("code"), code_texts()), {})


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_the_recipes_first_steps_have_the_committed_losses(role: str, material: Material, tmp_path: Path) -> None:
    recipe = RECIPES[role]
    trainer = Trainer(recipe, material, tmp_path / "work", tmp_path, compiled=False)
    found = [trainer.advance(Limit(recipe.steps), 0.0) for _ in range(LOGGED)]
    first = json.loads((DEMO / "pair" / role / "training.jsonl").read_text().splitlines()[0])
    assert first["step"] == LOGGED
    for kind in ("sql", "code"):  # Python versions differ in their library's files, and machines in rounding
        assert np.mean([step[kind] for step in found]) == pytest.approx(first[f"train_{kind}"], rel=0.03)


@pytest.mark.parametrize("role", ROLES)
def test_the_committed_weights_have_the_recipes_shape_and_went_through_all_its_steps(role: str) -> None:
    folder, recipe = DEMO / "pair" / role, RECIPES[role]
    with safe_open(folder / "model.safetensors", "pt") as stored:
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        kinds = {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    expected = {
        name: list(value.shape) for name, value in build(recipe).state_dict().items() if name != "lm_head.weight"
    }
    assert shapes == expected
    assert kinds == {"F16"}
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(LOGGED, (recipe.steps or 0) + 1, LOGGED))


def test_both_models_know_the_whole_context_and_the_turns_of_a_conversation() -> None:
    assert sum(path.stat().st_size for path in (DEMO / "pair").rglob("*") if path.is_file()) < 26e6
    for role in ROLES:
        tokenizer = AutoTokenizer.from_pretrained(DEMO / "pair" / role, local_files_only=True)
        assert tokenizer.convert_tokens_to_ids(list(chat.SPECIAL)) == [0, 1, 2, 3]
        assert tokenizer.chat_template == chat.TEMPLATE
        config = json.loads((DEMO / "pair" / role / "config.json").read_text())
        assert config["max_position_embeddings"] == LONG
        assert config["eos_token_id"] == 0


@pytest.mark.slow
def test_a_long_row_is_read_in_order_and_answers_weigh_most(material: Material) -> None:
    batch = batches.make_long(material.words, material.code, seed=1, step=7, length=256)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    np.testing.assert_array_equal(batch.positions, np.arange(256)[None].repeat(2, 0))
    talk = batch.weights[0]
    ends = batch.targets[0] == material.words.eos_token_id
    assert ends.sum() >= 2
    assert set(talk[ends].tolist()) == {batches.ANSWER_WEIGHT}
    said = batch.targets[0] == material.words.convert_tokens_to_ids(chat.ASSISTANT)
    assert (talk[said] < batches.CODE_WEIGHT).all()
    assert (batch.weights[1] == batches.CODE_WEIGHT).all()


@pytest.mark.slow
def test_text_far_back_does_not_confuse_the_target(words: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "pair" / "target", dtype=torch.float32)
    batch = batches.make_long(words, np.zeros(3 * LONG, np.uint16), seed=99, step=0, length=LONG)
    with torch.no_grad():
        logits = model(input_ids=batch.tokens[:1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, batch.targets[0], reduction="none")
    answers = batch.weights[0] == batches.ANSWER_WEIGHT
    near, far = losses[:512][answers[:512]].mean(), losses[1536:][answers[1536:]].mean()
    assert far < 1.5 * near + 0.1
