"""What a request may ask of the decoder, and the table of methods. No torch: schedulers import this file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from mtad.errors import InvalidInput

Rule = Literal["joint", "lossless"]
Speculation = Literal["fixed", "adaptive"]


@dataclass(frozen=True)
class Method:
    """One row of the method table: how tokens are drafted, what the target scores, which rule accepts.

    Attributes:
        drafts: whether the auxiliary model is used at all.
        beams: whether the draft is beam sampled (`beam_width` beams) rather than one sampled chain.
        tree: whether the target scores every beam (True) or the best final beam only (False).
        rule: the acceptance rule of `mtad.accept`.
        lossless: whether the output is distributed as the target's own samples.
    """

    drafts: bool
    beams: bool
    tree: bool
    rule: Rule
    lossless: bool


METHODS: dict[str, Method] = {
    "sample": Method(drafts=False, beams=False, tree=False, rule="lossless", lossless=True),
    "speculative": Method(drafts=True, beams=False, tree=False, rule="lossless", lossless=True),
    "mtad": Method(drafts=True, beams=True, tree=False, rule="joint", lossless=False),
    "mmtad": Method(drafts=True, beams=True, tree=True, rule="joint", lossless=False),
}


LANGUAGES = ("json_schema", "regex", "grammar")
"""Fields of `DecodingParams` that say which texts are allowed."""


@dataclass(frozen=True)
class DecodingParams:
    """Decoding parameters of one request.

    Defaults are those of the paper's experiments (arXiv 2407.09722 and its published code: B 4, gamma 4, top-k 10,
    top-p 0.9, temperature 1, tau 0.5, 128 new tokens); a pair folder may carry better ones, tuned for its two models.

    Attributes:
        method: `sample` (one target token a pass), `speculative` (token-wise speculative sampling, lossless), `mtad`
            (joint acceptance of the best beam) or `mmtad` (joint acceptance over the whole beam tree).
        draft_len: gamma, drafted tokens a block, >= 1. Unused by `sample`.
        beam_width: B, beams of the draft, >= 1. Unused by `sample` and `speculative`.
        accept_threshold: tau, >= 0; a drafted prefix is accepted while p(prefix) / q(prefix) > tau. 0 accepts whatever
            the target's own filtered distribution allows; 1 asks the target to find it likelier than the auxiliary
            does; more is stricter still. Unused by the lossless methods.
        temperature: divides the logits of both models, >= 0. 0 removes all randomness: greedy decoding for `sample`
            and `speculative`; for `mtad` and `mmtad` a deterministic beam search by the auxiliary, joint acceptance on
            the distributions of temperature 1, and the target's most likely token as bonus.
        top_k: both models keep their `top_k` most likely tokens; 0 keeps all.
        top_p: both models then keep the fewest tokens whose probability reaches `top_p`, in (0, 1]; 1 keeps all.
        seed: key of the request's random numbers, 0 .. 2**63 - 1; None draws one.
        max_tokens: new tokens at most, >= 1; exact.
        stop: strings that end the text where they first appear; not part of the result. One string or several.
        ignore_eos: go on past end-of-sequence tokens (for measurements of speed).
        min_tokens: new tokens at least, <= max_tokens: until then no end-of-sequence token is drafted or accepted, and
            stop strings are not looked for.
        n: independent texts for the prompt, >= 1. The first has this request's seed, the others seeds derived from it.
        top_logprobs: likeliest alternatives reported with each token, 0 .. 20.
        logit_bias: token id -> number added to its logit in both models, before everything else; finite.
        repetition_penalty: positive logits of tokens in prompt or text are divided by it, negative ones multiplied
            (arXiv 1909.05858), > 0; 1 is off.
        presence_penalty: subtracted from the logit of each token that is in the text, -2 .. 2.
        frequency_penalty: subtracted as often as the token is in the text, -2 .. 2.
        json_schema: JSON schema, as JSON text, that the text must satisfy. At most one of the three.
        regex: regular expression that the whole text must match.
        grammar: grammar the text must follow, in llguidance's Lark syntax.
        speculation: `fixed` drafts as asked, always; `adaptive` lets the runtime shorten, narrow or skip drafts where
            that is faster, never beyond `draft_len` and `beam_width`. None: adaptive for a lossless method without a
            seed (its distribution does not depend on drafts, but its samples do), else fixed.
    """

    method: str = "mtad"
    draft_len: int = 4
    beam_width: int = 4
    accept_threshold: float = 0.5
    temperature: float = 1.0
    top_k: int = 10
    top_p: float = 0.9
    seed: int | None = None
    max_tokens: int = 128
    stop: str | tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidInput("method", self.method, f"unknown; choose one of {', '.join(METHODS)}")
        _integer("draft_len", self.draft_len, 1, 64)
        _integer("beam_width", self.beam_width, 1, 64)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        _real("accept_threshold", self.accept_threshold, 0.0, math.inf, "at least 0 and finite")
        _real("temperature", self.temperature, 0.0, math.inf, "at least 0 and finite")
        if 0 < self.temperature < 1e-2:
            raise InvalidInput("temperature", self.temperature, "give 0 for greedy decoding, or at least 0.01")
        _real("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", open_low=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput("ignore_eos", self.ignore_eos, "give true or false")
        if not isinstance(self.stop, (str, tuple)) or any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise InvalidInput("stop", self.stop, "give one non-empty string or a tuple of them")
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, 1024)
        _integer("top_logprobs", self.top_logprobs, 0, 20)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0 and finite", open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidInput("logit_bias", self.logit_bias, "give a mapping from token ids to numbers")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -math.inf, math.inf, "that is finite")
        for name in LANGUAGES:
            if not isinstance(getattr(self, name), (str, type(None))):
                raise InvalidInput(name, getattr(self, name), "give text")
        if sum(getattr(self, name) is not None for name in LANGUAGES) > 1:
            raise InvalidInput("grammar", self.grammar, f"give at most one of {', '.join(LANGUAGES)}")
        if self.constrained and self.ignore_eos:
            raise InvalidInput("ignore_eos", True, "a constrained text ends where its language ends; leave it out")
        if self.speculation not in (None, "fixed", "adaptive"):
            raise InvalidInput("speculation", self.speculation, "give fixed or adaptive")

    @property
    def spec(self) -> Method:
        """The method's row of the table."""
        return METHODS[self.method]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def drafted(self) -> int:
        """Levels of the draft tree; 0 for `sample`."""
        return self.draft_len if self.spec.drafts else 0

    @property
    def draft_width(self) -> int:
        """Beams the auxiliary runs: `beam_width`, 1 for a chain, 0 without a draft."""
        return (self.beam_width if self.spec.beams else 1) if self.spec.drafts else 0

    @property
    def score_width(self) -> int:
        """Nodes a level that the target scores: `beam_width` for a tree, 1 for a chain, 0 without a draft."""
        return self.beam_width if self.spec.tree else min(self.draft_width, 1)

    @property
    def constrained(self) -> bool:
        """Whether a JSON schema, a regular expression or a grammar says which tokens are allowed."""
        return any(getattr(self, name) is not None for name in LANGUAGES)

    @property
    def adaptive(self) -> bool:
        """Whether the runtime may draft less than asked."""
        if self.speculation is None:
            return self.spec.lossless and self.spec.drafts and (self.seed is None or self.temperature == 0)
        return self.speculation == "adaptive" and self.spec.drafts

    @property
    def longest_tree(self) -> int:
        """KV columns a block may write beyond the committed tokens, in either cache."""
        return self.drafted * self.draft_width

    @classmethod
    def from_dict(cls, values: dict[str, Any], base: DecodingParams | None = None) -> DecodingParams:
        """Parameters from untyped values, on top of `base`; an unknown field is refused by name."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidInput(name, values[name], f"unknown decoding parameter; known: {', '.join(sorted(known))}")
        values = dict(values)
        if isinstance(values.get("stop"), list):
            values["stop"] = tuple(values["stop"])
        if isinstance(values.get("logit_bias"), Mapping):  # JSON has no integer keys
            values["logit_bias"] = {_token(token): bias for token, bias in values["logit_bias"].items()}
        return replace(base or cls(), **values)


def _token(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(field, value, f"give an integer from {low} to {high}")


def _real(field: str, value: object, low: float, high: float, words: str, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise InvalidInput(field, value, f"give a number {words}")
