"""The table of methods: who drafts what, what the target scores, which rule accepts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal[
    "token_wise",
    "block",
    "greedy_multi_path",
    "traversal",
    "recursive_rejection",
    "joint",
    "joint_sample",
    "modal",
    "typical",
    "threshold",
    "ensemble",
    "relaxed",
    "fly",
    "bild",
    "beams",
    "whole",
]
Drafter = Literal["auxiliary", "target"]
Form = Literal["chain", "beams", "branches"]
FORMS: tuple[Form, ...] = ("chain", "beams", "branches")


@dataclass(frozen=True)
class Method:
    """One row of the method table: who drafts what, what the target scores, which rule accepts.

    Attributes:
        drafter: the model that drafts; None where nothing is drafted.
        form: of the draft: one sampled `chain`, `beams` (beam sampling, `beam_width` beams), or `branches` (each node
            has its own children, drawn without replacement, as many as `branching` says).
        independent: of a branching draft: whether it is `beam_width` chains, each drawn without regard to the others.
        tree: whether the target scores the whole draft rather than one path of it.
        rule: the acceptance rule, a key of `mtad.rules.accept.RULES`.
        lossless: whether the output is distributed as the target's own samples.
        drawn: whether what is kept is drawn, so that temperature 0 needs a definition of its own: the likeliest.
        threshold: default of `accept_threshold`, whose meaning is the rule's; None for a rule without one.
        confidence: default of `draft_confidence`.
        live: whether several beams stay alive from block to block.
    """

    drafter: Drafter | None
    form: Form
    tree: bool
    rule: Rule
    lossless: bool
    drawn: bool = False
    threshold: float | None = None
    confidence: float = 0.0
    live: bool = False
    independent: bool = False

    def uses(self, name: str) -> bool:
        """Whether a field of `DecodingParams` does anything for it."""
        branches = self.form == "branches" and not self.independent
        known = {
            "draft_len": self.drafter is not None,
            "beam_width": self.form == "beams" or self.independent,
            "branching": branches,
            "replacement": branches,
            "relaxed_topk": self.rule == "relaxed",
            "fly_window_size": self.rule == "fly",
            "accept_threshold": self.threshold is not None,
            "draft_confidence": self.drafter == "auxiliary" and not self.live,
        }
        return known.get(name, True)


METHODS: dict[str, Method] = {
    "sample": Method(None, "chain", tree=False, rule="token_wise", lossless=True),
    "speculative": Method("auxiliary", "chain", tree=False, rule="token_wise", lossless=True),
    "block": Method("auxiliary", "chain", tree=False, rule="block", lossless=True),
    "gbv": Method("auxiliary", "branches", tree=True, rule="greedy_multi_path", lossless=True, independent=True),
    "traversal": Method("auxiliary", "branches", tree=True, rule="traversal", lossless=True),
    "specinfer": Method("auxiliary", "branches", tree=True, rule="recursive_rejection", lossless=True),
    "mtad": Method("auxiliary", "beams", tree=False, rule="joint", lossless=False, threshold=0.5),
    "mmtad": Method("auxiliary", "beams", tree=True, rule="joint", lossless=False, threshold=0.5),
    "mmtad_sample": Method("auxiliary", "beams", True, "joint_sample", lossless=False, drawn=True, threshold=0.5),
    "modal": Method("auxiliary", "beams", tree=False, rule="modal", lossless=False, threshold=1.0),
    "typical": Method("auxiliary", "beams", tree=True, rule="typical", lossless=False, threshold=0.09),
    "threshold": Method("auxiliary", "chain", tree=False, rule="threshold", lossless=False, threshold=0.5),
    "ensemble": Method("auxiliary", "chain", False, "ensemble", lossless=False, drawn=True, threshold=0.7),
    "relaxed": Method("auxiliary", "chain", tree=False, rule="relaxed", lossless=False, threshold=0.6),
    "fly": Method("auxiliary", "chain", False, "fly", lossless=False, drawn=True, threshold=0.3),
    "bild": Method("auxiliary", "chain", tree=False, rule="bild", lossless=False, threshold=2.0, confidence=0.3),
    "dsbd": Method("auxiliary", "beams", True, "beams", lossless=False, drawn=True, threshold=0.8, live=True),
    "mtjd": Method("target", "beams", tree=False, rule="whole", lossless=False, drawn=True),
    "beam": Method("target", "beams", tree=False, rule="whole", lossless=False),
}
