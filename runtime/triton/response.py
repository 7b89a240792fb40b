"""Deltas of a stream to output tensors: one response per delta, or one for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.output.stream import OutputDelta
from runtime.scheduler.request import Request
from runtime.triton.tensors import OUTPUTS, OutputSettings

_DTYPES = {"STRING": "object", "FP32": "float32"}
"""NumPy's names of Triton's types, where they are not the same in small letters."""

PADDING = -1
"""Token id after the end of the shorter ones of several choices; their log-probabilities there are 0."""


class TritonResponse:
    """The responses to one request.

    Args:
        echo: the prompt's text, where it is to stand before each choice.
    """

    def __init__(self, settings: OutputSettings, requests: Sequence[Request], echo: str) -> None:
        self._settings, self._requests = settings, requests
        self._before = [echo] * len(requests)  # what stands before a choice's next text
        self._sums = [0.0] * len(requests)
        self._dtypes = {tensor.name: _DTYPES.get(tensor.type, tensor.type.lower()) for tensor in OUTPUTS}

    def tensors(self, choices: Sequence[OutputDelta]) -> dict[str, NDArray[Any]]:
        settings, texts = self._settings, list[bytes]()
        for delta in choices:
            texts.append((self._before[delta.index] + delta.text).encode())
            self._before[delta.index] = ""
        indices = [delta.index for delta in choices]
        values: dict[str, list[Any]] = {"text_output": texts, "batch_index": [0], "sequence_index": indices}
        if settings.return_log_probs:
            for delta in choices:
                self._sums[delta.index] += sum(delta.logprobs)
            values["cum_log_probs"] = [self._sums[index] for index in indices]
            values["output_log_probs"] = _padded([delta.logprobs for delta in choices], 0.0)
        if settings.return_token_ids:
            values["output_ids"] = _padded([delta.token_ids for delta in choices], PADDING)
        if any(delta.top_logprobs for delta in choices):
            values["output_top_logprobs"] = [json.dumps(delta.top_logprobs).encode() for delta in choices]
        if settings.return_num_input_tokens:
            values["num_input_tokens"] = [len(self._requests[0].prompt)]
        if settings.return_num_output_tokens:
            values["num_output_tokens"] = [len(delta.token_ids) for delta in choices]
        ended = [delta.statistics for delta in choices if delta.statistics]
        if len(ended) == len(choices):
            values |= {
                "finish_reason": [str(delta.finish_reason).encode() for delta in choices],
                "acceptance_rate": [one.acceptance_rate for one in ended],
                "block_efficiency": [one.block_efficiency for one in ended],
                "total_accepted_draft_tokens": [one.accepted for one in ended],
                "total_draft_tokens": [one.drafted for one in ended],
                "output_seed": [self._requests[delta.index].seed for delta in choices],
            }
            scores = [self._requests[delta.index].prompt_scores for delta in choices]
            if any(scores):
                values["output_prompt_logprobs"] = [json.dumps([s._asdict() for s in some]).encode() for some in scores]
            if settings.return_perf_metrics:
                values["statistics"] = [json.dumps(one.to_dict()).encode() for one in ended]
        return {name: np.array([value], self._dtypes[name]) for name, value in values.items()}


def _padded(rows: Sequence[Sequence[Any]], padding: Any) -> list[list[Any]]:
    longest = max(map(len, rows))
    return [[*row, *[padding] * (longest - len(row))] for row in rows]
