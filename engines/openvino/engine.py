"""OpenVINO engine: the exported ONNX graph on a CPU, with a paged cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE, computes_bfloat16, load_openvino, read_graph
from engines.pages import PagedPrefixCache
from engines.prefix_cache import PrefixCache
from mtad.errors import InvalidInput

COMPUTE = {"float32": "f32", "bfloat16": "bf16"}
"""OpenVINO's names of the types that it computes in."""

KV_CACHE = {**COMPUTE, "u8": "u8"}
"""OpenVINO's names of the types that it keeps its cache in; `u8` has a scale and a zero point per channel of a page's
keys, and per token of its values."""


class OpenVinoEngine(Engine):
    """A step is one run over the new tokens of all rows, without padding.

    Logits agree with ONNX Runtime's up to rounding, and a row's depend in their last bits on the other rows.

    Args:
        folder: engine folder that holds `model.onnx`.
        threads: of the CPU.
        compute: of arithmetic, one of `COMPUTE`; default: bfloat16 where the CPU has it.
        kv_cache: of the cache, one of `KV_CACHE`; default: as `compute`.

    Raises:
        InvalidInput: OpenVINO is not installed, or cannot run the graph.
    """

    capturable = False
    reproducible = False
    page_columns = PAGE

    def __init__(
        self, folder: Path, spec: EngineSpec, threads: int, compute: str | None = None, kv_cache: str | None = None
    ) -> None:
        self.spec = spec
        ov = self._ov = load_openvino()
        core = ov.Core()
        if compute is None:
            compute = "bfloat16" if computes_bfloat16() else "float32"
        kv_cache = kv_cache or compute
        for name, value, known in (("compute", compute, COMPUTE), ("kv_cache", kv_cache, KV_CACHE)):
            if value not in known:
                raise InvalidInput(name, value, f"give one of {', '.join(known)}")
        options = {
            "INFERENCE_PRECISION_HINT": COMPUTE[compute],
            "KV_CACHE_PRECISION": KV_CACHE[kv_cache],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }
        self._types = f"{compute}{f', cache {kv_cache}' if kv_cache != compute else ''}"
        compiled = core.compile_model(read_graph(folder / "model.onnx", spec), "CPU", options)
        self._request = compiled.create_infer_request()
        self._ports = [port for port in compiled.inputs if "_cache." in port.any_name]
        for port in self._ports[1::2]:  # of values; quantized keys have rows for scales and zero points besides
            if port.partial_shape[2].get_length() != PAGE:
                problem = (
                    f"its pages have {port.partial_shape[2]} columns, not {PAGE}: another version; give provider cpu"
                )
                raise InvalidInput("provider", "openvino", problem)
        self.limit(spec.rows * spec.capacity // PAGE)
        self.page_bytes = sum(cache.shape[1] for cache in self._caches)

    def limit(self, pages: int) -> None:
        self.pages, self.columns = pages, Columns(self.spec.rows, self.spec.capacity, pages)
        self._caches: list[np.ndarray] = []
        self._allocate()

    def _allocate(self) -> None:
        """Memory for all pages that there are; what the pages held before, they hold afterwards."""
        before, self._caches = self._caches, []
        for number, port in enumerate(self._ports):
            size = int(np.prod([dim.get_length() for dim in list(port.partial_shape)[1:]])) * port.element_type.size
            raw = np.zeros((len(self.columns.table.pages.users), size), np.uint8)
            if before:
                raw[: len(before[number])] = before[number]
            self._caches.append(raw)
        self._bind()

    def _bind(self) -> None:
        """Let steps use these caches."""
        ov = self._ov
        for port, raw in zip(self._ports, self._caches, strict=True):
            shape = [len(raw), *(dim.get_length() for dim in list(port.partial_shape)[1:])]
            kind = port.element_type.to_dtype() if port.element_type != ov.Type.bf16 else np.uint16
            tensor = ov.Tensor(raw.view(kind).reshape(shape), ov.Shape(shape), port.element_type)
            self._request.set_tensor(port.any_name, tensor)

    @property
    def name(self) -> str:
        return f"OpenVINO {self._ov.__version__.split('-')[0]}, {self._types}"

    @property
    def scratch(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def step(self, step: Step) -> Tensor:
        ov, request = self._ov, self._request
        run = self.columns.plan(
            step.tokens.numpy(),
            step.positions.numpy(),
            step.write_at.numpy(),
            step.mask.numpy()[:, 0],
            step.keep.numpy(),
            step.first_row,
        )
        for source, to in run.copies:
            for cache in self._caches:
                cache[to] = cache[source]
        longest = ov.Tensor(ov.Type.i32, ov.Shape([]))
        longest.data[...] = (run.past + np.diff(run.begins)).max()
        feeds = {
            "tokens": run.tokens,
            "positions": run.positions,
            "keep": run.keep,
            "past_lens": run.past,
            "subsequence_begins": run.begins,
            "block_indices": run.pages,
            "block_indices_begins": run.page_begins,
            "qq_bias": run.sees,
            "qq_bias_begins": run.sees_begins,
        }
        for name, value in feeds.items():
            request.set_tensor(name, ov.Tensor(value, shared_memory=True))
        request.set_tensor("max_context_len", longest)
        shape = step.tokens.shape[0], len(step.keep), self.spec.vocab_size
        logits = torch.empty(shape, dtype=self.spec.torch_dtype) if step.out is None else step.out
        request.set_tensor("logits", ov.Tensor(logits.view(1, -1, shape[2]).numpy(), shared_memory=True))
        request.infer()
        return logits

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        self.columns.move(source.numpy(), to.numpy())

    def copy_row(self, source: int, to: int, columns: int) -> None:
        self.columns.copy(source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        for page in self.columns.cut(row, start):
            for cache in self._caches:
                cache[page] = 0

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        missing = sum(self.columns.missing(row, start, end) for row, (start, end) in enumerate(spans))
        return missing <= self.columns.table.pages.free

    def free_row(self, row: int) -> None:
        self.columns.cut(row, 0)

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        """Whatever is run inside, the cache is afterwards what it was; inside, rows hold nothing and have pages."""
        kept = self.columns, self._caches
        self.columns, self._caches = Columns(self.spec.rows, self.spec.capacity), []
        self._allocate()
        try:
            yield
        finally:
            self.columns, self._caches = kept
            self._bind()

    def prefix_cache(self, tokens: int) -> PrefixCache:
        self.columns.table.pages.grow(tokens // PAGE)
        self._allocate()
        return PagedPrefixCache(self.columns.table, tokens, self.page_bytes, self._adopt)

    def _adopt(self, row: int, start: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        self.columns.adopt(row, start, pages, np.array(tokens), np.arange(start, start + len(tokens)))
