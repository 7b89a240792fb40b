"""What each request asks of both models' logits, kept up with its text.

A `Constrainer` serves a pair, a `Constraint` one request that asks for something; `constrained` puts those of a block
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from mtad.constrain import Floats, Ints, Terms, constrain
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.bad_words import BadWords
from runtime.constraints.follower import Bits, Follower, Grammar, contains
from runtime.constraints.grammar import Grammars

KEPT_WORDS = 256
"""Sets of bad words that are kept, from a request until it runs: more than usually wait, of 300 kB at most."""


class Constrainer:
    """Makes the constraints of one pair's requests. Safe to share between threads.

    Args:
        tokenizer: the pair's; read when the first request with a grammar comes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        known = [token for token in eos if token < vocab_size]
        self.vocab_size, self.eos = vocab_size, np.array(known, np.int64)
        self.grammars = Grammars(tokenizer, vocab_size, known)
        self.words = lru_cache(KEPT_WORDS)(lambda words: BadWords(words, tokenizer, vocab_size))

    def check(self, params: DecodingParams, grammar: Grammar | None = None) -> Grammar | None:
        """Refuse constraints that cannot be kept; to be called before a request is queued.

        Args:
            grammar: what `Grammars.compile_soon` returned; by default, this thread waits for a compilation.

        Returns:
            the compiled language of a constrained request.

        Raises:
            InvalidInput: a biased token does not exist; a bad word has no tokens; or as in
                `Grammars.compile`.
        """
        for token in params.logit_bias:
            if token >= self.vocab_size:
                problem = f"token ids are integers from 0 to {self.vocab_size - 1}; leave it out"
                raise InvalidInput("logit_bias", token, problem)
        if params.bad_words:
            self.words(params.bad_words)
        return (grammar or self.grammars.compile(params)) if params.constrained else None

    def constraint(self, params: DecodingParams, prompt: Sequence[int], grammar: Grammar | None) -> Constraint | None:
        """The constraint of a request that starts to run; None if it asks for nothing.

        Args:
            grammar: what `check` returned; None asks it again.
        """
        asks = params.constrained or params.logit_bias or params.min_tokens or params.bad_words or _penalises(params)
        return Constraint(params, prompt, grammar, self) if asks else None


class Constraint:
    """What one running request asks of its logits; advanced as its tokens are committed.

    Attributes:
        words: the request's bad words, which a follower sees to where a grammar holds; None without.
        tail: the text's last tokens, as many as matter for those.
        thinking: whether the text is inside a thought, where a grammar does not hold.
    """

    def __init__(
        self, params: DecodingParams, prompt: Sequence[int], grammar: Grammar | None, maker: Constrainer
    ) -> None:
        self.params, self._ends = params, maker.eos
        self.words = maker.words(params.bad_words) if params.bad_words else None
        self._follower: Follower | None = None
        self.thinking = False
        if params.constrained:
            grammar = grammar or maker.grammars.compile(params)
            self._follower = Follower(grammar, maker.vocab_size, maker.grammars.eos, params, self.words)
        self._tag: tuple[int, ...] = ()  # with which the text may begin; behind a part of it, what is left
        self.generated = 0
        self.tail: tuple[int, ...] = ()
        bias = params.logit_bias
        self._biased, self._bias = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._penalties = np.array(penalties, np.float32)
        self._seen = np.zeros(maker.vocab_size if _penalises(params) else 0, np.bool_)
        self._counts = np.zeros(len(self._seen), np.float32)
        if _penalises(params):
            self._seen[list(prompt)] = True

    @property
    def follower(self) -> Follower | None:
        """What follows the grammar, where it holds now."""
        return None if self.thinking else self._follower

    def begin(self, thinking: bool, tag: Sequence[int], may_open: bool) -> bool:
        """Before the text: whether its thoughts open once, since a grammar has no place for their tag.

        With `may_open`, and without bad words, the text may begin with the tag all the same: thoughts have no grammar.
        """
        self.thinking = thinking
        if self._follower is None or contains(self._follower.allowed(()), tag[0]):
            return False
        self._tag = tuple(tag) if may_open and not (thinking or self.words) else ()
        return True

    def advance(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: those of the block that the text keeps, an end-of-sequence token included.

        Raises:
            InvalidInput: the text came to a point where its own constraints allow no token, or take too long; which of
                them, and where. The request must be finished with this error; others are not affected.
        """
        self.generated += len(tokens)
        if self.words:
            self.tail = (*self.tail, *tokens)[-self.words.window :]
        if len(self._counts):
            np.add.at(self._counts, tokens, 1)
            self._seen[tokens] = True
        opens = bool(self._tag) and self._tag[: len(tokens)] == tuple(tokens)
        self._tag = self._tag[len(tokens) :] if opens else ()
        if self._follower is not None and (self.thinking or opens):
            self._follower.skip(len(tokens))
        elif self._follower is not None and (problem := self._follower.advance(tokens)):
            raise problem

    def adjust(self, logits: Floats, paths: Ints, lengths: Ints, terms: Terms) -> None:
        """Put a row's logits [S, V] under the constraint, in place; `terms` are its own."""
        allowed = np.empty((len(lengths), 0), np.uint8)
        texts = [tuple(path[:length]) for path, length in zip(paths.tolist(), lengths.tolist(), strict=True)]
        if self.follower:
            allowed = np.array([self._allowed(self.follower, text) for text in texts])
        elif self.words:
            allowed = np.array([self.words.allowed((*self.tail, *text)) for text in texts])
        constrain(logits, paths, lengths, terms, allowed)

    def _allowed(self, follower: Follower, path: tuple[int, ...]) -> Bits:
        """What the grammar allows, and the tag that opens a thought; behind a part of it, what is left of it alone."""
        if len(path) >= len(self._tag) or path != self._tag[: len(path)]:
            return follower.allowed(path)
        bits = np.zeros_like(follower.allowed(())) if path or follower.skipped else follower.allowed(()).copy()
        bits[self._tag[len(path)] // 8] |= 1 << self._tag[len(path)] % 8
        return bits

    @property
    def terms(self) -> Terms:
        """What it asks now. Where a grammar holds, its follower enforces `min_tokens` itself."""
        left = max(0, self.params.min_tokens - self.generated) if self.follower is None else 0
        present = np.flatnonzero(self._seen)
        return Terms(self._biased, self._bias, present, self._counts, self._penalties, self._ends, left)


Asks = list[tuple[int, Constraint, Terms]]
"""The rows of a block that ask for something, and what they ask until one of them advances."""


def asks_of(constraints: Sequence[Constraint | None]) -> Asks:
    """Of rows 0 .. R - 1."""
    return [(row, own, own.terms) for row, own in enumerate(constraints) if own is not None]


def constrained(logits: Floats, asks: Asks, paths: Ints, lengths: Ints) -> Floats:
    """Logits under each row's constraint, before the filter: float32 [R, S, V], new memory.

    A row's result does not depend, to the bit, on the other rows; rows without a constraint are unchanged.

    Args:
        logits: float32 [R, S, V], of either model, after S nodes.
        paths, lengths: int64 [R, S, D] and [R, S], the drafted tokens that lead to each node, see `constrain`.
    """
    out = logits.copy()
    for row, constraint, terms in asks:
        constraint.adjust(out[row], paths[row], lengths[row], terms)
    return out


def _penalises(params: DecodingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
