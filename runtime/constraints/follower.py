"""A compiled language, and how a request's text is kept to it along the paths of a token tree."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.cache.prefix import common_prefix
from mtad.errors import InvalidInput, first_line
from mtad.params import LANGUAGES, DecodingParams
from runtime.constraints.bad_words import BadWords

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = NDArray[np.uint8]
"""A set of tokens, one bit each, least significant first: uint8 [ceil(V / 8)]."""

MASK_SECONDS, MASK_CREDIT_SECONDS, LONGEST_CHARGED = 1e-3, 0.1, 0.02
"""Processor time that a request may take for each set of allowed tokens, on average, and beyond that, for a while:
else many sets at llguidance's limits would make the whole batch wait. A single set is charged 20 ms at most, since
Python may collect garbage meanwhile. Grammars of a few hundred rules take 0.02 to 0.3 ms, over 128,000 tokens."""
GROWTH, MAX_GROWTH = 500 * 2**20, 96 * 2**20
"""Bytes by which a lexer grows at most in a second of following it (160 to 430 MiB were seen), and altogether: 50,000
states (`trial_process.LIMITS`) of 2 kB."""


@dataclass(eq=False)
class Grammar:
    """A compiled language.

    Attributes:
        start: matcher at its start, shared: it may be copied, nothing else. Copies share its lexer, which grows.
        empty: whether the empty text is its only one.
        compiled: bytes of memory that compiling it took.
        followed: seconds of processor time that it has been followed for, by all requests.
        hit_limit: whether a request met a limit; it may be the shared lexer's, and others would meet it as well.
    """

    start: LLMatcher
    empty: bool = False
    compiled: int = 0
    followed: float = 0.0
    hit_limit: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of memory it takes at most."""
        return self.compiled + min(int(self.followed * GROWTH), MAX_GROWTH)


