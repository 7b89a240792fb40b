"""Texts under constraints against the enumeration of the constrained target."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer
from tests.mtad.test_constrain import Row, by_definition
from tests.support.chi_square import p_value
from tests.support.constrained import FREE, Asked, letters
from tests.support.mock_models import Model, Running, Tokens, finish, mock_pair

LETTERS, END, LENGTH = "abc", 0, 4
WORDS = re.compile(r"(a|bc?)?(c|a){0,3}b?")
LANGUAGE = {word for n in range(7) for word in itertools.product(LETTERS, repeat=n) if WORDS.fullmatch("".join(word))}
PREFIXES = {word[:n] for word in LANGUAGE for n in range(len(word) + 1)}
ASKED: dict[str, Asked] = {
    "penalties": {"repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": -0.7, "min_tokens": 1},
    "bias and earliest end": {"logit_bias": {2: 1.5, 0: 2.0}, "min_tokens": 2},
    "grammar": {"regex": WORDS.pattern},
    "bad words": {"bad_words": ("bc", "c", "aba"), "logit_bias": {0: -1.0}},
    "bad words of a grammar": {"bad_words": ("bc", "aca"), "regex": WORDS.pattern},
    "all": {"regex": WORDS.pattern, "frequency_penalty": 0.9, "logit_bias": {1: -1.0}, "min_tokens": 2},
}


def constrained(model: Model, params: DecodingParams) -> Model:
    """The model under what `params` ask, by enumeration of the language; the context is the text."""

    def logits(text: Tokens) -> np.ndarray:
        found = []
        for token, value in enumerate(by_definition(Row((), text, params), model(text).tolist(), ())):
            letters = tuple(LETTERS[t - 1] for t in text if t != END)
            if token == END:
                possible = params.regex is None or letters in LANGUAGE
            else:
                possible = params.regex is None or (*letters, LETTERS[token - 1]) in PREFIXES
                possible &= not "".join((*letters, LETTERS[token - 1])).endswith(params.bad_words)
            found.append(value if possible else -math.inf)
        return np.array(found)

    return logits


def likely(logits: np.ndarray, top_k: int) -> np.ndarray:
    """The probabilities of the `top_k` most likely tokens; all 0 where none is possible."""
    weights = np.where(logits < np.sort(logits)[-top_k], 0.0, np.exp(logits.astype(np.float64)))
    return weights / (weights.sum() or 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_texts_are_distributed_as_the_constrained_targets(asked: str) -> None:
    params = replace(FREE, method="speculative", top_k=3, max_tokens=LENGTH, **ASKED[asked])
    pair = mock_pair(5, 1 + len(LETTERS), peak=1.0, noise=0.8)
    maker = Constrainer(letters(LETTERS), 1 + len(LETTERS), [END])
    running = [Running(pair, params, seed, maker.constraint(params, (), None)) for seed in range(4000)]
    finish(running, 1 + len(LETTERS), [END])
    assert not any(r.failed for r in running)
    target, law = constrained(pair.target, params), dict[Tokens, float]()
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(1 + len(LETTERS)), repeat=length):
            if END not in text[:-1] and (text[-1] == END or length == LENGTH):
                law[text] = math.prod(likely(target(text[:at]), params.top_k)[token] for at, token in enumerate(text))
    assert sum(law.values()) == pytest.approx(1)
    # of 30,000 texts, p was 0.2 to 0.8; these notice a chi-square distance of 0.014 (of 40 texts) with a power of 0.9
    assert p_value((tuple(one.text) for one in running), law) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_forbidden_token_is_never_emitted(method: str) -> None:
    vocab = 1 + len(LETTERS)
    maker = Constrainer(letters(LETTERS), vocab, [END])
    running: list[Running] = []
    for threshold, asked, temperature in itertools.product((0.0, 0.5), ASKED.values(), (0.0, 1.0)):
        params = replace(
            FREE, method=method, temperature=temperature, accept_threshold=threshold, max_tokens=9, **asked
        )
        for seed in range(10):
            pair, number = mock_pair(seed, vocab, peak=3.0, noise=1.0), len(running)
            running.append(Running(pair, params, number, maker.constraint(params, (), None)))
    finish(running, vocab, [END])
    for r in running:
        target = constrained(r.pair.target, r.params)
        assert all(math.isfinite(target(tuple(r.text[:at]))[token]) for at, token in enumerate(r.text))
