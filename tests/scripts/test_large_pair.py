"""The larger pair on a CPU at its smallest: what is held out, when training ends and goes on, and what is reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.folder import read_spec
from mtad.errors import InvalidInput
from scripts.demo import batches, packages, tokenizer
from scripts.demo.recipes import RECIPES, SIZES, Recipe
from scripts.demo.schedule import Limit, rate_scale
from scripts.demo.train import Material, Trainer, publish
from scripts.gpu import large_pair
from scripts.gpu.report import Report

LIBRARY = Path(json.__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few packages; `json` is among the held out by its name, and so is its vendored copy."""
    root = tmp_path_factory.mktemp("sources")
    for package in ("asyncio", "email", "multiprocessing", "unittest", "http", "urllib", "json"):
        (root / package).mkdir()
        for file in (LIBRARY / package).glob("*.py"):
            (root / package / file.name).write_text(file.read_text())
    decoder, vendored = (LIBRARY / "json" / "decoder.py").read_text(), root / "email" / "_vendor" / "json"
    vendored.mkdir(parents=True)
    (vendored / "decoder.py").write_text(decoder + "# of an older version\n")
    (root / "unittest" / "copied.py").write_text(decoder)
    return root


@pytest.fixture(scope="module")
def material(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Material:
    texts = packages.read([sources]).train[:20]
    words = tokenizer.train(texts, 300)
    code = batches.code_tokens(words, tmp_path_factory.mktemp("code"), texts)
    return Material(words, code, {"code": [(texts[0][:60], texts[0][60:120])]})


@pytest.fixture
def recipe(material: Material) -> Recipe:
    return replace(SIZES["tiny"].recipe("target", len(material.words)), warmup=3)


@pytest.fixture
def trainer(material: Material, recipe: Recipe, tmp_path: Path) -> Callable[..., Trainer]:
    """Opens a trainer in a folder of a name, where it may go on."""

    def opened(name: str, **changes: object) -> Trainer:
        return Trainer(replace(recipe, **changes), material, tmp_path / name, tmp_path, compiled=False)  # type: ignore[arg-type]

    return opened


def ticking(**limit: float) -> Limit:
    """A limit on a clock that goes on by a second at every look at it."""
    return Limit(**limit, clock=map(float, count()).__next__)  # type: ignore[arg-type]


def test_no_held_out_text_is_trained_on(sources: Path) -> None:
    found = packages.read([sources])
    assert found.packages == ["json"]
    assert not set(found.train) & set(found.held_out)
    assert sum("class JSONDecoder" in text for text in found.train) == 0, "copies belong to the package they are of"
    assert sum("class JSONDecoder" in text for text in found.held_out) == 2


def test_a_package_is_named_behind_the_last_folder_of_packages() -> None:
    names = {
        "json/decoder.py": "json",
        "abc.py": "abc",
        "site-packages/pip/_vendor/requests/api.py": "requests",
        "setuptools/_vendor/typing_extensions.py": "typing_extensions",
    }
    assert {path: packages.package_of(Path(path)) for path in names} == names


def test_a_window_whose_lines_were_trained_on_is_left_out(sources: Path) -> None:
    found = packages.read([sources])
    assert len(packages.windows(found, 20, seed=1)) == 20
    known = replace(found, train=[*found.train, *("    " + text.replace("\n", "\n    ") for text in found.held_out)])
    assert not packages.windows(known, 20, seed=1), "indented, they are other files of the same lines"


def test_sources_without_two_sides_are_refused(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("x = 1\n" * 99)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidInput, match="sources"):
            packages.read([folder])


def test_a_folder_belongs_to_its_sources_once_there_is_text(tmp_path: Path) -> None:
    def opened(sources: str) -> Report:
        asked = ["--device", "cpu", "--folder", str(tmp_path / "pair"), "--sources", sources]
        return large_pair.open_report(large_pair.parser().parse_args(asked))

    opened("misspelt").stage("corpus", state="running")
    opened("first").stage("corpus", state="done")
    opened("first")
    with pytest.raises(InvalidInput, match="another size or sources"):
        opened("second")


def test_rates_rise_and_fall_to_nothing_by_time_as_by_steps(recipe: Recipe) -> None:
    by_time = [rate_scale(n, n / 100, recipe, None) for n in range(101)]
    assert by_time[0] == pytest.approx(1 / 3)
    assert by_time[3:] == sorted(by_time[3:], reverse=True)
    assert by_time[50] == pytest.approx(0.5)
    assert by_time[100] == pytest.approx(0, abs=1e-12)
    demo = RECIPES["target"]
    assert [rate_scale(n, 0.0, demo, 1500) for n in (29, 59, 700, 1125)] == [0.5, 1.0, 1.0, 0.5]


def test_steps_that_were_cut_off_go_on_to_the_same_weights(trainer: Callable[..., Trainer]) -> None:
    assert not trainer("cut").train(ticking(steps=7, until=10), "test")
    cut, whole = trainer("cut"), trainer("whole")
    assert 0 < cut.step < 7
    assert cut.train(ticking(steps=7), "test")
    assert whole.train(ticking(steps=7), "test")
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_time_is_of_all_calls_together(trainer: Callable[..., Trainer]) -> None:
    assert not trainer("cut").train(ticking(seconds=60, until=30), "test")
    cut = trainer("cut")
    assert 20 < cut.seconds < 40
    assert cut.train(ticking(seconds=60), "test")
    lines = [json.loads(line) for line in cut.log.read_text().splitlines()]
    assert 60 <= lines[-1]["seconds"] < 65
    assert lines[-1]["rate"] < 0.05, "it has fallen by the end of all calls, not of one"
    assert lines[-1]["development_code"] > 0
    again = trainer("cut")
    assert (again.step, again.seconds) == (cut.step, cut.seconds)
    assert again.train(ticking(seconds=60), "test"), "nothing is left to do"
    assert again.step == cut.step


def test_gradients_of_several_passes_are_those_of_one(trainer: Callable[..., Trainer]) -> None:
    (loss, whole), *others = (gradient(trainer(str(at_once), at_once=at_once)) for at_once in (None, 1, 3))
    for own, parts in others:
        assert own == pytest.approx(loss, rel=1e-4)
        assert torch.cosine_similarity(parts, whole, dim=0) > 0.9999, "rounding of bfloat16 aside"
        assert parts.norm() / whole.norm() == pytest.approx(1, abs=0.01)


def gradient(trainer: Trainer, guided: bool = False) -> tuple[float, torch.Tensor]:
    loss = trainer.backward(trainer.batch(), guided)["code"]
    return loss, torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_from_a_target_that_is_the_same_there_is_nothing_to_learn(
    trainer: Callable[..., Trainer], material: Material, tmp_path: Path
) -> None:
    target = trainer("target", dtype="float32")
    target.save(0.0)
    publish(target.recipe, material.words, target.work, tmp_path)
    _, alone = gradient(trainer("alone"))
    _, guided = gradient(trainer("guided"), guided=True)
    assert guided.norm() < 0.02 * alone.norm()


def test_rows_of_code_alone_run_through_the_causal_kernel_and_see_what_masked_rows_see(
    material: Material, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Trainer(recipe, material, tmp_path, tmp_path, compiled=False).model
    plain = batches.make(material.words, material.code, 2, 0, seed=1, step=0, length=64)
    causal = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 1, 64, 64)
    masks, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*args: torch.Tensor, **options: object) -> torch.Tensor:
        masks.append(options["attn_mask"])
        return kernel(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    with torch.inference_mode():
        ours, theirs = (model(**batch.inputs, use_cache=False).logits for batch in (plain, replace(plain, mask=causal)))
    assert [mask is None for mask in masks] == [True, True, False, False]
    torch.testing.assert_close(ours, theirs)
    np.testing.assert_array_equal(plain.tokens[:, 1:], plain.targets[:, :-1])


def call(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["large_pair", "--device", "cpu", "--size", "tiny", *options])
    try:
        large_pair.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
def test_calls_go_on_until_methods_are_compared_on_held_out_text(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--folder", str(tmp_path), "--sources", str(sources), "--minutes", "0.02", "--prompts", "2"]
    common += ["--methods", "sample,speculative,mtad,mmtad", "--max-tokens", "6"]
    assert call(monkeypatch, *common, "--call-minutes", "0.0001") == large_pair.MORE
    assert "left: target, auxiliary, export, evaluation" in capsys.readouterr().err
    assert call(monkeypatch, *common) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: stage["state"] for name, stage in report["stages"].items()} == dict.fromkeys(
        large_pair.STAGES, "done"
    )
    for role in large_pair.ROLES:
        assert read_spec(tmp_path / "pair" / role).precision == "bfloat16"
        facts = report["stages"][role]["facts"]
        assert facts["tokens_seen"] == 512 * facts["steps"] > 0
        assert 0 < facts["held_out_nll"] < 9
    rows = {row["setting"]: row for row in report["stages"]["evaluation"]["rows"]}
    assert list(rows) == ["sample", "speculative", "mtad", "mmtad"]
    assert rows["sample"]["block_efficiency"] == 1
    assert rows["mtad"]["tokens_per_second, ratio"] == pytest.approx(
        rows["mtad"]["tokens_per_second"] / rows["speculative"]["tokens_per_second"]
    )
    assert (rows["mtad"]["joules_per_token"] == "none") == report["stages"]["evaluation"]["facts"]["energy"].startswith(
        "none"
    )
    assert call(monkeypatch, *common[:2]) == 2, "a folder is of its own sources"
