"""`RuntimeConfig`: every option of a running pair, once; torch as a pair needs it."""

from __future__ import annotations

import inspect
import math
import os
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args, get_type_hints

from mtad import methods
from mtad.errors import InvalidInput

if TYPE_CHECKING:
    from engines.placement import Placement

AT_OPENING = ("device", "threads", "provider", "compute", "kv_cache", "attention", "tensor_parallel", "rows", "memory")
"""Options that decide how the engines are opened; they cannot change for an open pair."""


def check_least(options: object, **least: float) -> None:
    """Refuse numbers below the least value of their names.

    Raises:
        InvalidInput: a value is too small, infinite or no number. None passes where it is the default.
    """
    for name, low in least.items():
        value = getattr(options, name)
        if value is None and getattr(type(options), name, None) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(name, value, f"give a finite number, at least {low:g}")
        if value < low:
            raise InvalidInput(name, value, f"give at least {low:g}")


@dataclass(frozen=True)
class RuntimeConfig:
    """How a pair of engines runs: the options of the commands, the servers, Triton and the replicas.

    Attributes:
        device: Where both engines run: cpu, cuda, or cuda:N for GPU number N.
        threads: CPU threads of each engine; by default, all cores.
        provider: What runs ONNX engines: openvino on a CPU, or ONNX Runtime's execution provider cpu or cuda. With
            auto: cuda on a GPU; on a CPU openvino, where it is installed and knows the models, if the CPU computes in
            bfloat16, or if the target is quantized and a timing finds it faster; else cpu.
        compute: Type that OpenVINO computes in: float32 or bfloat16; by default, bfloat16 where the CPU has
            instructions for it and the weights are not quantized.
        kv_cache: Type that OpenVINO keeps its cache in: u8, or the one it computes in, which is the default.
        attention: Attention implementation of PyTorch engines: sdpa, or triton on a GPU; by default, that of the
            device.
        graphs: Capture whole blocks as CUDA graphs, on a GPU; else the host decides what is drafted and accepted.
        tensor_parallel: Number of ranks that the target is sharded over: one GPU each, or one process each on a CPU.
            torchrun starts them.
        rows: Requests decoded at once; by default, the number that the pair was exported with.
        memory: A memory limit in bytes or as 4GiB: as many rows as fit beside the weights, at most rows where that is
            given too; or on OpenVINO and PyTorch, as many pages of the cache, which rows share.
        max_draft_len: Longest draft that a request may ask for, in tokens, and that automatic ones may have. Each row
            reserves max_draft_len times max_beam_width KV columns.
        max_beam_width: Most beams that a request may ask for.
        max_prefill_tokens: Chunked prefill: each step prefills at most this many prompt tokens, which bounds how long a
            new prompt delays running requests.
        prefix_tokens: Prompt tokens whose keys and values are kept for later prompts with the same prefix, rounded down
            to whole pages of 64; 0 keeps none. By default, as many as two rows hold.
        lookup_tokens: Tokens of ended requests' texts, per cache_salt, that later requests look up drafts in as well,
            where no draft changes a law: by a lossless method without a seed, or at temperature 0. 0 keeps none.
        max_waiting: Requests that may wait for a row.
    """

    device: str = "cpu"
    threads: int | None = None
    provider: str = "auto"
    compute: str | None = None
    kv_cache: str | None = None
    attention: str | None = None
    graphs: bool = True
    tensor_parallel: int = 1
    rows: int | None = None
    memory: int | str | None = None
    max_draft_len: int = 16
    max_beam_width: int = 4
    max_prefill_tokens: int = 256
    prefix_tokens: int | None = None
    lookup_tokens: int = 0
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name]) or (hints[field.name],)
            if type(value) not in allowed:
                words = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
                raise InvalidInput(field.name, value, f"give {words}")
        check_least(self, threads=1, tensor_parallel=1, rows=1, max_draft_len=1, max_beam_width=1, max_prefill_tokens=1)
        check_least(self, prefix_tokens=0, lookup_tokens=0, max_waiting=1)

    @property
    def nodes(self) -> int:
        return self.max_draft_len * self.max_beam_width

    @property
    def placement(self) -> Placement:
        """Where the engines run; the provider is None where it is still to be chosen.

        Raises:
            InvalidInput: there is no such device.
        """
        from engines.placement import Placement, cores

        threads = cores() if self.threads is None else self.threads
        provider = None if self.provider == "auto" else self.provider
        return Placement(self.device, threads, provider, self.attention, self.compute, self.kv_cache)

    def prefix_columns(self, capacity: int) -> int:
        """Prompt tokens kept for reuse, of engines with `capacity` columns per row."""
        return 2 * capacity if self.prefix_tokens is None else self.prefix_tokens


def describe(config: type) -> dict[str, str]:
    """What a class's docstring says about each of its attributes, by name; of methods, what their table says."""
    section = re.split(r"^(?:Attributes|Args):\n", inspect.getdoc(config) or "", flags=re.M)[1]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.M)[0]
    found = {}
    for entry in re.split(r"^ {4}(?=\S)", section, flags=re.M)[1:]:
        names, _, text = entry.partition(":")
        found.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    if "method" in found:
        found["method"] += f" {methods.summary()}"
    return found


def use_torch() -> None:
    """Import torch for a process that serves a pair: on one thread, as tokenizers are; the cores are the engines'."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from engines.quiet import quiet_transformers

    quiet_transformers()
    torch.set_num_threads(1)
