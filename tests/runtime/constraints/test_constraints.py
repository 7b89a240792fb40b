"""Constraints of requests, followed through drafts, scoring and commits; grammars of a real tokenizer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.constraints.adjust import Constraints
from runtime.constraints.constraint import Constrainer, ConstraintFailed
from tests.support.checkpoints import make_tokenizer
from tests.support.constrained import FREE, Asked, Running, finish, letters
from tests.support.hostile import AMBIGUOUS
from tests.support.mock_models import mock_pair

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(SELECT|DELETE) [a-z]{1,5}( WHERE id = [0-9]{1,3})?;"
GRAMMAR = """
start: sum
sum: product ("+" product)?
product: "2" | "37" | "(" sum ")"
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found: Tokenizer = make_tokenizer().backend_tokenizer
    return found


@pytest.fixture(scope="module")
def constrainer(tokenizer: Tokenizer) -> Constrainer:
    return Constrainer(tokenizer, tokenizer.get_vocab_size(), [0])


def is_sum(text: str) -> bool:
    """Whether GRAMMAR describes the text."""
    while (shorter := re.sub(r"\((2|37)(\+(2|37))?\)", "2", text)) != text:
        text = shorter
    return re.fullmatch(r"(2|37)(\+(2|37))?", text) is not None


def is_record(text: str) -> bool:
    """Whether SCHEMA describes the text."""
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "tags"}
        and re.fullmatch("[a-z]{1,6}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
        and all(tag in ("x", "yy", 3, None) for tag in value["tags"])
    )


