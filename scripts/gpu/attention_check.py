"""Are the attention kernels right on this GPU, and how fast beside torch's attention? Not executed: needs a GPU.

    python -m scripts.gpu.attention_check [--device cuda]

First, steps of random trees over ragged caches are compared with float64. Then one layer's attention of steps like
those of Llama-3.1-8B is timed: each recorded as a CUDA graph, as the engine launches it, replayed with a cold L2 cache,
the median of the times between CUDA events; `mtad` is the hook's call of scaled_dot_product_attention with the step's
mask, over the columns the mask has. The last line is one JSON object.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from engines.base import KV_PAGE
from engines.cache.paged import gathered
from engines.pytorch.attention import attend_cached, require
from engines.pytorch.hook import KERNEL, NAME
from export.verification.verify import ancestors_of, random_tree
from mtad.errors import InvalidInput, VerificationFailed
from runtime.commands.entry import Parser, command

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of an output's difference, in units of 1 plus its size: some of what a weight and the output are rounded by."""
SCALE = 0.3
"""Of scores."""


@dataclass(frozen=True)
class Case:
    """Sizes of a step. `starts` are its rows' committed columns, up to the root of each row's tree.

    Attributes:
        starts: `write_at`, by row.
        kv_heads, group, head_dim: KV, query heads a KV head, size of a head.
        steps: S, the root and the nodes of its tree.
        length: L.
        dtype: of queries, keys and values.
        softcap, window: of scores.
        seed: of the values.
    """

    starts: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    steps: int = 5
    length: int = 64
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    window: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Arguments of `engines.pytorch.attention.attend_cached`; `pool` is [2, KV, pages x 64, D], keys and values."""

    case: Case
    query: Tensor
    pool: Tensor
    page_table: Tensor
    mask: Tensor
    write_at: Tensor
    positions: Tensor

    @property
    def cache(self) -> Tensor:
        """A view of the pool by rows, whose pages follow each other: [2, R, KV, C, D]."""
        pair, heads, _, dim = self.pool.shape
        return self.pool.view(pair, heads, len(self.page_table), -1, dim).transpose(1, 2)

    def attend(self) -> Tensor:
        """What the kernels give."""
        keys, values = self.pool
        more = (SCALE, self.case.softcap, self.case.window, self.positions)
        return attend_cached(self.query, keys, values, self.page_table, self.mask, self.write_at, *more)

    def reference(self) -> Tensor:
        """The same in float64, [R, S, H, D]; a query that sees nothing gets zeros."""
        seen, columns = self.mask, torch.arange(self.case.length, device=self.mask.device)
        if self.case.window is not None:
            seen = seen & (self.positions[:, None, :, None] - columns < self.case.window)
        held = gathered(self.pool, self.page_table)[..., : self.case.length, :]
        keys, values = held.double().repeat_interleave(self.case.group, 2)
        scores = SCALE * (self.query.double() @ keys.transpose(2, 3))
        if self.case.softcap is not None:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out: Tensor = weights @ values
        return out.transpose(1, 2)

    def difference(self) -> float:
        """Largest difference of the two, see `TOLERANCE`."""
        reference = self.reference()
        return float(((self.attend() - reference).abs() / (1 + reference.abs())).max())


def make(case: Case, device: str = "cpu", spare: int = 64) -> Inputs:
    """A random step; each row has `spare` columns more than the mask, in pages.

    Positions are those of tokens in a tree: a token's is its parent's and 1.
    """
    generator, random = torch.Generator().manual_seed(case.seed), torch.Generator(device).manual_seed(case.seed)
    rows, steps = len(case.starts), case.steps
    heads = case.kv_heads * case.group

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(case.dtype)

    # as a model gives them: heads of one token lie together
    query = values(rows, steps, heads, case.head_dim).transpose(1, 2)
    pages = (case.length + spare) // KV_PAGE
    pool = values(2, case.kv_heads, rows * pages * KV_PAGE, case.head_dim)
    page_table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    write_at = torch.tensor(case.starts)
    tree = ancestors_of(random_tree(rows, steps - 1, generator))
    shown = torch.zeros(rows, steps, case.length + steps, dtype=torch.bool)
    for row, start in enumerate(case.starts):
        shown[row, :, : start + 1] = True
        shown[row, 1:, start + 1 : start + steps] = tree[row]
    positions = write_at[:, None] + torch.nn.functional.pad(tree.sum(2), (1, 0))
    mask = shown[:, None, :, : case.length].contiguous()
    mask, write_at, positions = (x.to(device) for x in (mask, write_at, positions))
    write_at = torch.stack([write_at, write_at - 1], 1)[:, 0]  # as a draft's first step has it: a column of a table
    return Inputs(case, query, pool, page_table, mask, write_at, positions)


RAGGED = Case((900, 0, 333, 64), kv_heads=2, length=1024)
CHECKED = (
    *(
        replace(RAGGED, group=group, head_dim=dim, steps=steps, dtype=dtype)
        for dtype in TOLERANCE
        for group, dim, steps in ((1, 64, 1), (2, 128, 5), (4, 128, 17), (8, 64, 65), (4, 96, 5), (2, 256, 17))
    ),
    replace(RAGGED, steps=17, dtype=torch.bfloat16, window=100, softcap=3.0),
    replace(RAGGED, starts=(700,), group=4, head_dim=128, steps=256, dtype=torch.float16, window=100),
)
"""Steps that are compared with float64: every dtype, heads of several sizes, one token to a long chunk of a prompt."""
TIMED = (
    *(
        Case((start,) * rows, 8, 4, 128, steps, 4096, torch.bfloat16)
        for start in (500, 4000)
        for rows, steps in ((1, 1), (1, 17), (8, 1), (8, 5), (8, 17), (32, 5), (32, 17))
    ),
    Case((3500,), 8, 4, 128, 256, 4096, torch.bfloat16),
)
"""Steps of Llama-3.1-8B in bfloat16 that are timed: rows that fill an eighth of the mask, and nearly all of it."""


def check_attention(device: str, cases: Iterable[Case] = CHECKED) -> float:
    """Compare the kernels with float64; what lies behind the rows' ends is NaN.

    Returns:
        the largest difference, in units of `TOLERANCE`.

    Raises:
        VerificationFailed: a difference exceeds it, or a second run gives other bits.
        InvalidInput: the kernels cannot run on `device`.
    """
    require("triton", torch.device(device), 1)
    largest = 0.0
    for case in cases:
        inputs = make(case, device)
        for row, start in enumerate(case.starts):
            inputs.cache[:, row, :, start + case.steps :] = torch.nan
        out, clean = inputs.attend(), replace(inputs, pool=inputs.pool.nan_to_num(0.0)).reference()
        difference = float(((out - clean).abs() / (1 + clean.abs())).max()) / TOLERANCE[case.dtype]
        if not difference <= 1.0:  # NaN is not
            raise VerificationFailed(f"attention differs from float64 by {difference:.3g} of its tolerance: {case}")
        if not torch.equal(inputs.attend(), out):
            raise VerificationFailed(f"a second run of attention gives other bits: {case}")
        largest = max(largest, difference)
    return largest


def time_attention(device: str, cases: Sequence[Case] = TIMED) -> list[dict[str, Any]]:
    """Time the kernels and torch's attention.

    Returns:
        a record a case: medians in milliseconds, and gigabytes of keys and values that the kernels read a second.
    """
    records = []
    for case in cases:
        inputs = make(case, device)
        more: dict[str, Any] = {"scaling": SCALE, "write_at": inputs.write_at, "page_table": inputs.page_table}
        shown = inputs.cache[:, :, :, : case.length]
        calls = {NAME: (inputs.query, *shown, inputs.mask), KERNEL: (inputs.query, *inputs.pool, inputs.mask)}
        milliseconds = {
            name: _milliseconds(functools.partial(AttentionInterface()[name], None, *given, **more), device)
            for name, given in calls.items()
        }
        read = sum(start + case.steps for start in case.starts) * 2 * case.kv_heads * case.head_dim
        records.append(
            {
                "rows": len(case.starts),
                "steps": case.steps,
                "columns": case.starts[0] + case.steps,
                "mask": case.length,
                "sdpa_ms": milliseconds[NAME],
                "triton_ms": milliseconds[KERNEL],
                "triton_gb_s": read * case.dtype.itemsize / milliseconds[KERNEL] / 1e6,
            }
        )
    return records


def _milliseconds(work: Callable[[], Any], device: str, runs: int = 50) -> float:
    """Median time of `work` as a CUDA graph, with an L2 cache that holds none of its inputs."""
    cold = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    times = []
    for _ in range(runs):
        cold.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times)


@command
def main() -> None:
    parser = Parser(prog="scripts.gpu.attention_check", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", help="torch's name of the GPU (default %(default)s)")
    device = parser.parse_args().device
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise InvalidInput("--device", device, "no such GPU; the kernels are timed on one")
    difference = check_attention(device)
    records = time_attention(device)
    for record in records:
        print("  ".join(f"{key} {value:g}" for key, value in record.items()))
    name = torch.cuda.get_device_name(device)
    print(json.dumps({"device": name, "largest_difference": difference, "times": records}))


if __name__ == "__main__":
    main()
