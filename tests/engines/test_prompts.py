"""Files of prompts are read as JSON lines are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engines.prompts import Example, read_prompts
from export.quantization.report import read_calibration
from mtad.errors import InvalidInput


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path: Path) -> None:
    """JSON leaves these separators as they are, and web pages have them in texts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}\n', encoding="utf-8", newline="")
    assert read_prompts(path) == [Example("a\u2028b\x85c"), Example("d")]


@pytest.mark.parametrize("line", ["[", "[" * 100_000, "1", "{}"])
def test_a_line_without_a_prompt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(InvalidInput, match=r"^prompts line 2"):
        read_prompts(path)


def test_a_text_that_a_tokenizer_cannot_read_is_refused(tmp_path: Path, checkpoints: tuple[Path, Path]) -> None:
    path = tmp_path / "calibration.jsonl"
    path.write_text('{"prompt": "SELECT \\ud83d"}\n')
    with pytest.raises(InvalidInput, match="half of a surrogate pair"):
        read_calibration(path, {"target": AutoTokenizer.from_pretrained(checkpoints[0])})