LANGUAGES: list[tuple[Asked, Callable[[str], bool]]] = [
    ({"json_schema": json.dumps(SCHEMA)}, is_record),
    ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    ({"grammar": GRAMMAR}, is_sum),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("language", range(3))
@pytest.mark.slow
def test_texts_satisfy_their_grammar(
    method: str, language: int, tokenizer: Tokenizer, constrainer: Constrainer
) -> None:
    asked, satisfies = LANGUAGES[language]
    vocab = constrainer.vocab_size
    running = []
    for seed in range(12):
        params = replace(FREE, method=method, accept_threshold=0.1 * (seed % 3), draft_len=1 + seed % 5, **asked)
        constrainer.check(params)
        pair = mock_pair(seed, vocab, peak=2.0, noise=0.3)
        running.append(Running(pair, params, seed, constrainer.constraint(seed, params, ())))
    finish(running, vocab, [0])
    assert [r.failed for r in running] == [None] * 12
    texts = [tokenizer.decode(r.text) for r in running if r.text[-1] == 0]
    assert len(texts) > 6
    assert [text for text in texts if not satisfies(text)] == []
    assert len(set(texts)) > 4


def mixed(constrainer: Constrainer) -> Iterator[Running]:
    """Requests of all methods that ask for all kinds of things, some for nothing."""
    asks: list[Asked] = [
        {},
        {"regex": r"([a-z]+ ){2,9}"},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
        {"json_schema": json.dumps(SCHEMA), "presence_penalty": 1.5, "logit_bias": {40: 3.0, 41: -2.0}},
        {"min_tokens": 9, "logit_bias": {0: 8.0}},
    ]
    for seed, (method, ask) in enumerate(itertools.product(METHODS, asks)):
        width = 1 + seed % 4
        params = replace(
            FREE, method=method, draft_len=1 + seed % 5, beam_width=width, top_k=20, max_tokens=30, accept_threshold=0.1
        )
        params = replace(params, **ask)
        pair = mock_pair(seed, constrainer.vocab_size, peak=2.0, noise=0.3)
        prompt = (seed, 7)
        yield Running(pair, params, seed, constrainer.constraint(seed, params, prompt), prompt)


@pytest.mark.slow
def test_a_request_is_the_same_alone_and_among_others(constrainer: Constrainer) -> None:
    together, alone = list(mixed(constrainer)), list(mixed(constrainer))
    finish(together, constrainer.vocab_size, [0])
    for request in alone:
        finish([request], constrainer.vocab_size, [0])
    assert [r.text for r in together] == [r.text for r in alone]
    assert len({tuple(r.text) for r in alone}) == len(alone)


def test_every_end_of_sequence_token_is_allowed_where_the_grammar_may_end() -> None:
    maker = Constrainer(letters("abc"), 4, [0, 3])
    constraint = maker.constraint("x", replace(FREE, regex="ab?"), ())
    assert constraint is not None
    batch = Constraints([constraint])
    tokens = torch.tensor([[[0, 0], [1, 0], [1, 2]]])
    valid = torch.tensor([[[False, False], [True, False], [True, True]]])
    finite = np.isfinite(batch.adjust(np.zeros((1, 3, 4), np.float32), tokens, valid))[0]
    assert finite.astype(int).tolist() == [[0, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 1]]
    constraint.advance([1, 3])


def test_after_a_cut_the_constraint_follows_what_was_kept(constrainer: Constrainer) -> None:
    params = replace(FREE, json_schema=json.dumps(SCHEMA), frequency_penalty=0.3)
    text = list(make_tokenizer().backend_tokenizer.encode('{"name":"ab","age":12,"tags":["x",3]}').ids)
    ahead, fresh = (constrainer.constraint(n, params, (5,)) for n in "ab")
    assert ahead is not None
    assert fresh is not None
    assert ahead.follower is not None
    assert fresh.follower is not None
    for cut in (0, 1, 4, 9):
        kept, text = text[:cut], text[cut:]
        for end in (len(text), 2, 5):  # the draft's paths go on beyond the cut, this way and that
            ahead.follower.allowed(tuple(text[:end]))
        ahead.advance(kept)
        for token in kept:
            fresh.advance([token])
        assert ahead.generated == fresh.generated
        assert (ahead.follower.allowed(()) == fresh.follower.allowed(())).all()
        for one, other in ((ahead.counts, fresh.counts), (ahead.seen, fresh.seen)):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_a_text_that_must_end_too_early_fails_alone_and_by_name() -> None:
    maker = Constrainer(letters("abc"), 4, [0])
    short, long = (replace(FREE, method="mmtad", regex=r, min_tokens=6, max_tokens=9) for r in ("[ab]{2,3}", "[ab]*"))
    pair = mock_pair(0, 4, peak=1.0, noise=0.5)
    running = [Running(pair, p, seed, maker.constraint(seed, p, ())) for seed, p in enumerate((short, long))]
    finish(running, 4, [0])
    assert running[0].failed is not None
    assert running[0].failed.name == 0
    assert (running[0].failed.field, running[0].failed.value) == ("min_tokens", 6)
    assert running[1].failed is None
    assert len(running[1].text) > 6


def test_a_point_whose_bytes_no_token_has_fails_if_taken_and_is_harmless_in_a_draft() -> None:
    maker = Constrainer(letters("ab"), 3, [0])
    params = replace(FREE, regex="a(bz|ab)")
    constraint = maker.constraint("req-7", params, ())
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
    other = maker.constraint("req-8", params, ())
    assert other is not None
    with pytest.raises(ConstraintFailed, match=r"no token can follow the first 2") as failed:
        other.advance([1, 2, 0])
    assert (failed.value.name, failed.value.field) == ("req-8", "regex")


def test_a_grammar_that_takes_long_to_follow_ends_its_request_and_no_other(constrainer: Constrainer) -> None:
    asks: list[Asked] = [{"grammar": AMBIGUOUS, "min_tokens": 190}, {"regex": "[a-c ]{60}"}]
    together, alone = (
        [
            Running(mock_pair(seed, 300, 2.0, 0.3), params, seed, constrainer.constraint(seed, params, ()))
            for seed, params in enumerate(replace(FREE, method="mmtad", **ask) for ask in asks)
        ]
        for _ in range(2)
    )
    finish(together, 300, [0])
    finish(alone[1:], 300, [0])
    ended = together[0].failed
    assert ended is not None
    assert ended.field == "grammar"
    assert "Too many items" in ended.problem or "too long to follow" in ended.problem
    assert together[1].failed is None
    assert together[1].text == alone[1].text


def test_time_to_follow_a_grammar_runs_out_in_the_middle_of_a_block(
    constrainer: Constrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.constraints.follower.MASK_SECONDS", 0.0)
    monkeypatch.setattr("runtime.constraints.follower.MASK_CREDIT_SECONDS", 1e-9)
    constraint = constrainer.constraint("x", replace(FREE, regex="[a-c]{9}"), ())
    assert constraint is not None
    assert constraint.follower is not None
    free = constraint.follower.allowed(())
    ends = constraint.follower.allowed((97,))
    assert (np.unpackbits(free).sum(), np.unpackbits(ends).sum(), ends[0]) == (3, 1, 1)
    with pytest.raises(ConstraintFailed, match="takes too long to follow"):
        constraint.advance([97])


def test_a_token_the_grammar_forbids_cannot_be_committed(constrainer: Constrainer) -> None:
    constraint = constrainer.constraint("x", replace(FREE, regex="abc"), ())
    assert constraint is not None
    with pytest.raises(ConstraintFailed, match="a token after the first 2 is not allowed"):
        constraint.advance([65, 66, 66])


def test_a_request_without_constraints_costs_nothing(constrainer: Constrainer) -> None:
    assert constrainer.constraint("x", DecodingParams(stop=";", ignore_eos=True), (1, 2)) is None
    assert Constraints.of([None, None]) is None


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
        ({"logit_bias": {3: -1e30}}, "logit_bias", "1e+09"),
        ({"repetition_penalty": 1e30}, "repetition_penalty", "1e+06"),
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
