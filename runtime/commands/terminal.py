"""Texts on a terminal: streamed, coloured by who wrote them, with the figures behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mtad.params import DecodingParams

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.prompts import Prompt
    from runtime.scheduler.request import Result
    from runtime.scheduler.statistics import Counts

DRAFTED, TARGET, FAINT, RESET = "\x1b[32m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
"""Colours of text that was drafted, of the target's own tokens, and of figures."""


@contextlib.contextmanager
def waiting(words: str) -> Iterator[None]:
    """Say on a terminal what takes long, as long as it does."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{FAINT}{words} ...{RESET}\r", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


async def answer(engine: AsyncLLM, prompt: Prompt, params: DecodingParams, colour: bool, fit: bool = False) -> str:
    """Stream one answer to standard output, and its figures to standard error; returns it without its thoughts."""
    stream, text = await engine.submit(prompt, params, fit=fit), ""
    starts: list[tuple[int, str]] = []  # the character at which each token begins, and its colour
    async for delta in stream:
        kinds = [DRAFTED] * delta.accepted + [TARGET] * (len(delta.token_ids) - delta.accepted)
        starts += zip(delta.offsets, kinds, strict=True)
        print(_coloured(delta.text, len(text), starts) if colour else delta.text, end="", flush=True)
        text += delta.text
    print(flush=True)
    result = await stream.result()
    print_figures([result], params, result.statistics)
    return result.answer


def _coloured(text: str, at: int, starts: list[tuple[int, str]]) -> str:
    shown, before = "", ""
    for index, character in enumerate(text, at):
        kind = next((kind for start, kind in reversed(starts) if start <= index), "")
        shown += character if kind == before else kind + character
        before = kind
    return shown + RESET if text else ""


def warn_of_unused(given: Iterable[str], params: DecodingParams) -> None:
    """Say on standard error which parameters of the command line have no effect with the method."""
    for name in given:
        if not (params.spec.uses(name) or params.thinking.spec.uses(name)):
            option = name.replace("_", "-")
            print(f"mtad: warning: --{option} has no effect with the method {params.method}", file=sys.stderr)


def print_figures(results: Sequence[Result], params: DecodingParams, spent: Counts) -> None:
    """Print what answers cost, with the seconds of `spent`, to standard error, and whether one of them was cut."""
    taken = [result.statistics for result in results]
    seconds = spent.draft_seconds + spent.score_seconds + spent.commit_seconds
    tokens, passes = sum(s.tokens for s in taken), sum(s.target_passes for s in taken)
    figures = f"{tokens / max(seconds, 1e-9):.0f} tokens/s, {tokens / max(passes, 1):.2f} tokens per pass"
    if cut := sum(result.finish_reason == "length" for result in results):
        where = "the end of their row" if params.max_tokens is None else f"--max-tokens {params.max_tokens}"
        figures += f"; {cut} of {len(results)} texts cut at {where}"
    print(f"{FAINT}{figures}{RESET}" if sys.stderr.isatty() else figures, file=sys.stderr, flush=True)
