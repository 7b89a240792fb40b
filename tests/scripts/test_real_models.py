"""The comparison on real checkpoints, with the demo pair in their place."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from export.options import ExportOptions
from mtad.errors import InvalidInput
from scripts.real_models import __main__ as real_models
from scripts.real_models import benchmarks, systems
from tests.support.paths import ROOT

HUMAN_EVAL = {
    "prompt": "from typing import List\n\n\ndef total(xs: List[float]) -> float:\n    '''The sum.'''\n",
    "entry_point": "total",
    "test": "import numpy as np\n\ndef check(candidate):\n    assert np.allclose(candidate([0.1, 0.2]), 0.3)\n",
}
PRELUDE = """import numpy as np

def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float): return True
    if isinstance(x, (list, tuple)): return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray): return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        CLOSE
    else:
        assert out == exp

"""
"""How EvalPlus's published tests begin."""
CLOSE = (
    "assert np.allclose(out, exp, rtol=1e-07, atol=atol)",
    "np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)",
)
GSM8K = {"question": "How many?", "answer": "2 and 3 are 5.\n#### 1,005"}


def write(folder: Path, name: str, *lines: object) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_quick_run_has_the_schema_and_names_every_method(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(folder: Path, asked: ExportOptions, **_: Any) -> None:
        assert (asked.rows, asked.format, asked.precision) == (4, "onnx", "float32")
        folder.parent.mkdir(parents=True)
        folder.symlink_to(demo_pair)

    monkeypatch.setattr("export.pair.export_pair", exported)
    monkeypatch.setattr(real_models, "ROOT", tmp_path)
    command = ["real_models", "--pairs", "demo", "--quick", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    real_models.main()
    found = json.loads((tmp_path / "real-models.json").read_text())
    jsonschema.validate(found, json.loads((ROOT / "docs" / "real-models.schema.json").read_text()))
    own = found["figures"]["pairs"]["demo"]["systems"]
    assert list(own) == ["sample", "block", "budget", "mtad"]
    for benchmark in own.values():
        assert set(benchmark) == {"demo"}
        assert {load: one["questions"] for load, one in benchmark["demo"].items()} == {"1": 4, "4": 4}
        assert all(one["tokens"] > 4 for one in benchmark["demo"].values())


def test_a_program_is_right_if_it_stands_its_tests(tmp_path: Path) -> None:
    write(tmp_path, "humaneval-plus", HUMAN_EVAL)
    try:
        (question,) = benchmarks.load("humaneval-plus", tmp_path)
    except InvalidInput as error:
        pytest.skip(str(error))
    assert question.right is not None
    body = "def total(xs):\n    return sum(xs)\n"
    assert question.right(f"Here it is:\n```python\n{body}```\nDone.")
    assert question.right(HUMAN_EVAL["prompt"] + "    return sum(xs)\n")
    assert not question.right(f"```python\n{body.replace('sum(xs)', '0.0')}```")
    assert not question.right("I cannot.")


@pytest.mark.parametrize(
    ("close", "given", "wanted", "right"),
    [
        (0, "'a'", "'a'", True),
        (0, "3", "4", False),
        (0, "0.1 + 0.2", "0.3", True),
        (1, "0.1 + 0.2", "0.3", True),
        (0, "[0.1 + 0.2, 1.0]", "[0.3, 1.0]", True),
        (1, "[0.1 + 0.2, 1.1]", "[0.3, 1.0]", False),
        (0, "[0.1 + 0.2]", "[0.3, 1.0]", False),
        (1, "[]", "[0.3, 1.0]", False),
    ],
)
def test_a_published_test_runs_without_numpy(close: int, given: str, wanted: str, right: bool) -> None:
    test = f"{PRELUDE.replace('CLOSE', CLOSE[close])}assertion(answer(), {wanted}, 0)\n"
    try:
        assert benchmarks.passes(f"def answer():\n    return {given}\n", test) == right
    except InvalidInput as error:
        pytest.skip(str(error))


def test_the_last_number_of_an_answer_counts(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", GSM8K)
    (question,) = benchmarks.load("gsm8k", tmp_path)
    assert question.right is not None
    assert question.right("First 7, so it is\n1005.00")
    assert not question.right("1005 or 7")
    assert not question.right("nothing")


@pytest.mark.parametrize(
    ("name", "words"), [("gsm8k", "no gsm8k.jsonl"), ("mmlu", "give some of"), ("mt-bench", "not the")]
)
def test_a_benchmark_that_cannot_be_read_is_refused_before_anything_is_measured(
    name: str, words: str, tmp_path: Path
) -> None:
    write(tmp_path, "mt-bench", {"question_id": 1})
    with pytest.raises(InvalidInput, match=words):
        benchmarks.load(name, tmp_path)


def test_every_system_of_a_pair_that_thinks_is_asked_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[dict[str, Any]]()

    @contextlib.contextmanager
    def started(*_: object, **__: object) -> Iterator[tuple[str, int]]:
        yield "", 0

    monkeypatch.setattr("export.pair.export_pair", lambda *_, **__: None)
    monkeypatch.setattr(real_models, "started", started)
    monkeypatch.setattr(real_models, "answered", lambda url, pair, questions, body, *_: asked.append(body))
    options = real_models.parser().parse_args(["--loads", "1"])
    real_models.measure("qwen3", systems.PAIRS["qwen3"], {"gsm8k": []}, options)
    assert len(asked) == 7
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in asked)


def test_peers_serve_the_same_target_and_draft_with_the_same_auxiliary() -> None:
    pair = systems.PAIRS["qwen3"]
    alone, auxiliary, eagle = systems.peers(pair)
    assert all(one.command[3:6] == ("vllm", "serve", pair.target) for one in (alone, auxiliary, eagle))
    assert "--speculative-config" not in alone.command
    assert pair.auxiliary in str(auxiliary.command)
    assert '"method": "eagle3"' in str(eagle.command)
    assert len(systems.peers(systems.PAIRS["coder"])) == 2, "without an EAGLE-3 head"
