"""Stages that time: memory, steps, blocks, and the same tokens by Hugging Face."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.graphs.runner import bucket_length
from engines.pytorch.engine import TorchEngine
from mtad.params import DecodingParams
from runtime import LLM
from scripts.gpu.correct import causal
from scripts.gpu.models import (
    NODES,
    MadePair,
    bytes_read,
    cache_bytes,
    engine_of,
    open_llm,
    pair_of,
    random_model,
    shape,
    word_tokenizer,
)
from scripts.gpu.report import Found
from scripts.gpu.setup import Setup
from scripts.gpu.timing import Mark, Timer

METHODS = ("sample", "speculative", "mtad", "mmtad")
PHASES = ("draft", "score", "accept", "commit")


def bandwidth(setup: Setup) -> float:
    """Bytes read and written a second by a copy on the device; the median of 20."""
    source = torch.ones(setup.sizes.copied, dtype=torch.uint8, device=setup.device)
    to = torch.empty_like(source)
    median = setup.timer.measure(lambda: to.copy_(source), 20).median
    return 2 * setup.sizes.copied / (median / 1e3)


def memory(setup: Setup, found: Found) -> None:
    """What a copy moves a second: the yardstick of the floors."""
    found.row(what="copy, bytes read and written", terabytes_s=bandwidth(setup) / 1e12)


def steps(name: str, setup: Setup, found: Found) -> None:
    """A step's time and its floor: weights and keys and values read once, at the speed of a copy.

    Steps of 1 and of 5 tokens a row (decoding; scoring of four drafted tokens), launched and as CUDA graphs.
    """
    sizes, speed = setup.sizes, bandwidth(setup)
    model = random_model(shape(name), setup.device, setup.dtype)
    engine = engine_of(model, max(sizes.rows), max(sizes.contexts) + 64, scratch=0)
    found.note(parameters=sum(p.numel() for p in model.parameters()), bytes_read=bytes_read(model))
    for context, rows, tokens in itertools.product(sizes.contexts, sizes.rows, (1, 5)):
        work = partial(engine.step, random_step(engine, rows, tokens, context, setup.device))
        floor = (bytes_read(model) + cache_bytes(engine, rows, context)) / speed * 1e3
        off = setup.timer.measure(work, 20, seconds=sizes.seconds / 4)
        recorder = setup.recorder()
        with recorder.ordered():
            on = setup.timer.measure(recorder.record(partial(_run, work)), 20, seconds=sizes.seconds / 4)
        found.row(
            rows=rows,
            context=context,
            tokens=tokens,
            floor_ms=floor,
            graph_ms=on.median,
            of_floor=on.median / floor,
            quartiles_ms=f"{on.low:.3f} .. {on.high:.3f}",
            launched_ms=off.median,
            launched_quartiles_ms=f"{off.low:.3f} .. {off.high:.3f}",
        )


def _run(work: Callable[[], Tensor]) -> None:
    work()


def random_step(engine: TorchEngine, rows: int, tokens: int, context: int, device: str) -> Any:
    """A step behind `context` columns, whose mask has the length that a recorded block's has."""
    ids = torch.randint(engine.spec.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(context))
    step = causal(ids, [context - tokens] * rows, device)
    length = bucket_length(step.mask.shape[3], engine.spec.capacity)
    return replace(step, mask=torch.nn.functional.pad(step.mask, (0, length - step.mask.shape[3])))


