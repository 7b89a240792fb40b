"""What a request may ask of the decoder. No torch: schedulers import this file."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from mtad.errors import InvalidInput
from mtad.methods import METHODS, REMOVED, Form, Method

LONGEST = 16
"""Tokens that an automatic draft has at most."""

_SMALLEST, _LARGEST = 1e-37, 1e37
"""Sizes of the numbers that float32 holds in full, and holds the reciprocals of."""

LANGUAGES = ("json_schema", "regex", "grammar")
"""Fields of `DecodingParams` that say which texts are allowed."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `DecodingParams` that decide what becomes of the target's law, named as in a generation_config.json."""


@dataclass(frozen=True)
class DecodingParams:
    """Decoding parameters of one request.

    By default, a lossless method decodes from the target's own law, at temperature 1 without a filter. What `mtad` and
    other methods need besides are the values of the paper's experiments (arXiv 2407.09722 and its published code: B 4,
    gamma 4, tau 0.5). A pair folder may carry others: its checkpoint's, its owner's, or tuned ones.

    Attributes:
        method: Decoding method, a row of `mtad.methods.METHODS`.
        draft: Where drafts come from: model, the auxiliary; lookup, what followed in prompt and answer where the same
            tokens stood before; lookup+model, the auxiliary where nothing is found. By default model, and lookup for a
            pair without an auxiliary. A looked-up draft is a chain, or where the target scores a tree, as many
            continuations as its widest level has nodes; each is certain, so that tau of mtad bounds p(prefix) itself.
        draft_len: Number of tokens drafted per block (gamma), at least 1; or auto, up to 16, which follows how many
            tokens are accepted and what a step costs. A lossless method or a budget without a seed goes by the measured
            seconds of blocks, so its samples depend on the load, though not their law, nor a budget's bound. With a
            seed, or where the law depends on the draft, auto follows the request's own text and costs stored with the
            pair: the same seed gives the same tokens in any batch. sample ignores it; a tree of branches has as many
            levels as branching.
        beam_width: Number of beams in the draft (B), at least 1.
        branching: Number of children per node of the tree of traversal and budget_tree, level by level; only the first
            draft_len levels are used. The default tree has about as many nodes as the other methods' beams.
        accept_threshold: Acceptance threshold, at least 0; its default and its meaning depend on the method. For mtad,
            mmtad and mmtad_sample it is tau: a drafted prefix is accepted if p(prefix) / q(prefix) > tau, so 0 accepts
            whatever the target's filtered distribution allows, and 1 requires the prefix to be likelier under the
            target than under the auxiliary. For ensemble, up to 1, the weight w of the target in w p + (1 - w) q
            (Hugging Face's assistant_ensemble_weight). For relaxed, by how much less likely than the target's most
            likely token a token may be (TensorRT-LLM's relaxed_delta).
        divergence: How far budget and budget_tree may move the law of a token from the target's, in total variation,
            times 1 - max p, which is small where the target is sure; from 0 to 1. 0 is lossless.
        plausible: They move it towards tokens alone that are at least this times as likely under the target as its most
            likely one; from 0 to 1.
        relaxed_topk: How many of the target's most likely tokens relaxed accepts, at least 1.
        draft_confidence: From 0 to 1. A drafted path is not continued once its joint likelihood under the auxiliary
            falls below this, so drafts are long only where the auxiliary is confident; 0 never stops a draft. It is
            that behind the filters: 1 where they leave one token, as lossless methods and budgets do at temperature 0.
        thinking_method: Method inside thoughts, between the tags that a model opens and closes them by; by default,
            method. Behind a tag the other part's rule begins anew, so with a lossless method the answer is a sample of
            the target's own law given the thought, whatever wrote that (docs/thinking.md).
        thinking_threshold: accept_threshold inside thoughts; by default, the method's own, or accept_threshold where
            the method is the same.
        thinking_divergence: divergence inside thoughts; by default, divergence.
        thinking_tags: The two tags, such as <think> and </think>; by default, those that the tokenizer is known to
            have.
        thinking_token_budget: Maximum number of tokens of each thought, at least 0; the closing tag takes the place of
            the next one. By default, there is no limit but max_tokens.
        temperature: Divides the logits of both models; at least 0. At 0 nothing is random: lossless methods and budgets
            decode greedily; the others draft by beam search, accept by the distributions at temperature 1, and add the
            target's most likely token.
        top_k: Both models keep their top_k most likely tokens; 0 keeps all.
        top_p: Both models then keep the fewest tokens whose probability reaches top_p, from 0 to 1; 1 keeps all, 0 the
            most likely one.
        min_p: Both models then drop tokens less likely than min_p times the most likely one, from 0 to 1; 0 drops none.
        seed: Seed of the request's random numbers, from 0 to 2**63 - 1; by default, a random one.
        max_tokens: Maximum number of new tokens, at least 1; by default, as many as fit behind the prompt. With
            prompt_logprobs also 0, which decodes nothing.
        stop: One string or several that end the text where they first appear, of at most 1024 characters together; the
            result leaves them out.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        stop_token_ids: Tokens that end the text where they first appear, as an end-of-sequence token does. They give no
            text.
        skip_special_tokens: Leave special tokens out of the text.
        ignore_eos: Continue past end-of-sequence tokens, to measure speed.
        min_tokens: Minimum number of new tokens, up to max_tokens. Until then, no end-of-sequence token is drafted or
            accepted, and stop strings and stop tokens are ignored.
        n: Number of independent texts per prompt, at least 1. The first uses the request's seed, the others seeds
            derived from it.
        top_logprobs: Number of most likely alternatives reported per token, from 0 to 20.
        prompt_logprobs: Report the target's log-probability of each prompt token, and this many of the most likely
            alternatives to it, from 0 to 20. The prompt is then prefilled without the prefix cache. By default, nothing
            is reported about the prompt.
        draft_details: Report of each token whether it was drafted, by how many beams, how likely each model found it,
            and what was drafted in its place. On a GPU, blocks of such requests do not run as CUDA graphs.
        bad_words: Words that the text must not contain, of at most 4096 characters together, as token sequences with
            and without a space before them: the last token of each is masked where the others precede it in the text.
        logit_bias: Numbers from -1e9 to 1e9 added to the logits of tokens, by token id, in both models and before all
            other processing.
        repetition_penalty: Divides the positive logits of tokens that are in the prompt or the text, and multiplies the
            negative ones (arXiv 1909.05858); from 1e-6 to 1e6; 1 turns it off.
        presence_penalty: Subtracted from the logit of every token that is in the text; from -2 to 2.
        frequency_penalty: Subtracted from a token's logit once per occurrence in the text; from -2 to 2.
        json_schema: JSON schema, as a string, that the text must satisfy. Give only one of json_schema, regex and
            grammar.
        regex: Regular expression that the whole text must match.
        grammar: Grammar that the text must follow, in llguidance's Lark syntax.
    """

    method: str = "block"
    draft: Literal["model", "lookup", "lookup+model"] | None = None
    draft_len: int | Literal["auto"] = "auto"
    beam_width: int = 4
    branching: tuple[int, ...] = (2, 2, 1, 1)
    accept_threshold: float | None = None
    divergence: float = 0.1
    plausible: float = 0.2
    relaxed_topk: int = 10
    draft_confidence: float = 0.0
    thinking_method: str | None = None
    thinking_threshold: float | None = None
    thinking_divergence: float | None = None
    thinking_tags: tuple[str, ...] = ()
    thinking_token_budget: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    draft_details: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name in ("branching", "stop", "stop_token_ids", "bad_words", "thinking_tags"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name in ("method",) if self.thinking_method is None else ("method", "thinking_method"):
            method = getattr(self, name)
            if instead := REMOVED.get(str(method)):
                raise InvalidInput(name, method, f"no longer there; use {instead}")
            if method not in tuple(METHODS):  # it may be anything
                raise InvalidInput(name, method, f"unknown; choose one of {', '.join(METHODS)}")
        if self.draft not in (None, "model", "lookup", "lookup+model"):
            raise InvalidInput("draft", self.draft, "choose one of model, lookup, lookup+model")
        if self.draft_len != "auto":
            _integer("draft_len", self.draft_len, 1, 128, " or auto")
        integers = ("beam_width", 1, 64), ("top_k", 0, 2**31 - 1), ("relaxed_topk", 1, 2**31 - 1), ("n", 1, 1024)
        for name, low, high in (*integers, ("top_logprobs", 0, 20)):
            _integer(name, getattr(self, name), low, high)
        most = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        _integer("max_tokens", most, 0 if self.prompt_logprobs is not None else 1, 2**31 - 1)
        for name, high in (("seed", 2**63 - 1), ("thinking_token_budget", 2**31 - 1), ("prompt_logprobs", 20)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, high)
        for name in ("divergence", "thinking_divergence", "plausible", "draft_confidence", "top_p", "min_p"):
            if name != "thinking_divergence" or self.thinking_divergence is not None:
                _real(name, getattr(self, name), 0.0, 1.0, "from 0 to 1")
        if not isinstance(self.branching, tuple) or not self.branching:
            problem = "give the number of children per node, level by level, such as 4,2,2"
            raise InvalidInput("branching", self.branching, problem)
        for children in self.branching:
            _integer("branching", children, 1, 64)
        if math.prod(self.branching) > 64:
            raise InvalidInput("branching", self.branching, "a level may have at most 64 nodes; give fewer children")
        thresholds = ("accept_threshold", self.method), ("thinking_threshold", self.thinking_method or self.method)
        for name, method in thresholds:
            if (threshold := getattr(self, name)) is not None:
                _real(name, threshold, 0.0, math.inf, "at least 0 and finite")
                if method == "ensemble" and threshold > 1:
                    raise InvalidInput(name, threshold, "a weight; give a number from 0 to 1")
        tags = self.thinking_tags
        if not isinstance(tags, tuple) or len(tags) not in (0, 2) or not all(isinstance(t, str) and t for t in tags):
            raise InvalidInput("thinking_tags", tags, "give the tag that opens a thought and the one that closes it")
        _real("temperature", self.temperature, 0.0, math.inf, "at least 0 and finite")
        if 0 < self.temperature < 1e-2:
            raise InvalidInput("temperature", self.temperature, "give 0 for greedy decoding, or at least 0.01")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "draft_details"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, getattr(self, name), "give true or false")
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidInput("stop_token_ids", self.stop_token_ids, "give token ids, such as 2,13")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.stop, (str, tuple)) or any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise InvalidInput("stop", self.stop, "give one non-empty string or several")
        _integer("min_tokens", self.min_tokens, 0, most)
        _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "from 1e-6 to 1e6")
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2")
        if not isinstance(self.bad_words, tuple) or any(not isinstance(w, str) or not w for w in self.bad_words):
            raise InvalidInput("bad_words", self.bad_words, "give a sequence of texts that are not empty")
        for name, texts, longest in (("stop", self.stop_strings, 1024), ("bad_words", self.bad_words, 4096)):
            if sum(map(len, texts)) > longest:  # each is looked for at every token
                raise InvalidInput(name, texts, f"give at most {longest} characters, of all strings together")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidInput("logit_bias", self.logit_bias, "give a mapping from token ids to numbers")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -1e9, 1e9, "from -1e9 to 1e9")  # beyond, logits of float32 could overflow
        for name in LANGUAGES:
            if not isinstance(getattr(self, name), (str, type(None))):
                raise InvalidInput(name, getattr(self, name), "give text")
        if sum(getattr(self, name) is not None for name in LANGUAGES) > 1:
            raise InvalidInput("grammar", self.grammar, f"give at most one of {', '.join(LANGUAGES)}")
        if self.constrained and self.ignore_eos:
            raise InvalidInput("ignore_eos", True, "a constrained text ends when it is complete; leave it out")

    @cached_property
    def spec(self) -> Method:
        return METHODS[self.method]

    @cached_property
    def thinking(self) -> DecodingParams:
        """Those of thoughts; the same object where nothing differs there."""
        own = self.thinking_method, self.thinking_threshold, self.thinking_divergence
        each = zip(("method", "accept_threshold", "divergence"), own, strict=True)
        given = {name: value for name, value in each if value is not None}
        plain = replace(self, thinking_method=None, thinking_threshold=None, thinking_divergence=None)
        changed = self.from_dict(given, plain)
        return self if changed == plain else changed

    @property
    def lossless(self) -> bool:
        """Whether the whole text, thoughts included, is distributed as the target's own samples."""
        return self.spec.lossless and self.thinking.spec.lossless

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def threshold(self) -> float:
        """`accept_threshold`, or the method's own; 0 for a rule without one."""
        return self.accept_threshold if self.accept_threshold is not None else self.spec.threshold or 0.0

    @cached_property
    def drafts(self) -> bool:
        return self.spec.form is not None

    @cached_property
    def uses_model(self) -> bool:
        """Whether the auxiliary drafts, so that its cache must follow the text."""
        return self.drafts and self.draft != "lookup"

    @cached_property
    def looks_up(self) -> bool:
        """Whether drafts are looked up, be it before the auxiliary is asked."""
        return self.drafts and self.draft not in (None, "model")

    @cached_property
    def form(self) -> Form | None:
        """The form of the draft; what is looked up alone is a chain, unless the target scores a tree."""
        return self.spec.form if self.uses_model or self.spec.tree or not self.drafts else "chain"

    @cached_property
    def drafted(self) -> int:
        """Levels of the draft tree, of an automatic one at most; 0 for `sample`."""
        if not self.drafts:
            return 0
        length = LONGEST if self.draft_len == "auto" else self.draft_len
        return min(length, len(self.branching)) if self.form == "branches" and self.uses_model else length

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Nodes of each level of the draft."""
        if self.form == "branches":
            grown = tuple(itertools.accumulate(self.branching[: self.drafted], operator.mul))
            return grown if self.uses_model else grown[-1:] * self.drafted
        return (self.beam_width if self.form == "beams" else 1,) * self.drafted

    @cached_property
    def draft_width(self) -> int:
        """Nodes of the draft's widest level; 0 without a draft."""
        return max(self.widths, default=0)

    @property
    def constrained(self) -> bool:
        """Whether a JSON schema, a regular expression or a grammar says which tokens are allowed."""
        return any(getattr(self, name) is not None for name in LANGUAGES)

    @cached_property
    def automatic(self) -> bool:
        """Whether the runtime chooses how long the auxiliary's drafts are."""
        return self.draft_len == "auto" and self.uses_model and self.form != "branches"

    @cached_property
    def timed(self) -> bool:
        """Whether the length of drafts may follow the clock.

        It may where the law of the text, or its bound, does not depend on the draft, and either no seed was given or
        temperature 0 makes the tokens the same anyway; with thoughts, where it may in both parts.
        """
        own = self.spec.exact and (self.seed is None or self.temperature == 0)
        return own and (self.thinking is self or self.thinking.timed)

    @cached_property
    def follows_load(self) -> bool:
        """Whether it chooses by measured seconds."""
        return self.automatic and self.thinking.automatic and self.timed

    @classmethod
    def from_dict(cls, values: dict[str, Any], base: DecodingParams | None = None) -> DecodingParams:
        """Parameters from untyped values, on top of `base`; an unknown field is refused by name.

        Another method than the base's does not inherit the threshold, which means something else to each.
        """
        for name in values:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(sorted(cls.__dataclass_fields__))
                raise InvalidInput(name, values[name], f"unknown decoding parameter; known: {known}")
        values = dict(values)
        if isinstance(values.get("logit_bias"), Mapping):  # JSON has no integer keys
            values["logit_bias"] = {_token(token): bias for token, bias in values["logit_bias"].items()}
        base = base or cls()
        if values.get("method", base.method) != base.method:
            base = replace(base, accept_threshold=None)
        return replace(base, **values)


def _token(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key


def _integer(field: str, value: object, low: int, high: int, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(field, value, f"give an integer from {low} to {high}{other}")


def _real(field: str, value: object, low: float, high: float, words: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if not number or not low <= value <= high:  # type: ignore[operator]
        raise InvalidInput(field, value, f"give a number {words}")
    if value and not _SMALLEST <= abs(value) <= _LARGEST:  # type: ignore[arg-type]
        problem = f"float32 does not hold it; give a number {words}, of a size from {_SMALLEST:g} to {_LARGEST:g}"
        raise InvalidInput(field, value, problem)
