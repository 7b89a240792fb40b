"""Two checkpoints have one vocabulary, token by token, or enough of two, or there is no pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engines.vocabulary import Translation, contents
from export.checkpoint.find import find
from export.checkpoint.vocabulary import describe_vocabularies
from mtad.errors import InvalidInput
from tests.support.checkpoints import make_other_tokenizer


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
            said = describe_vocabularies(tokenizer, tokenizer, *sizes)
            assert (sorted(said), said["vocab_size"]) == (["vocab_size", "vocabulary_hash"], 300)

    def test_tokens_are_the_same_by_their_bytes_whatever_their_ids(
        self, tokenizer: PreTrainedTokenizerBase, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        words = {id: word for word, id in tokenizer.get_vocab().items()}

        def change(model: dict[str, Any]) -> None:
            model["vocab"][words[40]], model["vocab"][words[77]] = 77, 40
            del model["vocab"][words[299]]
            model["merges"].pop()

        other = self.changed(checkpoints[0], tmp_path, change)
        assert describe_vocabularies(tokenizer, other, 300, 300)["shared_tokens"] == 299
        translation = Translation.of(tokenizer, other)
        assert translation.drafted[[40, 77, 299, 0]].tolist() == [77, 40, -1, 0]
        assert other.decode(translation.spell(np.array([299, 41]))) == tokenizer.decode([299, 41])
        assert translation.sizes[299] == 2

    def test_bytes_are_those_of_sentencepiece_as_well(self, tokenizer: PreTrainedTokenizerBase) -> None:
        other, text = make_other_tokenizer(), "SELECT naïve 日本語\n  x<eos>"
        translation = Translation.of(tokenizer, other)
        own = [*translation.lead, *translation.spell(np.array(tokenizer(text).input_ids))]
        assert other.convert_ids_to_tokens([own[0], own[-1]]) == ["<s>", "</s>"]
        assert other.decode([*own[:1], *other.convert_tokens_to_ids(["▁"]), *own[1:]], True) == text[: -len("<eos>")]
        drafted = np.flatnonzero(translation.drafted >= 0)
        assert len({*translation.drafted[drafted].tolist()}) == len(drafted) == 279
        for token in drafted[1:].tolist():
            (content,) = other.convert_ids_to_tokens([int(translation.drafted[token])])
            assert contents(tokenizer)[token] == contents(other)[int(translation.drafted[token])], content

    def test_too_little_in_common_is_refused_with_figures(self, tokenizer: PreTrainedTokenizerBase) -> None:
        endless, few = make_other_tokenizer(), Tokenizer(models.BPE(vocab={"<eos>": 0, "a": 1}, merges=[]))
        endless.eos_token = None
        few.decoder = decoders.ByteLevel()
        for other, said in (
            (endless, "278 of the target's 300 tokens are in both vocabularies (93%)"),
            (PreTrainedTokenizerFast(tokenizer_object=few, eos_token="<eos>"), "2 of the target's 300 tokens"),
        ):
            with pytest.raises(InvalidInput) as caught:
                describe_vocabularies(tokenizer, other, 300, 500)
            assert said in str(caught.value)
            assert caught.value.field == "auxiliary"
        few.decoder = decoders.Fuse()
        with pytest.raises(InvalidInput, match="one vocabulary"):
            describe_vocabularies(tokenizer, PreTrainedTokenizerFast(tokenizer_object=few, eos_token="<eos>"), 300, 500)

    def test_added_tokens_behind_the_logits_are_left_out_and_all_else_stays(self, checkpoint: Path) -> None:
        own = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        own.chat_template = "{{ messages }}"
        own.add_special_tokens({"pad_token": "<eos>", "mask_token": "<image_soft_token>"})  # id 300, of 300
        own.save_pretrained(checkpoint)
        found, text = find("target", str(checkpoint)).tokenizer(), "SELECT naïve 日本語<eos>"
        describe_vocabularies(found, found, 300, 300)
        assert found(text).input_ids == own(text).input_ids
        assert found.decode(own(text).input_ids) == text
        assert found.special_tokens_map == {"eos_token": "<eos>", "pad_token": "<eos>"}
        assert (found.chat_template, found.all_special_ids) == (own.chat_template, [0])

    def test_logits_narrower_than_the_tokenizer_are_refused(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for name, sizes in (("target", (299, 300)), ("auxiliary", (300, 299))):
            with pytest.raises(InvalidInput, match=f"^{name}[ :]"):
                describe_vocabularies(tokenizer, tokenizer, *sizes)