class Phases:
    """Marks around the parts of a block, which graphs record with it.

    Args:
        llm: whose blocks; marks are set until `close`.
        timer: of its device.
    """

    def __init__(self, llm: LLM, timer: Timer) -> None:
        self._roles = {"auxiliary": llm._auxiliary, "target": llm._target}
        self._marks: dict[str, tuple[Mark, Mark]] = {}
        self._wrapped: list[tuple[Any, str]] = []
        calls = (("auxiliary", "draft"), ("target", "score"), ("target", "accept"))
        for role, call in (*calls, ("target", "commit"), ("auxiliary", "commit")):
            marks = self._marks[f"{call}, {role}"] = timer.mark(), timer.mark()
            self._wrap(self._roles[role], call, marks)

    def _wrap(self, role: Any, call: str, marks: tuple[Mark, Mark]) -> None:
        plain = getattr(role, call)

        def marked(*args: Any) -> Any:
            marks[0].record()
            result = plain(*args)
            marks[1].record()
            return result

        vars(role)[call] = marked
        self._wrapped.append((role, call))

    def seconds(self, drafts: bool) -> dict[str, float]:
        """Seconds of each part of the block before; of one that does not draft, of scoring and accepting alone."""
        ran = {"score", "accept"} | ({"draft", "commit"} if drafts else set())
        parts = dict.fromkeys(PHASES, 0.0)
        for name, (begin, end) in self._marks.items():
            phase = name.split(",")[0]
            if phase in ran:
                parts[phase] += begin.until(end)
        return parts

    def close(self) -> None:
        """Set no more marks."""
        for role, call in self._wrapped:
            vars(role).pop(call)


def blocks(names: tuple[str, str], setup: Setup, found: Found) -> None:
    """A block of random weights, as a graph and launched: its draft, its score, what accepts, what is kept, the rest.

    `block_ms` is one turn of the loop on the host's clock; the parts are the device's, between marks that the graph
    holds; `rest_ms` is what lies between: the batch, its copies, the host's bookkeeping, waiting.
    """
    sizes = setup.sizes
    rows = max(sizes.rows)
    models = [random_model(shape(name), setup.device, setup.dtype, seed) for seed, name in enumerate(names)]
    columns = sizes.prompt + 64 * (8 if setup.on_gpu else 2)
    engines = [engine_of(model, rows, columns) for model in models]
    pair = pair_of(engines, word_tokenizer(models[0].config.vocab_size))
    for graphs in (True, False):
        llm = open_llm(pair, graphs)
        phases = Phases(llm, setup.timer)
        for method, count in itertools.product(METHODS, sizes.rows):
            params = DecodingParams(
                speculation="fixed", method=method, ignore_eos=True, max_tokens=columns - sizes.prompt - NODES // 2
            )
            draw = torch.Generator().manual_seed(5)
            for row in range(count):
                prompt = torch.randint(pair.vocab_size, (sizes.prompt,), generator=draw).tolist()
                llm.add(prompt, replace(params, seed=row))
            while len(llm.loop.scheduler.running) < count:
                llm.step()
            taken: list[dict[str, float]] = []
            for block in range(8 if sizes.few else 14):
                whole = setup.timer.whole(llm.step)
                if block >= 4:  # the first ones record and warm up
                    taken.append({"block": whole, **phases.seconds(method != "sample")})
            llm.cancel(*llm.loop.scheduler.running)
            middle = {key: 1e3 * statistics.median(one[key] for one in taken) for key in taken[0]}
            whole, parts = middle.pop("block"), {f"{key}_ms": value for key, value in middle.items()}
            low, _, high = statistics.quantiles([1e3 * one["block"] for one in taken], n=4)
            found.row(
                method=method,
                rows=count,
                graph=graphs,
                block_ms=whole,
                quartiles_ms=f"{low:.3f} .. {high:.3f}",
                **parts,
                rest_ms=whole - sum(parts.values()),
            )
        phases.close()


