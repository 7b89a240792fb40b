"""The loop over two engines: independence of the batch, stop conditions, statistics."""

from __future__ import annotations

from dataclasses import replace

from runtime import LLM, DecodingParams

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many", "S", "where do they live? " * 4]
METHODS = ("sample", "speculative", "mtad", "mmtad")


def mixed() -> list[DecodingParams]:
    """Requests that differ in every parameter."""
    base = DecodingParams(max_tokens=24, ignore_eos=True)
    return [
        replace(base, method="mtad", seed=1),
        replace(base, method="sample", seed=2, temperature=0.7),
        replace(base, method="mmtad", seed=3, beam_width=3, draft_len=2, top_k=0, max_tokens=9),
        replace(base, method="speculative", seed=4, draft_len=5, top_p=1.0),
        replace(base, method="mtad", seed=5, beam_width=2, draft_len=1, accept_threshold=0.0),
        replace(base, method="mmtad", seed=6, temperature=0.0),
        replace(base, method="sample", seed=7, temperature=0.0, max_tokens=3),
        replace(base, method="mtad", seed=8, temperature=2.0, top_k=3, beam_width=8),
    ]


def test_a_requests_tokens_do_not_depend_on_the_batch(llm: LLM) -> None:
    requests = [(PROMPTS[i % len(PROMPTS)], p) for i, p in enumerate(mixed())]
    alone = [llm.generate(prompt, p)[0] for prompt, p in requests]
    together = llm.generate([prompt for prompt, _ in requests], [p for _, p in requests])
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    llm.loop.check_integrity()
