"""Tokens to text: characters are never split, a text ends where it should and nothing follows."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from mtad.params import DecodingParams
from runtime.output.detokenizer import Detokenizer
from runtime.scheduler.request import FinishReason, Request
from tests.support.checkpoints import byte_tokenizer, make_other_tokenizer

EOS = "<eos>"
MERGES = [("a", "Ã"), ("a", "b"), ("ab", "c"), ("ab", "Ã")]
"""Ã stands for byte 0xC3, which begins a character of two bytes; © for byte 0xA9, which ends é."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, and a few longer ones, two of which end inside a character."""
    return byte_tokenizer(merges=MERGES)


def pieces(tokenizer: Tokenizer, *words: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[word] for word in words]


def run(
    tokenizer: Tokenizer, tokens: list[int], eos: int | None = None, **values: object
) -> tuple[Request, list[str], FinishReason | None]:
    """The request after it was given `tokens` until it ended, the text to show after each, and why it ended."""
    request = Request(0, [1], DecodingParams.from_dict({"max_tokens": 100, **values}), seed=0)
    ends = frozenset(pieces(tokenizer, EOS) if eos is None else [eos])
    stream = Detokenizer(tokenizer, ends, request.params)
    texts = []
    for token in tokens:
        reason = stream.append(request, [token])
        texts.append(request.text[: request.stable])
        if reason:
            return request, texts, reason
    return request, texts, None


