"""Our metrics under vLLM's names as well, for the dashboards and load balancers that read those."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

NAMES = {
    "num_requests_running": "mtad_requests_running",
    "num_requests_waiting": "mtad_queue_length",
    "kv_cache_usage_perc": "mtad_kv_rows_used / mtad_kv_rows",
    "prompt_tokens": "mtad_prompt_tokens",
    "num_preemptions": "mtad_preemptions",
    "generation_tokens": "mtad_generated_tokens",
    "prefix_cache_queries": "mtad_prompt_tokens",
    "prefix_cache_hits": "mtad_reused_prompt_tokens",
    "request_success": "mtad_requests",
    "spec_decode_num_drafts": "mtad_drafted_blocks",
    "spec_decode_num_draft_tokens": "mtad_drafted_tokens",
    "spec_decode_num_accepted_tokens": "mtad_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "mtad_accepted_tokens_per_position",
    "time_to_first_token_seconds": "mtad_time_to_first_token_seconds",
    "inter_token_latency_seconds": "mtad_inter_block_seconds",
    "request_time_per_output_token_seconds": "mtad_time_per_token_seconds",
    "e2e_request_latency_seconds": "mtad_request_seconds",
    "request_queue_time_seconds": "mtad_queue_seconds",
    "request_prompt_tokens": "mtad_request_prompt_tokens",
    "request_generation_tokens": "mtad_request_generated_tokens",
}
"""vLLM's names behind `vllm:`, and ours; vLLM too takes the time between two outputs, whatever their tokens."""
LABELS = {"reason": "finished_reason"}
VALUES = {"cancelled": "abort"}


class WithVllmNames(Collector):
    """All metrics of a collector, and those of `NAMES` once more, labelled with the model's name."""

    def __init__(self, source: Collector, model: str) -> None:
        self._source, self._model = source, model

    def collect(self) -> Iterator[Metric]:
        known = {family.name: family for family in self._source.collect()}
        yield from known.values()
        for name, formula in NAMES.items():
            ours, _, whole = formula.partition(" / ")
            divisor = known[whole].samples[0].value if whole else 1
            family = Metric(f"vllm:{name}", f"vLLM's name of {formula}", known[ours].type)
            for sample in known[ours].samples:
                labels = {LABELS.get(key, key): VALUES.get(value, value) for key, value in sample.labels.items()}
                end = sample.name.removeprefix(ours)
                family.add_sample(family.name + end, {"model_name": self._model, **labels}, sample.value / divisor)
            yield family
