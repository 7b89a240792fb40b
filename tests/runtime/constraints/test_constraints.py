"""Constraints of requests, followed through drafts, scoring and commits; grammars of a real tokenizer."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer, asks_of, constrained
from tests.support.checkpoints import make_tokenizer
from tests.support.constrained import FREE, Asked, letters


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found: Tokenizer = make_tokenizer().backend_tokenizer
    return found


@pytest.fixture(scope="module")
def constrainer(tokenizer: Tokenizer) -> Constrainer:
    return Constrainer(tokenizer, tokenizer.get_vocab_size(), [0])


def test_every_end_of_sequence_token_is_allowed_where_the_grammar_may_end() -> None:
    maker = Constrainer(letters("abc"), 4, [0, 3])
    constraint = maker.constraint(replace(FREE, regex="ab?", frequency_penalty=0.5), (), None)
    assert constraint is not None
    paths, lengths = np.array([[[0, 0], [1, 0], [1, 2]]]), np.array([[0, 1, 2]])
    finite = np.isfinite(constrained(np.zeros((1, 3, 4), np.float32), asks_of([constraint]), paths, lengths))[0]
    assert finite.astype(int).tolist() == [[0, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 1]]
    constraint.advance([1, 3])
    assert constraint.terms.counts.tolist() == [0, 1, 0, 1]


def test_tokens_that_end_a_text_and_that_the_vocabulary_lacks_are_nobodys() -> None:
    maker = Constrainer(letters("abc"), 4, [0, 4])
    maker.check(replace(FREE, regex="ab?"))
    constraint = maker.constraint(replace(FREE, min_tokens=2), (), None)
    logits, paths, lengths = np.ones((1, 2, 4), np.float32), np.array([[[0], [1]]]), np.array([[0, 1]])
    found = constrained(logits, asks_of([constraint]), paths, lengths)
    assert found.tolist() == [[[-np.inf, 1, 1, 1]] * 2]


def test_a_point_whose_bytes_no_token_has_fails_if_taken_and_is_harmless_in_a_draft() -> None:
    maker = Constrainer(letters("ab"), 3, [0])
    params = replace(FREE, regex="a(bz|ab)")
    constraint = maker.constraint(params, (), None)
    assert constraint is not None
    assert constraint.follower is not None
    allowed = constraint.follower.allowed
    assert [np.unpackbits(allowed(path), bitorder="little")[:3].tolist() for path in ((), (1,), (1, 2), (1, 1))] == [
        [0, 1, 0],
        [0, 1, 1],
        [1, 0, 0],  # the dead end
        [0, 0, 1],
    ]
    constraint.advance([1])
    assert allowed((2,))[0] == 1
    constraint.advance([1, 2, 0])
    other = maker.constraint(params, (), None)
    assert other is not None
    with pytest.raises(InvalidInput, match=r"^regex .*no token can follow the first 2"):
        other.advance([1, 2, 0])


def test_time_to_follow_a_grammar_runs_out_in_the_middle_of_a_block(
    constrainer: Constrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.constraints.follower.MASK_SECONDS", 0.0)
    monkeypatch.setattr("runtime.constraints.follower.MASK_CREDIT_SECONDS", 1e-9)
    constraint = constrainer.constraint(replace(FREE, regex="[a-c]{9}"), (), None)
    assert constraint is not None
    assert constraint.follower is not None
    free = constraint.follower.allowed(())
    ends = constraint.follower.allowed((97,))
    assert (np.unpackbits(free).sum(), np.unpackbits(ends).sum(), ends[0]) == (3, 1, 1)
    with pytest.raises(InvalidInput, match="takes too long to follow"):
        constraint.advance([97])


def test_garbage_that_is_collected_meanwhile_ends_no_request(
    constrainer: Constrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = constrainer.constraint(replace(FREE, regex="[a-c]{9}"), (), None)
    assert constraint is not None
    clock = iter((0.0, 0.3))  # seconds, as a collection of 300,000 objects takes
    with monkeypatch.context() as patched:
        patched.setattr("runtime.constraints.follower.time.thread_time", lambda: next(clock))
        constraint.advance([65])
    constraint.advance([65])


def test_a_prompt_alone_may_come_with_a_grammar_that_is_not_known_yet(constrainer: Constrainer) -> None:
    assert constrainer.check(DecodingParams(prompt_logprobs=0, max_tokens=0, regex="[a-f]{3}x")) is not None


def test_a_token_the_grammar_forbids_cannot_be_committed(constrainer: Constrainer) -> None:
    constraint = constrainer.constraint(replace(FREE, regex="abc"), (), None)
    assert constraint is not None
    with pytest.raises(InvalidInput, match="a token after the first 2 is not allowed"):
        constraint.advance([65, 66, 66])


def test_a_request_without_constraints_costs_nothing(constrainer: Constrainer) -> None:
    assert constrainer.constraint(DecodingParams(stop=";", ignore_eos=True), (1, 2), None) is None
    assert asks_of([None, None]) == []


@pytest.mark.parametrize(
    ("asked", "name", "words"),
    [
        ({"json_schema": '{"type": "object",}'}, "json_schema", "line 1 column 19"),
        ({"json_schema": "[1]"}, "json_schema", "object or boolean"),
        ({"json_schema": '{"type": "string", "not": {}}'}, "json_schema", 'Unimplemented keys: ["not"]'),
        ({"json_schema": '{"not": {}, "x-guidance": {"lenient": true}}'}, "json_schema", "Unimplemented keys"),
        ({"json_schema": "false"}, "json_schema", "Unsatisfiable"),
        ({"json_schema": "[" * 100_000}, "json_schema", "recursion"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "without look-around"),
        ({"grammar": 'root: "a"'}, "grammar", "no start rule"),
        ({"grammar": 'start: "a" other'}, "grammar", 'unknown name: "other"'),
        ({"grammar": "start: " + "(" * 9999}, "grammar", "nested"),
        ({"regex": "", "min_tokens": 1}, "min_tokens", "only the empty text"),
        ({"logit_bias": {300: 1.0}}, "logit_bias", "from 0 to 299"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(asked: Asked, name: str, words: str, constrainer: Constrainer) -> None:
    with pytest.raises(InvalidInput) as caught:
        constrainer.check(replace(FREE, **asked))
    assert caught.value.field == name
    assert words in caught.value.problem
    assert len(str(caught.value)) < 1500


def test_a_language_without_a_text_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no text satisfies it: no token can follow the first 0"):
        Constrainer(letters("ab"), 3, [0]).check(replace(FREE, regex="za?"))


def test_a_tokenizer_that_cannot_be_used_is_named() -> None:
    plain = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    Constrainer(plain, 2, [0]).check(replace(FREE, logit_bias={1: 1.0}, min_tokens=3))
    with pytest.raises(InvalidInput, match=r"tokenizer = 'WordLevel': llguidance cannot use it"):
        Constrainer(plain, 2, [0]).check(replace(FREE, regex="a"))
    with pytest.raises(InvalidInput, match="no end-of-sequence token"):
        Constrainer(letters("ab"), 3, []).check(replace(FREE, regex="a"))


def test_an_llguidance_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenizer(text: str, n_vocab: int, eos_token: int) -> None:
        """That of 0.7.29, which TensorRT-LLM 1.2 pins, is given one token."""
        operator.index(eos_token)

    monkeypatch.setattr("llguidance.LLTokenizer", tokenizer)
    with pytest.raises(InvalidInput, match=r"llguidance = '[\d.]+': older than 1\.9"):
        Constrainer(letters("ab"), 3, [0]).check(replace(FREE, regex="a"))
