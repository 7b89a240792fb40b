"""Deltas of a stream to OpenAI's objects: whole answers and chunks, both kinds of request."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from typing import Any

from pydantic_core import to_json

from runtime.output.stream import OutputDelta
from runtime.scheduler.request import Request
from runtime.scheduler.statistics import Counts, Statistics
from runtime.server.calling import Calling, CallReader
from runtime.server.logprobs import Echo, TokenNames
from runtime.server.schema import Body, CompletionRequest


def summed(statistics: Collection[Statistics]) -> Counts:
    """Tokens, drafts and passes of several choices together."""
    names = "tokens", "target_passes", "thinking_tokens", "thinking_passes", "drafted", "accepted"
    return Counts(**{name: sum(getattr(one, name) for one in statistics) for name in names})


class OpenAIResponse:
    """The objects of one request.

    Args:
        echoes: what to repeat before each prompt's choices, or none.
        names: of tokens, prepared if the request wants log-probabilities.
        calling: how answers call functions; None if they do not.

    Attributes:
        statistics: of the choices that have ended, by index.
        renamed: what the fields that errors name are called in the request.
        has_logprobs: whether a whole answer takes long to write down.
    """

    def __init__(
        self,
        body: Body,
        requests: Sequence[Request],
        n: int,
        echoes: list[Echo],
        names: TokenNames,
        fingerprint: str,
        calling: Calling | None = None,
    ) -> None:
        self._body, self._requests, self._n, self._echoes, self._names = body, requests, n, echoes, names
        self._chat, self._logprobs_wanted = not isinstance(body, CompletionRequest), body.alternatives is not None
        self._prompt_logprobs: int | None = getattr(body, "prompt_logprobs", None)
        self.has_logprobs = self._logprobs_wanted or self._prompt_logprobs is not None
        self._begun: set[int] = set()
        self._readers = [CallReader(calling) for _ in requests] if calling else []
        self.renamed = body.renamed | ({"grammar": "tools"} if calling else {})
        self.statistics: dict[int, Statistics] = {}
        kind = "chat.completion" if self._chat else "text_completion"
        # the id is no secret: asking the system for randomness would hand the interpreter's lock to the engine's thread
        self._frame = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{random.getrandbits(128):032x}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }
        self._chunk_frame = {**self._frame, "object": f"{kind}.chunk" if self._chat else kind}
        options = body.stream_options
        self._always = bool(options and options.continuous_usage_stats)
        self._usage_wanted = self._always or bool(options and options.include_usage)
        self._tokens = 0

    @property
    def lossless(self) -> bool:
        """Whether the texts are distributed as the target's own samples."""
        return self._requests[0].params.lossless

    def event(self, delta: OutputDelta) -> bytes:
        """A server-sent event for a delta; each delta of a stream is given once, in order."""
        self._tokens += len(delta.token_ids)
        usage = {"usage": self._counts(self._tokens) if self._always else None} if self._usage_wanted else {}
        return sent_event({**self._chunk_frame, "choices": [self._choice(delta, chunk=True)], **usage})

    def last_events(self) -> bytes:
        """What ends a stream: the chunk that has the usage and no choice, if it is wanted, and OpenAI's mark."""
        usage = sent_event({**self._chunk_frame, "choices": [], "usage": self._usage()}) if self._usage_wanted else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self, choices: Sequence[OutputDelta]) -> bytes:
        """The answer at once, as JSON, when all choices have ended; seconds for many with log-probabilities."""
        shown = [self._choice(one, chunk=False) for one in choices]
        values = {**self._frame, "choices": shown, "usage": self._usage()}
        if self._chat and self._prompt_logprobs is not None:
            values["prompt_logprobs"] = self._names.prompt(self._requests[0], self._prompt_logprobs)
        return to_json(values)

    def long(self, delta: OutputDelta) -> bool:
        """Whether a delta takes long to write down, so that others should not wait for it."""
        return bool(delta.index not in self._begun and self._requests[delta.index].prompt_scores)

    def _choice(self, delta: OutputDelta, chunk: bool) -> dict[str, Any]:
        index, request = delta.index, self._requests[delta.index]
        first = index not in self._begun
        self._begun.add(index)
        echo = self._echoes[index // self._n] if self._echoes else None
        text = echo.text + delta.text if first and echo else delta.text
        logprobs = self._logprobs(delta, echo, request if first else None) if self._logprobs_wanted else None
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = request.prompt
        if not self._chat:
            choice["text"] = text
            if self._prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._names.prompt(request, self._prompt_logprobs)
        else:
            answer = text if request.thoughts is None else delta.answer
            said: dict[str, Any] = {"content": answer}
            if self._readers:
                said = self._said(index, answer, delta.finish_reason is not None, chunk)
                reader = self._readers[index]
                if reader.calls and not reader.inside and delta.finish_reason == "stop":
                    choice["finish_reason"] = "tool_calls"
            if delta.reasoning:
                said = {"reasoning_content": delta.reasoning, **said}
            if chunk:
                choice["delta"] = {"role": "assistant", **said} if first else said
            else:
                choice["message"] = {"role": "assistant", **said, "refusal": None}
        extension: dict[str, Any] = {}
        if chunk:
            extension = {"drafted": delta.drafted, "accepted": delta.accepted, "tokens": len(delta.token_ids)}
        if request.params.draft_details:
            extension["details"] = self._names.details(delta)
        if delta.statistics:
            self.statistics[index] = delta.statistics
            extension |= {"seed": request.seed, "statistics": delta.statistics.to_dict()}
        return choice | {"mtad": extension}

    def _said(self, index: int, text: str, ended: bool, chunk: bool) -> dict[str, Any]:
        content, calls = self._readers[index].read(text, ended)
        if not calls:
            return {"content": content} if content or not chunk or (ended and not self._readers[index].calls) else {}
        if not chunk:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        return {"content": content or None, "tool_calls": calls}

    def _logprobs(self, delta: OutputDelta, echo: Echo | None, prompt: Request | None) -> dict[str, Any]:
        if self._chat:
            return self._names.chat(delta)
        return self._names.completion(delta, self._body.alternatives or 0, echo, prompt)

    def _usage(self) -> dict[str, Any]:
        total = summed(self.statistics.values())
        reused = sum(one.reused_tokens for index, one in self.statistics.items() if index % self._n == 0)
        return {
            **self._counts(total.tokens),
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens_details": {"reasoning_tokens": total.thinking_tokens},
            "mtad": {
                "lossless": self.lossless,
                "acceptance_rate": total.acceptance_rate,
                "block_efficiency": total.block_efficiency,
                "drafted_tokens": total.drafted,
                "accepted_tokens": total.accepted,
                "target_passes": total.target_passes,
                "thinking_tokens": total.thinking_tokens,
                "thinking_passes": total.thinking_passes,
            },
        }

    def _counts(self, tokens: int) -> dict[str, int]:
        prompt = sum(len(request.prompt) for request in self._requests[:: self._n])
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def sent_event(value: dict[str, Any]) -> bytes:
    """A server-sent event that carries a JSON object."""
    return b"data: %b\n\n" % to_json(value)
