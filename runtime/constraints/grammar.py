"""JSON schemas, regular expressions and grammars, compiled by llguidance."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from mtad.errors import InvalidInput
from mtad.params import LANGUAGES, DecodingParams
from runtime.constraints.follower import Follower, Grammar, language, short
from runtime.constraints.trial_process import compile_grammar
from runtime.constraints.trials import TooSlow, Trial, Trials

if TYPE_CHECKING:
    from llguidance import LLTokenizer

KEPT_BYTES = 512 * 2**20
"""Memory of the compiled grammars that are kept."""

QUICK_SECONDS, SECONDS = 0.2, 2.0
"""Of the processor, that a trial may take. What needs more than the first waits for others of its kind, and is tried
again: no other grammar then waits long behind it."""

QUICK_WAIT = 1.0
"""Seconds after which a trial that should have been quick is one of the others: the machine has no time for it, and
those behind it are not to wait."""

REMEDY = {
    "json_schema": "give a JSON schema, as JSON text, of keywords that llguidance supports",
    "regex": "give a regular expression in Rust's syntax, without look-around and back-references",
    "grammar": "give a grammar in llguidance's Lark syntax, with a rule `start`",
}


class Grammars:
    """Compiles the languages of one pair's requests. Safe to share between threads.

    A grammar is first tried out in a process of its own, within limits of stack, memory and time
    (`runtime.constraints.trial_process`). Only one that did well there is compiled here, in a thread that holds no lock
    that others wait for; llguidance releases the interpreter's. Those accepted last are kept, as far as their memory
    allows.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self.vocab_size, self.eos = vocab_size, tuple(eos)
        self._tokenizer = tokenizer
        self._prepared: tuple[LLTokenizer, Trials] | None = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._keeping, self._preparing, self._compiling = Lock(), Lock(), Lock()
        self._quick, self._slow = ThreadPoolExecutor(2, "mtad-grammar"), ThreadPoolExecutor(1, "mtad-slow-grammar")
        self._waiting: set[Trial] = set()

    def compile(self, params: DecodingParams) -> Grammar:
        """The language of a constrained request, for which this thread waits.

        Raises:
            InvalidInput: schema, expression or grammar is malformed, has parts llguidance would ignore, is too large or
                takes too long, allows no text, or only the empty text where `min_tokens` asks for more; llguidance
                cannot use the tokenizer, or is not installed.
        """
        return self._checked(params, self._find(params) or self._compile(params, Trial(), SECONDS))

    async def compile_soon(self, params: DecodingParams) -> Grammar:
        """The same, for which nothing waits but this coroutine. Cancelling it ends the trial.

        Raises:
            InvalidInput: as `compile`.
            Stopped: `close` was called.
        """
        grammar = self._find(params)
        if grammar is None:
            trial, event_loop = Trial(), asyncio.get_running_loop()
            self._waiting.add(trial)
            try:
                limits = QUICK_SECONDS, QUICK_WAIT
                grammar = await event_loop.run_in_executor(self._quick, self._compile, params, trial, *limits)
            except TooSlow:
                grammar = await event_loop.run_in_executor(self._slow, self._compile, params, trial, SECONDS)
            finally:
                self._waiting.discard(trial)
                trial.stop()
        return self._checked(params, grammar)

    def prepare(self) -> tuple[LLTokenizer, Trials]:
        """What the first grammar needs, 0.4 s of the interpreter for 128,000 tokens, is done now.

        Raises:
            InvalidInput: llguidance cannot use the tokenizer, or is not installed.
        """
        with self._preparing:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared

    def forget(self) -> None:
        """Keep none of the grammars so far; requests that have one go on with it."""
        with self._keeping:
            self._kept.clear()

    def close(self) -> None:
        """Nobody waits for a grammar any more: end all trials."""
        for trial in list(self._waiting):
            trial.stop()
        if self._prepared:
            self._prepared[1].close()

    def _find(self, params: DecodingParams) -> Grammar | None:
        """The grammar, if it is kept. One that met a limit is forgotten, so that others begin with a new one."""
        key = language(params)
        with self._keeping:
            known = self._kept.get(key)
            if known is None:
                return None
            if known.spoilt:
                del self._kept[key]
                return None
            self._kept.move_to_end(key)
            return known

    def _compile(self, params: DecodingParams, trial: Trial, seconds: float, wait: float | None = None) -> Grammar:
        """Try a grammar out, compile it and keep it, unless somebody else has just done so."""
        known = self._find(params)
        if known is not None:
            return known
        field, text = language(params)
        tokenizer, trials = self.prepare()
        taken, problems = trials.run(trial, field, text, short(text), seconds, wait)
        matcher = None
        if not problems:
            with self._compiling:  # one at a time: they may take memory
                matcher, problems = compile_grammar(field, text, tokenizer)
        if matcher is None or problems:
            message = short("; ".join(" ".join(problem.split()) for problem in problems), 500)
            raise InvalidInput(field, short(text), f"{message}; {REMEDY[field]}")
        grammar = Grammar(matcher, compiled=taken)
        problem = self._follow(grammar, replace(params, min_tokens=0)).failure(())
        if problem is not None:
            raise InvalidInput(field, short(text), f"no text satisfies it: {problem.problem}; {REMEDY[field]}")
        grammar.empty = self._follow(grammar, replace(params, min_tokens=1)).failure(()) is not None
        with self._keeping:
            self._kept[field, text] = grammar
            while sum(kept.bytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return grammar

    def _follow(self, grammar: Grammar, params: DecodingParams) -> Follower:
        return Follower(grammar, self.vocab_size, self.eos, params)

    @staticmethod
    def _checked(params: DecodingParams, grammar: Grammar) -> Grammar:
        if grammar.empty and params.min_tokens:
            field, _ = language(params)
            problem = f"{field} allows only the empty text; give 0, or another {field}"
            raise InvalidInput("min_tokens", params.min_tokens, problem)
        return grammar

    def _prepare(self) -> tuple[LLTokenizer, Trials]:
        kind = type(self._tokenizer.model).__name__
        if not self.eos:
            problem = f"it has no end-of-sequence token to end a constrained text; leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", kind, problem)
        try:  # only now, so that all other requests are decoded without it
            from llguidance import LLTokenizer
        except ImportError as error:
            problem = f"it cannot be imported ({error}); pip install it, or leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("llguidance", "missing", problem) from error
        plain = copy.copy(self._tokenizer)
        plain.no_padding()
        plain.no_truncation()
        text, size = plain.to_str(), max(self.vocab_size, plain.get_vocab_size(with_added_tokens=True))
        try:
            made = LLTokenizer(text, n_vocab=size, eos_token=list(self.eos))
        except ValueError as error:
            problem = f"llguidance cannot use it ({error}); leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", kind, problem) from None
        return made, Trials({"tokenizer": text, "vocab_size": size, "eos": list(self.eos)})