def contains(bits: Bits, token: int) -> bool:
    """Whether a token is in a set."""
    return bool(bits[token // 8] >> token % 8 & 1)


def language(params: DecodingParams) -> tuple[str, str]:
    """Field and text of a constrained request's language."""
    return next((name, text) for name in LANGUAGES if (text := getattr(params, name)) is not None)


class Follower:
    """A grammar followed along a request's text and, within a block, along the paths of its token tree.

    One matcher is moved from path to path. The tokens allowed after a path are computed once a block, whichever model
    asks for them.

    Where the grammar leaves no choice, the tokenizer's own encoding of what must follow is the only one allowed.
    End-of-sequence tokens are allowed where the grammar may end and the text has `min_tokens`. A *dead end* is a point
    where no token is allowed: the grammar ends before `min_tokens`, wants bytes that no token has, exceeds llguidance's
    limits, or wants what is a bad word. A draft may touch a dead end and lose nothing. There, end-of-sequence tokens
    alone are allowed; when one of them is committed, `advance` says what is wrong.

    A grammar that takes too long to follow (`MASK_SECONDS`) ends at once, in the middle of a block: from then on all is
    a dead end, and the next `advance` says so, whatever it is given. Time is the processor's, spent by this thread, so
    a busy machine ends nothing.

    Attributes:
        skipped: tokens of the text for which the grammar did not hold, which count for `min_tokens`.
    """

    def __init__(
        self, grammar: Grammar, vocab_size: int, eos: Sequence[int], params: DecodingParams, words: BadWords | None
    ) -> None:
        self._grammar, self._eos, self._params, self._words = grammar, frozenset(eos), params, words
        self._credit, self._over = MASK_CREDIT_SECONDS, ""  # why the text cannot be followed any further
        self._matcher = grammar.start.deep_copy()
        ends = np.zeros(vocab_size, dtype=np.bool_)
        ends[list(eos)] = True
        self._ends: Bits = np.packbits(ends, bitorder="little")
        self._everything: Bits = np.packbits(np.ones_like(ends), bitorder="little")
        self.skipped = 0
        self._text: list[int] = []
        self._lookahead: list[int] = []  # what the matcher has consumed beyond `_text`
        self._allowed: dict[tuple[int, ...], Bits] = {}
        self._failures: dict[tuple[int, ...], InvalidInput] = {}

    def allowed(self, path: tuple[int, ...]) -> Bits:
        """Tokens that may follow the text and then `path`, at least one; not to be written to.

        Everything after a path that no text can take, beyond its end or through a forbidden token: neither model's
        distribution there is ever used.
        """
        if path not in self._allowed:
            self._allowed[path] = self._compute(path)
        return self._allowed[path]

    def failure(self, path: tuple[int, ...]) -> InvalidInput | None:
        """Why the text cannot go on after `path`: it is a dead end; None where it can."""
        self.allowed(path)
        return self._failures.get(path)

    def advance(self, tokens: Sequence[int]) -> InvalidInput | None:
        """Append committed tokens to the text, as many of a block as it keeps; returns what is wrong with them.

        After anything but None the follower is not to be used any more.
        """
        body = tuple(itertools.takewhile(lambda token: token not in self._eos, tokens))
        with self._counted(0.0):
            reached, wrong = self._move_to(body), None
        if self._over:
            wrong = self._problem(self._over)
        elif not reached:
            self._grammar.hit_limit |= self._matcher.is_error()
            why = f" ({first_line(self._matcher.get_error())})" if self._matcher.is_error() else ""
            taken = self.skipped + len(self._text) + len(self._lookahead)
            wrong = self._problem(f"a token after the first {taken} is not allowed there{why}")
        elif len(body) < len(tokens):
            wrong = self.failure(body)
            if wrong is None and not contains(self.allowed(body), tokens[len(body)]):
                wrong = self._problem(f"the text may not end after {self.skipped + len(self._text) + len(body)} tokens")
        self._text += body
        self._lookahead = []
        self._allowed.clear()
        self._failures.clear()
        return wrong

    def skip(self, count: int) -> None:
        """Append tokens for which the grammar does not hold."""
        self.skipped += count
        self._allowed.clear()
        self._failures.clear()

    @contextlib.contextmanager
    def _counted(self, allowed: float) -> Iterator[None]:
        """Charge the seconds that the block takes, beyond those allowed, to the request's credit."""
        began = time.thread_time()
        yield
        seconds = time.thread_time() - began
        self._grammar.followed += seconds
        self._credit = min(self._credit + allowed - min(seconds, LONGEST_CHARGED), MASK_CREDIT_SECONDS)
        if self._credit < 0:
            self._over = f"it takes too long to follow, more than {MASK_SECONDS * 1000:g} ms per token"

    def _problem(self, problem: str) -> InvalidInput:
        field, text = language(self._params)
        return InvalidInput(field, text, problem)

    def _compute(self, path: tuple[int, ...]) -> Bits:
        if self._over:
            return self._ends
        if not self._eos.isdisjoint(path):
            return self._everything
        length, bits, problem = self.skipped + len(self._text) + len(path), self._everything, None
        with self._counted(MASK_SECONDS):
            reached = self._move_to(path)
            if reached:
                bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(bits)] & bits
            if self._matcher.is_error():
                why, self._grammar.hit_limit = first_line(self._matcher.get_error()), True
                problem = self._problem(f"no token can follow the first {length} ({why})")
                self._restart(why)
        if problem is None and reached:
            early = length < self._params.min_tokens
            ends, bits = bool((bits & self._ends).any()), bits & ~self._ends if early else bits
            possible = self._allows_some(bits)
            if possible and self._words:
                bits = bits & self._words.allowed((*self._text[-self._words.window :], *path))
                if not bits.any():
                    words = ", ".join(self._params.bad_words)
                    problem = InvalidInput("bad_words", words, f"no other token can follow the first {length}")
            elif not possible:
                problem = self._problem(f"no token can follow the first {length}")
                if early and ends:
                    most, (field, _) = self._params.min_tokens, language(self._params)
                    ending = f"the text can only end after {length} tokens, of its {field}; give at most so many"
                    problem = InvalidInput("min_tokens", most, ending)
        if problem is None:
            return bits
        self._failures[path] = problem
        return self._ends

    def _allows_some(self, bits: Bits) -> bool:
        """Whether some token can follow.

        Where a grammar leaves one text only, llguidance allows the first token of its encoding alone, even where the
        vocabulary cannot encode the text.
        """
        number = int.from_bytes(bits.tobytes(), "little")
        token = number.bit_length() - 1
        sure = number.bit_count() > 1 or token in self._eos
        return number > 0 and (sure or self._matcher.validate_tokens([token]) == 1)

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move the matcher behind `path`; False if it cannot go all the way."""
        same = common_prefix(self._lookahead, path)
        if same < len(self._lookahead):
            self._matcher.rollback(len(self._lookahead) - same)
            del self._lookahead[same:]
        taken = self._matcher.try_consume_tokens(list(path[same:])) if same < len(path) else 0
        self._lookahead += path[same : same + taken]
        return len(self._lookahead) == len(path)

    def _restart(self, why: str) -> None:
        """A matcher in error stays so, though only a draft led it there: bring a new one to the end of the text."""
        self._matcher, self._lookahead = self._grammar.start.deep_copy(), []
        if self._matcher.try_consume_tokens(self._text) < len(self._text):  # their lexer is full
            self._over = f"it cannot be followed any further ({why})"
