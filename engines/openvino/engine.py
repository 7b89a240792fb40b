"""OpenVINO engine: the exported ONNX graph on a CPU, with a paged cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE, computes_bfloat16, load_openvino, read_graph, transpose_weights
from engines.openvino.run import Run, padded
from engines.pages import PagedPrefixCache
from engines.prefix_cache import PrefixCache
from mtad.errors import InvalidInput

Array = NDArray[Any]

COMPUTE = {"float32": "f32", "bfloat16": "bf16"}
"""OpenVINO's names of the types that it computes in."""

KV_CACHE = {**COMPUTE, "u8": "u8"}
"""OpenVINO's names of the types that it keeps its cache in; `u8` has a scale and a zero point per channel of a page's
keys, and per token of its values."""


class OpenVinoEngine(Engine):
    """A step is one run over the new tokens of all rows, without padding.

    Prompts, whose logits nobody asks for, are computed by the next run, beside the tokens of its own step.
    Logits agree with ONNX Runtime's up to rounding, and a row's depend in their last bits on the other rows.

    Args:
        compute: of arithmetic, one of `COMPUTE`; default: bfloat16 where the CPU has it.
        kv_cache: of the cache, one of `KV_CACHE`; default: as `compute`.

    Raises:
        InvalidInput: OpenVINO is not installed or cannot run the graph, or the CPU has no such type.
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
        has_bfloat16 = computes_bfloat16()
        compute = compute or ("bfloat16" if has_bfloat16 else "float32")
        kv_cache = kv_cache or compute
        for name, value, known in (("compute", compute, COMPUTE), ("kv_cache", kv_cache, KV_CACHE)):
            if value not in known:
                raise InvalidInput(name, value, f"give one of {', '.join(known)}")
            if value == "bfloat16" and not has_bfloat16:
                raise InvalidInput(name, value, "this CPU has no instructions for it; give float32")
        options = {
            "INFERENCE_PRECISION_HINT": COMPUTE[compute],
            "KV_CACHE_PRECISION": KV_CACHE[kv_cache],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }
        self._types = f"{compute}{f', cache {kv_cache}' if kv_cache != compute else ''}"
        model = read_graph(folder / "model.onnx", spec)
        if threads > 1 and compute == "bfloat16":
            transpose_weights(model)
        compiled = core.compile_model(model, "CPU", options)
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
        self._caches: list[Array] = []
        self._pool = 0  # pages of the pool that the caches have memory for
        self._feeds: dict[str, Array] = {}
        self._logits: Tensor | None = None
        self._late: list[tuple[int, Sequence[int], Callable[[], None]]] = []
        self._allocate()

    def _allocate(self) -> None:
        """Memory for the pool's pages, one more for blanks, and those of beams. The pool's keep what they hold.

        One cache after the other, so that no two are there twice, and each is bound to what it holds.
        """
        count = self._blank + 1 + self.columns.beams.count
        for number, port in enumerate(self._ports):
            size = int(np.prod([dim.get_length() for dim in list(port.partial_shape)[1:]])) * port.element_type.size
            raw = np.zeros((count, size), np.uint8)
            if number < len(self._caches):
                held = min(self._pool, self._blank)
                raw[:held] = self._caches[number][:held]
                self._caches[number] = raw
            else:
                self._caches.append(raw)
            self._bind(number)
        self._pool = self._blank

    @property
    def _blank(self) -> int:
        """The page that blanks are written to, behind those of the pool."""
        return len(self.columns.table.pages.users)

    def _bind(self, number: int) -> None:
        """Let steps use a cache."""
        ov, port, raw = self._ov, self._ports[number], self._caches[number]
        shape = [len(raw), *(dim.get_length() for dim in list(port.partial_shape)[1:])]
        kind = port.element_type.to_dtype() if port.element_type != ov.Type.bf16 else np.uint16
        tensor = ov.Tensor(raw.view(kind).reshape(shape), ov.Shape(shape), port.element_type)
        self._request.set_tensor(port.any_name, tensor)

    @property
    def name(self) -> str:
        return f"OpenVINO {self._ov.__version__.split('-')[0]}, {self._types}"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def step(self, step: Step) -> Tensor:
        given = step.tokens, step.positions, step.write_at, step.mask
        tokens, positions, write_at, mask = (tensor.numpy() for tensor in given)
        shape = len(tokens), len(step.keep), self.spec.vocab_size
        if not shape[1] and self._is_postponed(positions, write_at, mask, step.first_row):
            for row, (own, at, start) in enumerate(zip(tokens, positions, write_at, strict=True), step.first_row):
                self._copy_pages(self.columns.postpone(own, at, int(start), row))
            return torch.empty(shape, dtype=self.spec.torch_dtype)
        run = self.columns.plan(tokens, positions, write_at, mask[:, 0], step.keep.numpy(), step.first_row)
        logits = torch.empty(shape, dtype=self.spec.torch_dtype) if step.out is None else step.out
        self._infer(run, logits)
        return logits

    def _is_postponed(self, positions: Array, write_at: Array, mask: Array, first_row: int) -> bool:
        """Whether a step without logits is a piece of prompts, which the next run computes beside its own tokens.

        A row that waits has had no run since its last piece, so nobody else decodes: that piece is run now.
        """
        rows = range(first_row, first_row + len(write_at))
        if not self.columns.waiting.isdisjoint(rows):
            self.finish()
        columns = np.arange(mask.shape[3])
        at = write_at[:, None] + np.arange(positions.shape[1])
        causal = np.array_equal(mask[:, 0], columns <= at[:, :, None])
        return causal and all(map(self.columns.follows, rows, write_at.tolist()))

    @property
    def postponed(self) -> int:
        return len(self.columns.waiting)

    def finish(self) -> None:
        if self.columns.waiting:
            run = self.columns.plan_waiting()
            self._infer(run, torch.empty(1, 0, self.spec.vocab_size, dtype=self.spec.torch_dtype))

    def _infer(self, run: Run, logits: Tensor) -> None:
        """Run, writing the kept logits to `logits`, [.., V] of one for each."""
        try:
            self._compute(run, logits)
        except BaseException:
            self.columns.take_back(run)
            raise
        late, self._late = self._late, []
        for row, stored, work in late:
            if self.columns.holds(row, stored):
                work()

    def _compute(self, run: Run, logits: Tensor) -> None:
        if min(map(len, self._caches)) <= self._blank + self.columns.beams.count:
            self._allocate()
        self._copy_pages(run.copies)
        run = padded(run, self._blank)
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
            "max_context_len": (run.past + np.diff(run.begins)).max(),
        }
        for name, value in feeds.items():
            held = self._feeds.get(name)
            if held is None or held.shape != value.shape:  # else it takes the memory that OpenVINO knows
                held = self._feeds[name] = np.empty_like(value)
                self._request.set_tensor(name, self._ov.Tensor(held, shared_memory=True))
            held[...] = value
        if logits is not self._logits:
            self._logits, flat = logits, logits.view(1, -1, logits.shape[-1]).numpy()
            self._request.set_tensor("logits", self._ov.Tensor(flat, shared_memory=True))
        self._request.infer()

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            source, to = map(list, zip(*copies, strict=True))
            for cache in self._caches:
                cache[to] = cache[source]

    def when_stored(self, row: int, tokens: Sequence[int], work: Callable[[], None]) -> None:
        """Do this once a row's columns from 0 on are these tokens': now, or behind the run that computes them."""
        if self.columns.holds(row, tokens):
            work()
        else:
            self._late.append((row, tokens, work))

    def move_columns(self, source: Tensor, to: Tensor) -> None:
        self._copy_pages(self.columns.move(source.numpy(), to.numpy()))

    def copy_row(self, source: int, to: int, columns: int) -> None:
        if source in self.columns.waiting:
            self.finish()
        self.columns.copy(source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        beams = self.columns.beams
        own = beams.pages(row, np.arange(beams.slots)).ravel()
        pages = [*self.columns.cut(row, start), *own[own < min(map(len, self._caches))].tolist()]
        for cache in self._caches:
            cache[pages] = 0

    def beam_pages(self, draft_len: int) -> int:
        return -(-(PAGE - 1 + draft_len) // PAGE)

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        return self.columns.fits(spans)

    def free_row(self, row: int) -> None:
        self.columns.cut(row, 0)

    @contextlib.contextmanager
    def kept(self, *columns: slice) -> Iterator[None]:
        """Whatever is run inside, the cache is afterwards what it was; inside, rows hold nothing and have pages."""
        kept = self.columns, self._caches, self._late
        self.columns, self._caches, self._late = Columns(self.spec.rows, self.spec.capacity), [], []
        self._allocate()
        try:
            yield
        finally:
            self.columns, self._caches, self._late = kept
            self._pool = self._blank
            for number in range(len(self._caches)):
                self._bind(number)

    def prefix_cache(self, tokens: int) -> PrefixCache:
        self.columns.table.pages.grow(tokens // PAGE)
        self.columns.beams.forget(slice(None))  # their pages have other numbers now
        self._allocate()
        return _KeptPrompts(self, tokens)

    def _adopt(self, row: int, start: int, pages: Sequence[int], tokens: Sequence[int]) -> None:
        self.columns.adopt(row, start, pages, np.array(tokens), np.arange(start, start + len(tokens)))


class _KeptPrompts(PagedPrefixCache):
    """Kept prefixes, which prompts join once they are computed."""

    def __init__(self, engine: OpenVinoEngine, tokens: int) -> None:
        super().__init__(engine.columns.table, tokens, engine.page_bytes, engine._adopt)
        self._when_stored = engine.when_stored

    def store(self, row: int, tokens: Sequence[int], salt: int = 0) -> None:
        self._when_stored(row, tokens, partial(super().store, row, tokens, salt))