def baselines(name: str, setup: Setup, found: Found) -> None:
    """Greedy tokens of one prompt by this package and by Hugging Face's `generate`, prompt included in the time.

    A made pair (`models.MadePair`), so that drafts are accepted. Hugging Face: its default cache; a static one, which
    it compiles on a GPU; drafting with `assistant_model`.
    """
    sizes = setup.sizes
    made = made_pair(name, setup, found)
    tokens, length = sizes.tokens, sizes.prompt
    prompt = torch.randint(made.target.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(9))
    engines = [engine_of(model, 1, length + tokens + NODES) for model in (made.target, made.auxiliary)]
    llm = open_llm(pair_of(engines, word_tokenizer(made.target.config.vocab_size)), graphs=True)
    greedy = DecodingParams(speculation="fixed", temperature=0.0, ignore_eos=True, max_tokens=tokens, seed=1)
    ids = prompt[0].tolist()
    first = llm.generate([ids], replace(greedy, method="sample"))[0].token_ids

    def ours(method: str) -> list[int]:
        return list(llm.generate([ids], replace(greedy, method=method))[0].token_ids)

    runs: dict[str, Callable[[], list[int]]] = {f"mtad, {m}": partial(ours, m) for m in METHODS[:3]}
    _timed(runs, list(first), setup, found)
    for model in (made.target, made.auxiliary):
        model.set_attn_implementation("sdpa")
    given = prompt.to(setup.device)
    common = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(given), "pad_token_id": 0}

    def theirs(**options: Any) -> list[int]:
        out: Tensor = made.target.generate(given, **common, **options)
        return list(out[0, length:].tolist())

    others = {"generate": {}, "generate, static, compiled": {"cache_implementation": "static"}}
    more: dict[str, Callable[[], list[int]]] = {label: partial(theirs, **options) for label, options in others.items()}
    more["generate, assistant_model"] = partial(theirs, assistant_model=made.auxiliary)
    _timed(more, list(first), setup, found)


def _timed(runs: dict[str, Callable[[], list[int]]], first: list[int], setup: Setup, found: Found) -> None:
    for label, run in runs.items():
        try:
            warm = setup.timer.whole(run)
            texts: list[list[int]] = []
            times = [setup.timer.whole(partial(_kept, run, texts)) for _ in range(3)]
        except Exception as error:  # one system that does not run leaves the others their times
            found.row(system=label, failed=f"{type(error).__name__}: {error}"[:200])
            continue
        same = next((at for at, (a, b) in enumerate(zip(texts[0], first, strict=False)) if a != b), len(first))
        found.row(
            system=label,
            tokens_s=len(texts[0]) / statistics.median(times),
            spread=f"{len(texts[0]) / max(times):.4g} .. {len(texts[0]) / min(times):.4g}",
            first_run_s=warm,
            same_tokens=f"{same} of {len(first)}",
        )


def _kept(run: Callable[[], list[int]], texts: list[list[int]]) -> None:
    texts.append(run())


def made_pair(name: str, setup: Setup, found: Found) -> MadePair:
    """A made pair whose drafts are accepted at about 0.7: `later` is halved until they are, ten times at most."""
    sizes = setup.sizes
    made = MadePair(name, sizes.kept, setup.device, setup.dtype)
    engines = [engine_of(model, 4, sizes.prompt + 64 + NODES) for model in (made.target, made.auxiliary)]
    llm = open_llm(pair_of(engines, word_tokenizer(made.target.config.vocab_size)), graphs=False)
    draw = torch.Generator().manual_seed(11)
    prompts = torch.randint(made.target.config.vocab_size, (4, sizes.prompt), generator=draw).tolist()
    params = DecodingParams(
        speculation="fixed", method="speculative", ignore_eos=True, max_tokens=min(32, 4 * sizes.tokens), seed=2
    )
    for _ in range(10):
        results = llm.generate(prompts, params)
        rate = statistics.mean(result.statistics.acceptance_rate for result in results)
        if rate >= 0.7:
            break
        made.scale(0.5)
    found.note(
        pair=f"{name} of random weights; auxiliary: its first {made.layers} layers, embeddings, norm and head",
        later_layers_scaled_by=made.later,
        acceptance_rate=rate,
        target_bytes_read=bytes_read(made.target),
        auxiliary_bytes_read=bytes_read(made.auxiliary),
    )
    return made
