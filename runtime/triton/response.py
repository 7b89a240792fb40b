"""Pieces of a stream to output tensors: one response a piece, or one for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.output.stream import Piece
from runtime.scheduler.statistics import Statistics
from runtime.triton.tensors import Convention, Settings

TYPES: Mapping[str, Any] = {
    "STRING": np.object_,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
}
"""NumPy's types of the outputs."""

PADDING = -1
"""Token id after the end of the shorter ones of several choices; their log-probabilities there are 0."""


class Answer:
    """The responses of one request.

    Args:
        convention: names and shapes.
        settings: what was asked for.
        prompts, seeds: of each choice.
        echo: the prompt's text, where it is to stand before each choice.
        arrived: `time.monotonic_ns()` when the request came.
    """

    def __init__(
        self,
        convention: Convention,
        settings: Settings,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        echo: str,
        arrived: int,
    ) -> None:
        self._convention, self._settings, self._arrived = convention, settings, arrived
        self._prompt_tokens, self._seeds = len(prompts[0]), seeds
        self._texts = [echo] * len(seeds)
        self._begun = [not echo] * len(seeds)
        self._sums = [0.0] * len(seeds)
        self._types = {tensor.name: tensor.type for tensor in convention.outputs}

    def part(self, piece: Piece) -> dict[str, NDArray[Any]]:
        """What a piece adds, as tensors."""
        self._texts[piece.index] += piece.text
        echoed, self._begun[piece.index] = not self._begun[piece.index], True
        whole = self._convention.accumulates or echoed
        return self._tensors([replace(piece, text=self._texts[piece.index] if whole else piece.text)])

    def whole(self, pieces: Sequence[Piece]) -> dict[str, NDArray[Any]]:
        """All pieces at once; choices in their order."""
        choices = []
        for index, echo in enumerate(self._texts):
            some = [piece for piece in pieces if piece.index == index]
            choices.append(
                replace(
                    some[-1],
                    text=echo + "".join(piece.text for piece in some),
                    token_ids=[token for piece in some for token in piece.token_ids],
                    logprobs=[value for piece in some for value in piece.logprobs],
                    top_logprobs=[top for piece in some for top in piece.top_logprobs],
                )
            )
        return self._tensors(choices)

    def _tensors(self, choices: Sequence[Piece]) -> dict[str, NDArray[Any]]:
        settings = self._settings
        values: dict[str, list[Any]] = {
            "text_output": [piece.text.encode() for piece in choices],
            "batch_index": [0],
            "sequence_index": [piece.index for piece in choices],
        }
        if settings.log_probs:
            for piece in choices:
                self._sums[piece.index] += sum(piece.logprobs)
            values[self._convention.log_probs] = [self._sums[piece.index] for piece in choices]
            values["output_log_probs"] = _padded([piece.logprobs for piece in choices], 0.0)
        if settings.token_ids:
            values["output_ids"] = _padded([piece.token_ids for piece in choices], PADDING)
        if any(piece.top_logprobs for piece in choices):
            values["output_top_logprobs"] = [json.dumps(piece.top_logprobs).encode() for piece in choices]
        if settings.input_count:
            values["num_input_tokens"] = [self._prompt_tokens]
        if settings.output_count:
            values["num_output_tokens"] = [len(piece.token_ids) for piece in choices]
        ended = [piece.statistics for piece in choices if piece.statistics]
        if len(ended) == len(choices):
            values |= self._ending(choices, ended)
        return {name: self._array(name, value) for name, value in values.items()}

    def _ending(self, choices: Sequence[Piece], ended: Sequence[Statistics]) -> dict[str, list[Any]]:
        """What is known when choices have ended."""
        values: dict[str, list[Any]] = {
            "finish_reason": [str(piece.finish_reason).encode() for piece in choices],
            "acceptance_rate": [one.acceptance_rate for one in ended],
            "block_efficiency": [one.block_efficiency for one in ended],
            "total_accepted_draft_tokens": [one.accepted for one in ended],
            "total_draft_tokens": [one.drafted for one in ended],
            "output_seed": [self._seeds[piece.index] for piece in choices],
        }
        if self._settings.perf_metrics:
            values["statistics"] = [json.dumps(one.to_dict()).encode() for one in ended]
            values["arrival_time_ns"] = [self._arrived]
            values["first_scheduled_time_ns"] = self._at(min, [one.queue_seconds for one in ended])
            values["first_token_time_ns"] = self._at(min, [one.first_token_seconds or 0.0 for one in ended])
            values["last_token_time_ns"] = self._at(max, [one.total_seconds or 0.0 for one in ended])
        return values

    def _at(self, choose: Callable[[list[float]], float], seconds: list[float]) -> list[int]:
        return [self._arrived + round(choose(seconds) * 1e9)]

    def _array(self, name: str, value: list[Any]) -> NDArray[Any]:
        array: NDArray[Any] = np.array(value, TYPES[self._types[name]])
        return array[None] if self._convention.batched else array


def _padded(rows: Sequence[Sequence[Any]], padding: Any) -> list[list[Any]]:
    longest = max(map(len, rows))
    return [[*row, *[padding] * (longest - len(row))] for row in rows]
