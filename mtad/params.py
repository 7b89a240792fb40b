"""What a request may ask of the decoder, and the table of methods. No torch: schedulers import this file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mtad.errors import InvalidInput

Rule = Literal["joint", "lossless"]


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
        if isinstance(values.get("stop"), list):
            values = {**values, "stop": tuple(values["stop"])}
        return replace(base or cls(), **values)


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(field, value, f"give an integer from {low} to {high}")


def _real(field: str, value: object, low: float, high: float, words: str, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise InvalidInput(field, value, f"give a number {words}")
