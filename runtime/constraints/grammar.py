"""JSON schemas, regular expressions and grammars: compiled by llguidance, followed along the paths of a token tree."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtad.errors import InvalidInput
from mtad.params import LANGUAGES, DecodingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = NDArray[np.uint8]
"""A set of tokens, one bit each, least significant first: uint8 [ceil(V / 8)]."""

_REMEDY = {
    "json_schema": "give a JSON schema, as JSON text, of keywords that llguidance supports",
    "regex": "give a regular expression in Rust's syntax, without look-around and back-references",
    "grammar": "give a grammar in llguidance's Lark syntax, with a rule `start`",
}


class Grammars:
    """Compiles the languages of one pair's requests. Safe to share between threads.

    The tokenizer is prepared for llguidance when the first constrained request comes; the grammars compiled last are
    kept.

    Args:
        tokenizer: the pair's.
        vocab_size: V.
        eos: tokens that end a text.
    """

    _KEPT = 64

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self.vocab_size, self.eos = vocab_size, tuple(eos)
        self._tokenizer = tokenizer
        self._prepared: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def check(self, params: DecodingParams) -> None:
        """Refuse a constrained request that cannot be kept to its language; to be called before it is queued.

        Raises:
            InvalidInput: schema, expression or grammar is malformed, has parts llguidance would ignore, allows no
                text, or only the empty text where `min_tokens` asks for more; llguidance cannot use the tokenizer.
        """
        field, text = _language(params)
        problem = self.follow(replace(params, min_tokens=0)).failure(())
        if problem is not None:
            raise InvalidInput(field, _short(text), f"no text satisfies it: {problem}; {_REMEDY[field]}")
        if self.follow(params).failure(()) is not None:
            problem = f"{field} allows only the empty text; give 0, or another {field}"
            raise InvalidInput("min_tokens", params.min_tokens, problem)

    def follow(self, params: DecodingParams) -> Follower:
        """A follower at the start of the language of `params`.

        Raises:
            InvalidInput: as in `check`.
        """
        return Follower(self._start(*_language(params)), self.vocab_size, self.eos, params.min_tokens)

    def _start(self, field: str, text: str) -> LLMatcher:
        """A matcher at the grammar's start, which is shared: it may be copied, nothing else."""
        with self._lock:
            known = self._compiled.get((field, text))
            if known is not None:
                self._compiled.move_to_end((field, text))
                return known
            if self._prepared is None:
                self._prepared = self._prepare()
        matcher = _compile(field, text, self._prepared)
        with self._lock:
            self._compiled[field, text] = matcher
            if len(self._compiled) > self._KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _prepare(self) -> LLTokenizer:
        kind = type(self._tokenizer.model).__name__
        if not self.eos:
            problem = f"it has no end-of-sequence token to end a constrained text; leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", kind, problem)
        library, plain = _llguidance(), copy.copy(self._tokenizer)
        plain.no_padding()
        plain.no_truncation()
        size = max(self.vocab_size, plain.get_vocab_size(with_added_tokens=True))
        try:
            made: LLTokenizer = library.LLTokenizer(plain.to_str(), n_vocab=size, eos_token=list(self.eos))
            return made
        except ValueError as error:
            problem = f"llguidance cannot use it ({error}); leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", kind, problem) from None


