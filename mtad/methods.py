"""The table of methods: what is drafted, what the target scores, which rule accepts. It imports nothing heavy.

A method is one row. The command line, the server's schema, the documentation and the tests read this table, and
`rule` names the function that is called: adding a method takes its function, its row here, and its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["chain", "beams", "branches"]
FORMS: tuple[Form, ...] = ("chain", "beams", "branches")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        form: of the draft: one sampled `chain`; `beams` (beam sampling, `beam_width` beams); `branches` (each node has
            children of its own, as many as `branching` says); None where nothing is drafted.
        rule: the acceptance rule, as module and function of `mtad.rules`.
        help: what it does, in one line.
        source: where the rule is defined.
        tree: the target scores the whole draft rather than its best path.
        lossless: the output is distributed as the target's own samples.
        bounded: it is distributed as samples of a law that lies within `divergence` of the target's.
        reads_draft: the rule looks at the distributions that the draft was drawn from, not at its tokens alone.
        threshold: default of `accept_threshold`, whose meaning is the rule's; None for a rule without one.
        captured: a GPU runs it inside a CUDA graph, by the functions of `mtad.device`.
    """

    form: Form | None
    rule: str
    help: str
    source: str
    tree: bool = False
    lossless: bool = False
    bounded: bool = False
    reads_draft: bool = False
    threshold: float | None = None
    captured: bool = False

    @property
    def exact(self) -> bool:
        """Whether what it promises holds whatever is drafted, and temperature 0 is greedy decoding."""
        return self.lossless or self.bounded

    def uses(self, name: str) -> bool:
        """Whether a field of `DecodingParams` does anything for it."""
        known = {
            "draft": self.form is not None,
            "draft_len": self.form is not None,
            "beam_width": self.form == "beams",
            "branching": self.form == "branches",
            "relaxed_topk": self.rule == "chain.relaxed",
            "divergence": self.bounded,
            "plausible": self.bounded,
            "accept_threshold": self.threshold is not None,
            "draft_confidence": self.form is not None,
        }
        return known.get(name, True)


METHODS: dict[str, Method] = {
    "sample": Method(
        None,
        "chain.token_wise",
        "One sampled token per target pass; at temperature 0 this is greedy decoding.",
        "",
        lossless=True,
        captured=True,
    ),
    "speculative": Method(
        "chain",
        "chain.token_wise",
        "Speculative decoding, verified token by token; the output keeps the target's distribution.",
        "arXiv 2211.17192, algorithm 1",
        lossless=True,
        reads_draft=True,
        captured=True,
    ),
    "block": Method(
        "chain",
        "block.block",
        "Speculative decoding with block verification; the same distribution, slightly more tokens per pass.",
        "arXiv 2403.10444, algorithm 2",
        lossless=True,
        reads_draft=True,
        captured=True,
    ),
    "traversal": Method(
        "branches",
        "branches.traversal",
        "A tree verified from its leaves to its root; the same distribution, more tokens per pass.",
        "arXiv 2505.12398",
        tree=True,
        lossless=True,
        reads_draft=True,
    ),
    "budget": Method(
        "chain",
        "budget.budget",
        "Block verification against a target moved towards the auxiliary, within a total variation per token.",
        "docs/methods.md",
        bounded=True,
        reads_draft=True,
        captured=True,
    ),
    "budget_tree": Method(
        "branches",
        "budget.budget_tree",
        "The same on a tree, by traversal verification.",
        "docs/methods.md",
        tree=True,
        bounded=True,
        reads_draft=True,
    ),
    "mtad": Method(
        "beams",
        "joint.joint",
        "Accepts the longest prefix of the best beam whose joint likelihood ratio p/q exceeds a threshold, tau.",
        "arXiv 2407.09722",
        threshold=0.5,
        captured=True,
    ),
    "mmtad": Method(
        "beams",
        "joint.joint",
        "The same rule over all beams, scored as one token tree; the likeliest path that passes.",
        "arXiv 2407.09722",
        tree=True,
        threshold=0.5,
        captured=True,
    ),
    "mmtad_sample": Method(
        "beams",
        "joint.joint_sample",
        "As mmtad, but the path is drawn by the target's joint distribution over those that pass.",
        "docs/methods.md",
        tree=True,
        threshold=0.5,
        captured=True,
    ),
    "ensemble": Method(
        "chain",
        "chain.ensemble",
        "Token by token against a mixture of target and auxiliary, as in Hugging Face's library.",
        "arXiv 2604.07622",
        reads_draft=True,
        threshold=0.7,
    ),
    "relaxed": Method(
        "chain",
        "chain.relaxed",
        "Accepts tokens among the target's most likely ones, as in TensorRT-LLM.",
        "TensorRT-LLM's relaxed acceptance",
        threshold=0.6,
    ),
}

REMOVED = {
    "dsbd": "mmtad_sample",
    "gbv": "traversal",
    "mtjd": "sample",
    "beam": "sample with temperature 0",
    "specinfer": "traversal",
    "modal": "relaxed",
    "threshold": "mtad with beam_width 1",
    "typical": "mmtad",
    "fly": "relaxed",
    "bild": "relaxed with draft_confidence",
}
"""Methods of earlier versions, and what to use instead."""


def summary() -> str:
    """Every method in one line of text, for the help of an option."""
    return " ".join(f"{name}: {method.help}" for name, method in METHODS.items())
