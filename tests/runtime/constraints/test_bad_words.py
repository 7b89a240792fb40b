"""Bad words: which tokens would complete one; texts without them are `test_constrained_distribution`'s."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.bad_words import BadWords
from runtime.constraints.constraint import Constrainer
from tests.support.constrained import FREE, letters


def forbidden(words: BadWords, text: tuple[int, ...], vocab_size: int) -> list[int]:
    """The tokens that would complete a word behind a text."""
    bits = np.unpackbits(words.allowed(text), bitorder="little")[:vocab_size]
    return [int(token) for token in np.flatnonzero(bits == 0)]


def test_the_prompt_is_not_a_part_of_a_bad_word() -> None:
    maker = Constrainer(letters("abcd"), 5, [0])
    constraint = maker.constraint(replace(FREE, bad_words=("ab",)), (1,), None)
    assert constraint is not None
    assert constraint.words is not None
    assert forbidden(constraint.words, constraint.tail, 5) == []
    constraint.advance([1])
    assert forbidden(constraint.words, constraint.tail, 5) == [2]


def test_bad_words_of_a_request_with_a_grammar_hold_in_its_thoughts_too() -> None:
    maker = Constrainer(letters("abc"), 4, [0])
    constraint = maker.constraint(replace(FREE, regex="a+", bad_words=("b",)), (), None)
    assert constraint is not None
    constraint.thinking = True
    logits, root = np.zeros((1, 4), np.float32), (np.zeros((1, 0), np.int64), np.zeros(1, np.int64))
    constraint.adjust(logits, *root, constraint.terms)
    assert np.isneginf(logits[0]).tolist() == [False, False, True, False]


def test_a_word_is_forbidden_with_and_without_a_space_before_it_as_in_vllm() -> None:
    vocabulary = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "ab": 4, "▁ab": 5, "c": 6}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    words = BadWords(["a", " abc", "b"], tokenizer, 7)
    assert [forbidden(words, text, 7) for text in ((4,), (5,), (0, 4))] == [[1, 2, 3, 6]] * 3
    assert [forbidden(words, text, 7) for text in ((4, 2), ())] == [[1, 2, 3]] * 2


def test_white_space_may_be_a_bad_word() -> None:
    assert forbidden(BadWords(["\n"], letters("a\n"), 3), (), 3) == [letters("a\n").token_to_id("\n")]


def test_a_word_without_tokens_is_refused_by_name() -> None:
    maker = Constrainer(letters("ab"), 3, [0])
    with pytest.raises(InvalidInput, match=r"^bad_words = 'zz': .*no tokens"):
        maker.check(DecodingParams(bad_words=("a", "zz")))


def test_a_grammar_that_a_bad_word_leaves_no_token_fails_if_taken_and_is_harmless_in_a_draft() -> None:
    maker = Constrainer(letters("abc"), 4, [0])
    constraint = maker.constraint(replace(FREE, regex="a(bc|a)", bad_words=("bc",)), (), None)
    assert constraint is not None
    assert constraint.follower is not None
    allowed = constraint.follower.allowed
    masks = [np.unpackbits(allowed(path), bitorder="little")[:4].tolist() for path in ((), (1,), (1, 2), (1, 1))]
    assert masks == [[0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    with pytest.raises(InvalidInput, match=r"^bad_words .*no other token can follow the first 2"):
        constraint.advance([1, 2, 0])
