"""Checks of what the PyTorch engine computes: its attention, its logits, the texts of captured blocks, its pages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from engines.base import KV_PAGE, Engine
from engines.cache.paged import by_page, gathered
from engines.capture import waits_are_errors
from engines.pytorch.attention import require
from engines.pytorch.layer_ops import product_tile
from engines.pytorch.masked_attention import KERNEL, NAME
from export.verification.verify import ancestors_of, expect, random_tree, verify
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from scripts.gpu.models import FromHost, demo_model, demo_pair, engine_of, open_llm, random_model
from scripts.gpu.run import Run, Skip

PROMPTS = (
    "SELECT name FROM singer WHERE age > 20",
    "def largest(values):\n    ",
    "How many singers are older than twenty?",
    "import os\nimport sys\n\n",
    "-- the oldest singer\nSELECT",
    "class Stack:\n    def push(self, value):\n",
    "for index in range(10):\n",
)
CAPTURED = tuple(name for name, method in METHODS.items() if method.captured)
"""Methods whose blocks are captured."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of attention: largest difference of an output, in units of 1 plus its size."""
LOGITS = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.3}
"""Of an engine: largest difference of a logit, in standard deviations of the logits."""


STARTS, KV_HEADS, LENGTH = (900, 0, 333, 64), 2, 1024
"""Of the attention that is compared: columns of each row up to the root of its tree, KV heads, columns of the mask."""
ATTENTION = ((1, 64, 1), (2, 128, 5), (4, 128, 17), (8, 64, 65), (4, 96, 5), (2, 256, 17))
"""Query heads of a KV head, their size, and a step's tokens."""


def attention(run: Run) -> None:
    """The attention kernels against torch's attention in float64; a second run gives the same bits."""
    try:
        require("triton", torch.device(run.device), 1)
    except InvalidInput as refused:
        raise Skip(refused.problem) from None
    for group, size, steps in ATTENTION[:1] if run.quick else ATTENTION:
        for dtype, allowed in TOLERANCE.items():
            query, pool, more = random_step(STARTS[-1:] if run.quick else STARTS, group, size, steps)
            query, pool = query.to(run.device, dtype), pool.to(run.device, dtype)
            more = {name: value.to(run.device) for name, value in more.items()} | {"scaling": 0.3}
            ours, again = (AttentionInterface()[KERNEL](None, query, *pool, **more)[0] for _ in range(2))
            held = gathered(pool, more["page_table"]).nan_to_num(0.0).double()
            exact = AttentionInterface()[NAME](None, query.double(), *held, more["attention_mask"], more["scaling"])[0]
            name = f"{dtype}, {KV_HEADS} x {group} heads of {size}, {steps} tokens"
            run.compare(name, float(((ours - exact).abs() / (1 + exact.abs())).max()), allowed, "of 1 + size")
            run.compare(f"{name}, once more", float((ours != again).sum()), 0, "outputs differ")