def test_a_character_that_spans_tokens_is_held_back_until_it_is_complete(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x日é.").ids
    assert len(tokens) == 1 + 3 + 2 + 1
    _, texts, _ = run(tokenizer, tokens)
    assert texts == ["x", "x", "x", "x日", "x日", "x日é", "x日é."]


def test_text_only_ever_grows_and_ends_as_the_whole_decoded(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    for _ in range(200):
        tokens = [chance.randrange(tokenizer.get_vocab_size() - 1) for _ in range(30)]
        request, texts, reason = run(tokenizer, tokens, max_tokens=30)
        assert reason == "length"
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert request.text == tokenizer.decode(tokens)


def test_a_broken_character_behind_a_whole_one_breaks_no_text() -> None:
    """With byte fallback all bytes in a row are decoded at once, and none is a character if one is not."""
    tokenizer = make_other_tokenizer().backend_tokenizer
    whole = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    word = max((one for one in tokenizer.get_vocab() if one.startswith("▁")), key=len)
    request, texts, _ = run(tokenizer, pieces(tokenizer, word, *whole, *whole[:2], word, word), eos=2)
    assert texts[4] == word[1:].replace("▁", " ") + "😀"
    assert request.text == texts[4] + 2 * "\ufffd" + 2 * word.replace("▁", " ")
    silent = pieces(tokenizer, word, *20 * ["</s>"], word)
    assert run(tokenizer, silent, eos=2, ignore_eos=True)[0].text == tokenizer.decode(silent), "with its space"


def test_tokens_that_never_become_a_character_are_shown_and_cost_what_others_do(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = list[int](), Detokenizer._decode

    def count(own: Detokenizer, tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode(own, tokens)

    monkeypatch.setattr(Detokenizer, "_decode", count)
    for run_of, kept in (("©", "\ufffd"), ("aÃ", "a\ufffd"), (EOS, "")):
        tokens = pieces(tokenizer, "x", *60 * [run_of], "Ã", "©", "z")
        request, texts, _ = run(tokenizer, tokens, ignore_eos=True)
        assert request.text == "x" + 60 * kept + "éz" == tokenizer.decode(tokens)
        assert texts[55].startswith("x" + 40 * kept), "what is broken is shown meanwhile"
        assert sum(decoded) < 60 * len(tokens), "each once more, and no more often the longer the text is"
        decoded.clear()


def test_an_incomplete_character_is_shown_when_the_text_ends(tokenizer: Tokenizer) -> None:
    tokens = pieces(tokenizer, "x", "aÃ")
    assert run(tokenizer, tokens)[0].text == "x"
    assert run(tokenizer, tokens, max_tokens=2)[0].text == "xa\ufffd"
    assert run(tokenizer, [*tokens, *pieces(tokenizer, EOS)])[0].text == "xa\ufffd"


@pytest.mark.parametrize("kind", ["special", "ordinary", "stop token"])
def test_the_token_that_ends_the_text_is_not_in_it(tokenizer: Tokenizer, kind: str) -> None:
    [end] = pieces(tokenizer, EOS if kind == "special" else "abc")
    tokens = [*pieces(tokenizer, "x", "y"), end, *pieces(tokenizer, "z")]
    given: dict[str, Any] = {"stop_token_ids": (end,)} if kind == "stop token" else {"eos": end}
    request, _, reason = run(tokenizer, tokens, **given)
    assert (request.text, request.tokens, reason) == ("xy", tokens[:3], "stop")


def test_nothing_that_a_request_asks_to_stop_at_counts_before_its_fewest_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x;y;z").ids
    both: list[dict[str, Any]] = [{"stop": ";"}, {"stop_token_ids": (tokens[1],)}]
    for asked in both:
        request, _, reason = run(tokenizer, tokens, min_tokens=3, **asked)
        assert (request.text, reason) == ("x;y", "stop")


@pytest.mark.parametrize(
    ("text", "stop", "left", "used"),
    [
        ("x;y", (";",), "x", 2),
        ("x--y", ("--",), "x", 3),  # across tokens
        ("xabcz", ("b",), "xa", 2),  # inside a token
        ("xabcz", ("xa",), "", 2),  # at the very beginning, and with more text behind it in the same token
        ("xabcz", ("c", "b"), "xa", 2),  # two in one token: the earlier one counts
        ("xyz", ("z", "yz", "xyz"), "", 3),  # that end together: the one that begins first counts
        ("x日é", ("日",), "x", 4),
        ("x-y-z", ("--",), "x-y-z", 5),  # never
        ("xyz", "y", "x", 2),  # one string is as good as a tuple
    ],
)
def test_a_stop_string_cuts_the_text_where_it_begins(
    tokenizer: Tokenizer, text: str, stop: str | tuple[str, ...], left: str, used: int
) -> None:
    tokens = tokenizer.encode(text).ids
    request, texts, reason = run(tokenizer, tokens, stop=stop)
    assert (request.text, request.tokens) == (left, tokens[:used])
    assert all(left.startswith(text) for text in texts), "no part of a stop string is ever shown"
    assert reason == (None if left == text else "stop")
    found = min((one for one in stop if text.startswith(one, len(left))), key=len, default="")
    assert run(tokenizer, tokens, stop=stop, include_stop_str_in_output=True)[0].text == left + found
    at_once, params = Request(0, [1], request.params, seed=0), request.params
    assert Detokenizer(tokenizer, frozenset(), params).append(at_once, tokens) == reason, "a block of all of them"
    assert (at_once.text, at_once.tokens) == (request.text, request.tokens)


def test_what_may_yet_become_a_stop_string_is_held_back_and_nothing_more(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)

    def word(longest: int) -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, longest)))

    for _ in range(300):
        text, stops = word(12), tuple(word(6) for _ in range(chance.randint(1, 4)))
        tokens = tokenizer.encode(text).ids
        request, texts, reason = run(tokenizer, tokens, stop=stops)
        ways = (tokenizer.decode(tokens[: count + 1]) for count in range(len(tokens)))
        said = next((way for way in ways if any(stop in way for stop in stops)), text)
        assert request.text == said[: min((at for stop in stops if (at := said.find(stop)) >= 0), default=len(said))]
        if reason is None:
            kept = (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops))
            assert texts[-1] == text[: next(kept, len(text))]


def test_what_ends_a_text_as_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    for tokens, stop in ((pieces(tokenizer, "x", EOS), ()), (tokenizer.encode("xy").ids, "y")):
        request, _, reason = run(tokenizer, tokens, max_tokens=2, stop=stop)
        assert (request.text, reason) == ("x", "stop")


def test_a_stop_string_in_text_that_was_held_back_to_the_end_still_cuts(tokenizer: Tokenizer) -> None:
    request, _, reason = run(tokenizer, pieces(tokenizer, "x", "abÃ"), max_tokens=2, stop="b")
    assert (request.text, reason) == ("xa", "stop")
    request, _, reason = run(tokenizer, pieces(tokenizer, "x", "abÃ", EOS), stop="b")
    assert (request.text, reason) == ("xa", "stop")
