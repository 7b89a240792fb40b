"""Two checkpoints have one vocabulary, token by token, or there is no pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from export.checkpoint.vocabulary import common_vocabulary
from mtad.errors import InvalidInput


class TestVocabulary:
    @pytest.fixture(scope="class")
    def tokenizer(self, checkpoints: tuple[Path, Path]) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(checkpoints[0], local_files_only=True)

    @staticmethod
    def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> PreTrainedTokenizerBase:
        values = json.loads((source / "tokenizer.json").read_text())
        change(values["model"])
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(values))
        return PreTrainedTokenizerFast(tokenizer_file=str(path))

    def test_one_vocabulary_passes_however_much_the_embeddings_are_padded(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        for sizes in ((300, 300), (320, 300), (300, 512)):
            assert common_vocabulary(tokenizer, tokenizer, *sizes) == 300

    def test_two_swapped_tokens_are_refused_by_name_and_ids(
        self, tokenizer: PreTrainedTokenizerBase, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        words = {id: word for word, id in tokenizer.get_vocab().items()}

        def swap(model: dict[str, Any]) -> None:
            model["vocab"][words[40]], model["vocab"][words[77]] = 77, 40

        other = self.changed(checkpoints[0], tmp_path, swap)
        with pytest.raises(InvalidInput) as caught:
            common_vocabulary(tokenizer, other, 300, 300)
        assert f"{words[40]!r}: id 40 in the target, 77 in the auxiliary" in str(caught.value)

    def test_a_token_that_one_model_lacks_is_refused_by_name(
        self, tokenizer: PreTrainedTokenizerBase, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        last = max(tokenizer.get_vocab(), key=lambda word: int(tokenizer.get_vocab()[word]))

        def drop(model: dict[str, Any]) -> None:
            del model["vocab"][last]
            model["merges"].pop()

        other = self.changed(checkpoints[0], tmp_path, drop)
        with pytest.raises(InvalidInput) as caught:
            common_vocabulary(tokenizer, other, 300, 300)
        assert "299 of the target's 300 tokens are in both" in str(caught.value)
        assert f"{last!r}: id 299 in the target, none in the auxiliary" in str(caught.value)

    def test_logits_narrower_than_the_tokenizer_are_refused(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for name, sizes in (("target", (299, 300)), ("auxiliary", (300, 299))):
            with pytest.raises(InvalidInput) as caught:
                common_vocabulary(tokenizer, tokenizer, *sizes)
            assert caught.value.field == name