def random_step(starts: Sequence[int], group: int, size: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries of random trees, keys and values in pages of any order, and what else attention is given.

    What lies behind the rows' ends is NaN.
    """
    rows, made = len(starts), torch.Generator().manual_seed(0)
    query = torch.randn(rows, steps, KV_HEADS * group, size, generator=made).transpose(1, 2)
    columns = torch.randn(2, KV_HEADS, rows, LENGTH, size, generator=made)
    mask = torch.zeros(rows, 1, steps, LENGTH, dtype=torch.bool)
    tree = ancestors_of(random_tree(rows, steps - 1, made))
    for row, start in enumerate(starts):
        mask[row, :, :, : start + 1] = True
        mask[row, 0, 1:, start + 1 : start + steps] = tree[row]
        columns[:, :, row, start + steps :] = torch.nan
    pool = torch.empty_like(ordered := columns.flatten(2, 3))
    pages = torch.randperm(rows * LENGTH // KV_PAGE, generator=made)
    by_page(pool)[:, :, pages] = by_page(ordered)
    more = {"attention_mask": mask, "write_at": torch.tensor(starts), "page_table": pages.int().view(rows, -1)}
    return query, pool, more


def engine(run: Run) -> None:
    """Logits of the engine with its fused layers against the model's own on the CPU in float32, in every type.

    The models are the demo target, and random ones with norms of queries and keys, soft caps, and a sliding window; and
    one layer of Llama-3.1-8B's sizes, of which a large GPU computes the products of few tokens by our kernel.
    """
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 0}
    models = {"Llama (demo)": demo_model("target")}
    if not run.quick:
        models["Qwen 3"] = random_model(Qwen3Config(**sizes, head_dim=128), 2, "cpu", torch.float32)
        capped = Gemma2Config(**sizes, head_dim=256, sliding_window=64, attn_logit_softcapping=20.0)
        models["Gemma 2"] = random_model(capped, 2, "cpu", torch.float32)
    for name, model in models.items():
        for dtype in TOLERANCE:
            copied = copy.deepcopy(model).to(torch.device(run.device), dtype)
            compare_logits(run, name, engine_of(copied, 3, 256), model)
    if run.on_gpu:
        sizes |= {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        model = random_model(LlamaConfig(**sizes | {"initializer_range": 0.02}), 1, "cpu", torch.float32)
        found = engine_of(copy.deepcopy(model).to(torch.device(run.device), torch.bfloat16), 1, 256)
        compare_logits(run, "Llama, wide", found, model)
        few, square = (torch.empty(n, 4096, dtype=torch.bfloat16, device=run.device) for n in (5, 4096))
        ours = product_tile(few, square, gated=False) is not None
        run.findings.send(("facts", {"products of few tokens by our kernel": ours}))


def compare_logits(run: Run, name: str, found: Engine, model: PreTrainedModel) -> None:
    """Compare an engine's logits with those of its model in float32 on the CPU, which gets its own attention."""
    model.set_attn_implementation("eager")
    expected = expect(model, found.spec)
    largest = verify(FromHost(found), expected, allowed=torch.inf) / float(expected[1].std())
    run.compare(f"{name}, {found.spec.dtype}", largest, LOGITS[found.spec.dtype], "standard deviations of a logit")


def blocks(run: Run) -> None:
    """Texts of the demo pair by captured blocks: those of the host form, in a batch those that a request gets alone.

    Batches are of one method each, and mixed ones of sizes that are padded. Then: greedy automatic drafts give the
    texts of `sample`, every block was captured, and a prompt is stored without a wait of the host. A method that the
    host decides gives the same texts whether its steps are graphs or not.
    """
    pair = demo_pair(run.device)
    captured, host = (open_llm(pair, kind) for kind in (True, False))
    tokens = 6 if run.quick else 64
    base = DecodingParams(top_k=10, top_p=0.9, draft_len=4, ignore_eos=True, max_tokens=tokens)
    methods, sizes = (CAPTURED[1:4], (3,)) if run.quick else (CAPTURED, (1, 3, 5, 7))
    batches = {method: [replace(base, method=method, seed=row) for row in range(3)] for method in methods}
    for size in sizes:
        mixed = [replace(base, method=methods[row % len(methods)], seed=9 + row) for row in range(size)]
        batches[f"mixed, {size} rows"] = mixed
    for name, params in batches.items():
        prompts = PROMPTS[: len(params)]
        together = captured.generate(prompts, params)
        run.compare_texts(f"{name}: captured = host", together, host.generate(prompts, params))
        alone = [captured.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
        run.compare_texts(f"{name}: in a batch = alone", together, alone)
    greedy = replace(base, method="sample", temperature=0.0)
    automatic = replace(greedy, method="speculative", draft_len="auto")
    run.compare_texts("greedy automatic = sample", *(captured.generate(PROMPTS, own) for own in (automatic, greedy)))
    if not run.on_gpu:
        return
    assert captured.blocks is not None
    run.compare("not captured", captured.blocks.unrecorded.total(), 0, f"blocks {dict(captured.blocks.unrecorded)}")
    with waits_are_errors():
        captured.loop.caches.target.prefill(0, [1, 2, 3], 0)
    of_host = [replace(base, method="traversal", seed=row) for row in range(3)]
    texts = [llm.generate(PROMPTS[:3], of_host) for llm in (captured, host)]
    run.compare_texts("a method of the host, steps as graphs = launched anew", *texts)


def pages(run: Run) -> None:
    """Texts of requests that need more pages than there are, so that some give way: each is what it gets alone."""
    requests, columns = (3, 192) if run.quick else (len(PROMPTS), 256)
    pair = demo_pair(run.device, requests, columns)
    params = DecodingParams(method="block", draft_len=4, ignore_eos=True, max_tokens=columns - 112, seed=1)
    llm = open_llm(pair, captured=True)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:requests]]
    caches: list[Any] = [own.cache for own in (pair.target, pair.auxiliary)]
    for cache in caches:
        cache.allocate_pages(requests * columns // KV_PAGE // 2)
    llm = open_llm(pair, captured=True)
    run.compare_texts("few pages = alone", llm.generate(PROMPTS[:requests], params), alone)
    run.compare("nobody gave way", float(llm.loop.totals.preemptions == 0), 0, "")
    run.compare("a row keeps pages", float(any(cache.table.owned.any() for cache in caches)), 0, "")