class Follower:
    """A grammar followed along a request's text and, within a block, along the paths of its token tree.

    One matcher is moved from path to path. The tokens allowed after a path are computed once a block, whichever model
    asks for them.

    Where the grammar leaves no choice, the tokenizer's own encoding of what must follow is the only one allowed.
    End-of-sequence tokens are allowed where the grammar may end and the text has `min_tokens`. A *dead end* is a point
    where no token is allowed: the grammar ends before `min_tokens`, wants bytes that no token has, or exceeds
    llguidance's limits. A draft may touch a dead end and lose nothing. There, end-of-sequence tokens alone are allowed;
    when one of them is committed, `advance` says what is wrong.

    Args:
        start: matcher at the grammar's start; it is copied.
        vocab_size: V.
        eos: tokens that end a text.
        min_tokens: of the text, before it may end.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, eos: Sequence[int], min_tokens: int) -> None:
        self._start, self._eos, self._min_tokens = start, frozenset(eos), min_tokens
        self._matcher = start.deep_copy()
        ends = np.zeros(vocab_size, dtype=np.bool_)
        ends[list(eos)] = True
        self._ends: Bits = np.packbits(ends, bitorder="little")
        self._everything: Bits = np.packbits(np.ones_like(ends), bitorder="little")
        self._text: list[int] = []
        self._ahead: list[int] = []  # what the matcher has consumed beyond `_text`
        self._allowed: dict[tuple[int, ...], Bits] = {}
        self._failures: dict[tuple[int, ...], str] = {}

    def allowed(self, path: tuple[int, ...]) -> Bits:
        """Tokens that may follow the text and then `path`, at least one; not to be written to.

        Everything after a path that no text can take, beyond its end or through a forbidden token: neither model's
        distribution there is ever used.
        """
        bits = self._allowed.get(path)
        if bits is None:
            bits = self._allowed[path] = self._compute(path)
        return bits

    def failure(self, path: tuple[int, ...]) -> str | None:
        """Why the text cannot go on after `path`: it is a dead end; None where it can."""
        self.allowed(path)
        return self._failures.get(path)

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Append committed tokens to the text, as many of a block as it keeps; returns what is wrong with them.

        After anything but None the follower is not to be used any more.
        """
        body = tuple(itertools.takewhile(lambda token: token not in self._eos, tokens))
        wrong = None
        if not self._go(body):
            wrong = f"a token after the first {len(self._text) + len(self._ahead)} is not allowed there"
        elif len(body) < len(tokens):
            wrong = self.failure(body)
            if wrong is None and not self.allowed(body)[tokens[len(body)] // 8] >> tokens[len(body)] % 8 & 1:
                wrong = f"the text may not end after {len(self._text) + len(body)} tokens"
        self._text += body
        self._ahead = []
        self._allowed.clear()
        self._failures.clear()
        return wrong

    def _compute(self, path: tuple[int, ...]) -> Bits:
        if not self._eos.isdisjoint(path):
            return self._everything
        reached, length = self._go(path), len(self._text) + len(path)
        bits, problem = self._everything, None
        if reached:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(bits)] & bits
        if self._matcher.is_error():
            problem = f"no token can follow the first {length} ({_first_line(self._matcher.get_error())})"
            self._restart()
        elif reached:
            early = length < self._min_tokens
            ends, bits = bool((bits & self._ends).any()), bits & ~self._ends if early else bits
            if not self._possible(bits):
                problem = f"no token can follow the first {length}"
                if early and ends:
                    problem = f"the text can only end after {length} tokens, min_tokens is {self._min_tokens}"
        if problem is None:
            return bits
        self._failures[path] = problem
        return self._ends

    def _possible(self, bits: Bits) -> bool:
        """Whether some token can follow.

        Where a grammar leaves one text only, llguidance allows the first token of its encoding alone, be it that this
        vocabulary cannot encode the text.
        """
        number = int.from_bytes(bits.tobytes(), "little")
        token = number.bit_length() - 1
        return number > 0 and (
            number.bit_count() > 1 or token in self._eos or self._matcher.validate_tokens([token]) == 1
        )

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher behind `path`; False if it cannot go all the way."""
        same = 0
        for here, there in zip(self._ahead, path, strict=False):
            if here != there:
                break
            same += 1
        if same < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        taken = self._matcher.try_consume_tokens(list(path[same:])) if same < len(path) else 0
        self._ahead += path[same : same + taken]
        return len(self._ahead) == len(path)

    def _restart(self) -> None:
        """A matcher in error stays so, though only a draft led it there: bring a new one to the end of the text."""
        self._matcher, self._ahead = self._start.deep_copy(), []
        self._matcher.try_consume_tokens(self._text)


def _llguidance() -> ModuleType:
    """The library; imported by the first constrained request, so that a machine without it decodes all others.

    Raises:
        InvalidInput: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        problem = (
            f"llguidance cannot be imported ({error}); pip install llguidance, or leave {', '.join(LANGUAGES)} out"
        )
        raise InvalidInput("llguidance", "missing", problem) from error


def _language(params: DecodingParams) -> tuple[str, str]:
    """Field and text of a constrained request's language."""
    return next((name, text) for name in LANGUAGES if (text := getattr(params, name)) is not None)


def _compile(field: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a schema, an expression or a grammar.

    Raises:
        InvalidInput: it is malformed, or a part of it would be ignored.
    """
    library = _llguidance()
    limits = library.LLParserLimits(verbose_errors=False)
    try:
        if field == "json_schema":
            json.loads(text)  # its messages say where a mistake is
        grammar = {
            "json_schema": library.LLMatcher.grammar_from_json_schema,
            "regex": library.LLMatcher.grammar_from_regex,
            "grammar": library.LLMatcher.grammar_from_lark,
        }[field](text)
        _, problems = library.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
        matcher: LLMatcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            problems = problems or [_first_line(matcher.get_error())]
    except (ValueError, RecursionError) as error:
        problems = [str(error)]
    if problems:
        message = _short("; ".join(" ".join(problem.split()) for problem in problems), 500)
        raise InvalidInput(field, _short(text), f"{message}; {_REMEDY[field]}")
    return matcher


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


def _short(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]} .."
