"""JSON schemas, regular expressions and grammars, compiled by llguidance."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from threading import Lock
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from mtad.errors import InvalidInput, imported
from mtad.params import LANGUAGES, DecodingParams
from runtime.constraints.follower import Follower, Grammar, language
from runtime.constraints.trial_process import compile_grammar
from runtime.constraints.trials import Pool, Trials

if TYPE_CHECKING:
    from llguidance import LLTokenizer

KEPT_BYTES = 256 * 2**20
"""Memory of the compiled grammars that are kept: some 150 schemas of 30 properties, as `Grammar.bytes` counts them."""

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
        self._prepared: LLTokenizer | None = None
        self._pool = Pool("compiling it", self._settings)
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._keeping, self._preparing, self._compiling = Lock(), Lock(), Lock()

    def compile(self, params: DecodingParams) -> Grammar:
        """The language of a constrained request, for which this thread waits.

        Raises:
            InvalidInput: schema, expression or grammar is malformed, has parts llguidance would ignore, is too large or
                takes too long, allows no text, or only the empty text where `min_tokens` asks for more; llguidance
                cannot use the tokenizer.
        """
        return self._checked(params, self._pool.run(partial(self._compile, params)))

    async def compile_soon(self, params: DecodingParams) -> Grammar:
        """The same, for which nothing waits but this coroutine. Cancelling it takes it out of the queue.

        Raises:
            InvalidInput: as `compile`.
            Failed: `close` was called.
        """
        if (grammar := self._find(params)) is None:
            grammar = await self._pool.run_soon(partial(self._compile, params))
        return self._checked(params, grammar)

    def prepare(self) -> LLTokenizer:
        """Llguidance's vocabulary, read by the first call: 0.4 s of the interpreter for 128,000 tokens.

        Raises:
            InvalidInput: llguidance cannot use the tokenizer.
        """
        with self._preparing:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared

    def forget(self) -> None:
        """Keep none that met a limit, so that others begin with a new one, and no more than the memory allows.

        They grow while they are followed: to be called when a request that had one ends.
        """
        with self._keeping:
            for key in [key for key, kept in self._kept.items() if kept.hit_limit]:
                del self._kept[key]
            while sum(kept.bytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """End all trials, and begin no more."""
        self._pool.close()

    def _find(self, params: DecodingParams) -> Grammar | None:
        key = language(params)
        self.forget()
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _compile(self, params: DecodingParams, trials: Trials) -> Grammar:
        if (known := self._find(params)) is not None:
            return known
        field, text = language(params)
        if not self.eos:
            lacks = f"it has no end-of-sequence token to end a constrained text; leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", type(self._tokenizer.model).__name__, lacks)
        tokenizer, found = self.prepare(), trials.run(field, text)
        matcher, problems = None, found["problems"]
        if not problems:
            with self._compiling:  # one at a time: they may take memory
                matcher, problems = compile_grammar(field, text, tokenizer)
        if matcher is None or problems:
            message = "; ".join(" ".join(problem.split()) for problem in problems)[:500]
            raise InvalidInput(field, text, f"{message}; {REMEDY[field]}")
        grammar = Grammar(matcher, compiled=found["bytes"])
        problem = self._follow(grammar, replace(params, min_tokens=0)).failure(())
        if problem is not None:
            raise InvalidInput(field, text, f"no text satisfies it: {problem.problem}; {REMEDY[field]}")
        grammar.empty = self._follow(grammar, replace(params, min_tokens=1, max_tokens=None)).failure(()) is not None
        with self._keeping:
            self._kept[field, text] = grammar
        self.forget()
        return grammar

    def _follow(self, grammar: Grammar, params: DecodingParams) -> Follower:
        return Follower(grammar, self.vocab_size, self.eos, params, None)

    @staticmethod
    def _checked(params: DecodingParams, grammar: Grammar) -> Grammar:
        if grammar.empty and params.min_tokens:
            field, _ = language(params)
            problem = f"{field} allows only the empty text; give 0, or another {field}"
            raise InvalidInput("min_tokens", params.min_tokens, problem)
        return grammar

    def _settings(self) -> dict[str, object]:
        """What llguidance needs of the tokenizer, as `trial_process.Compiler` takes it."""
        plain = copy.copy(self._tokenizer)
        plain.no_padding()
        plain.no_truncation()
        size = max(self.vocab_size, plain.get_vocab_size(with_added_tokens=True))
        return {"tokenizer": plain.to_str(), "vocab_size": size, "eos": list(self.eos)}

    def _prepare(self) -> LLTokenizer:
        remedy = f"the extra grammars installs it; or leave {', '.join(LANGUAGES)} out"
        library, given = imported("llguidance", "llguidance", "missing", remedy), self._settings()
        try:
            ends = given["eos"] or None
            made: LLTokenizer = library.LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=ends)
        except ValueError as error:
            problem = f"llguidance cannot use it ({error}); leave {', '.join(LANGUAGES)} out"
            raise InvalidInput("tokenizer", type(self._tokenizer.model).__name__, problem) from None
        except TypeError:  # TensorRT-LLM 1.2 pins such a release
            problem = "older than 1.9, it knows a single end of a text; install the extra grammars elsewhere"
            raise InvalidInput("llguidance", version("llguidance"), problem) from None
        return made
