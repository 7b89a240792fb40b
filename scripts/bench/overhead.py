"""What of a block is spent outside the two engines' `step`: in the rules, the loop, the output.

Blocks of 1 and 8 rows are timed singly, methods interleaved; figures are medians. With `--vocabulary`, the pair is a
random one with so many tokens, and methods run under several filters: what a large vocabulary costs.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engines.base import Engine
from engines.placement import cores
from export.options import ExportOptions
from export.pair import export_pair
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from scripts.demo import dataset
from scripts.paths import ROOT
from scripts.results import Rows

ROUNDS, WARM_UP, BLOCKS = 4, 4, 15
"""In which all cases take turns; blocks of each turn that are not timed, and that are."""
DRAFT_LEN = 4  # automatic drafts would have other lengths after other prompts
FILTERS: dict[str, dict[str, Any]] = {
    ", top_k 10, top_p 0.9": {"top_k": 10, "top_p": 0.9},
    ", top_p 0.9": {"top_k": 0, "top_p": 0.9},
    ", min_p 0.05": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    ", no filter": {"top_k": 0, "top_p": 1.0},
}
LARGE = {
    "target": {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8},
    "auxiliary": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""97 and 35 million parameters at a vocabulary of 128,256."""
WORDS = 1000  # different tokens in the prompts of random pairs


def random_pair(size: int) -> Path:
    """An exported pair of random models with `size` tokens, made where it is not there yet.

    Logits have a standard deviation of 4, so that a distribution has the entropy of a language model's, about 4 nats.
    """
    folder = ROOT / "build" / f"vocabulary-{size}"
    if folder.exists():
        return folder
    common = {"vocab_size": size, "tie_word_embeddings": True, "max_position_embeddings": 1024, "eos_token_id": 0}
    with tempfile.TemporaryDirectory() as made:
        for role, sizes in LARGE.items():
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**sizes, **common))
            with torch.no_grad():
                model.model.norm.weight.fill_(4 / (model.config.initializer_range * sizes["hidden_size"] ** 0.5))
            model.save_pretrained(Path(made, role))
            words = Tokenizer(models.WordLevel({str(token): token for token in range(size)}, unk_token="0"))
            PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(Path(made, role))
        export_pair(folder, ExportOptions(f"{made}/target", f"{made}/auxiliary", rows=8))
    return folder


def time_steps(engine: Engine, took: list[float]) -> None:
    """Have an engine note the seconds of its steps."""
    plain: Callable[..., Any] = engine.step

    def step(*given: Any) -> Any:
        started = time.perf_counter()
        logits = plain(*given)
        took.append(time.perf_counter() - started)
        return logits

    vars(engine)["step"] = step


def run(options: Namespace) -> dict[str, Any]:
    """Time blocks of each method, at both numbers of rows, after prompts of each length."""
    lengths, filters = [100, 500], dict[str, dict[str, Any]]({"": {"top_k": 10, "top_p": 0.9}})
    if options.vocabulary is not None:
        lengths, filters = [100], FILTERS
        if options.vocabulary <= WORDS:
            raise InvalidInput("vocabulary", options.vocabulary, f"give more than {WORDS}")
    lengths, blocks = ([100], 1) if options.quick else (lengths, BLOCKS)
    torch.set_num_threads(1)
    pair = options.pair if options.vocabulary is None else random_pair(options.vocabulary)
    llm = LLM(pair, RuntimeConfig(provider=options.provider, threads=cores(), rows=8))
    text = [1 + number % WORDS for number in range(4000)]
    if options.vocabulary is None:
        text = llm.pair.tokenizer("\n".join(one.prompt for one in dataset.load("test", "code"))).input_ids
    took = list[float]()
    for engine in (llm.pair.target, llm.pair.auxiliary):
        time_steps(engine, took)
    cases = list(itertools.product(lengths, (1, 8), options.methods, filters))
    times: dict[Any, list[tuple[float, float]]] = {case: [] for case in cases}
    for case in tqdm(cases * ROUNDS, desc="overhead", unit="case"):
        length, rows, method, name = case
        longest = min(400, llm.loop.scheduler.room_for_tokens - length)
        params = DecodingParams(method, ignore_eos=True, max_tokens=longest, draft_confidence=0.0, **filters[name])
        for row in range(rows):
            llm.add(text[row * 500 : row * 500 + length], replace(params, seed=row, draft_len=DRAFT_LEN))
        while len(llm.loop.scheduler.running) < rows:  # turns that store prompts as well
            llm.step()
        for block in range(WARM_UP + blocks):
            took.clear()
            started = time.perf_counter()
            llm.step()
            if block >= WARM_UP:
                times[case].append((time.perf_counter() - started, sum(took)))
        llm.cancel(*llm.loop.scheduler.running)
        llm.step()  # which returns them
    found = []
    for (length, rows, method, name), taken in times.items():
        share = statistics.median(1 - inside / whole for whole, inside in taken)
        outside = statistics.median(1e3 * (whole - inside) for whole, inside in taken)
        found.append({"name": method + name, "prompt": length, "rows": rows, "share": share, "outside_ms": outside})
    return {"blocks": found}


def tables(figures: Mapping[str, Any]) -> dict[str, Rows]:
    """The share of a block that is spent outside the engines, and how long that is."""
    cells = {(row["name"], row["rows"], row["prompt"]): row for row in figures["blocks"]}
    cases = list(dict.fromkeys(place[1:] for place in cells))
    heading = [f"{rows} row{'s' * (rows > 1)}, prompts of {length}" for rows, length in cases]
    lines = [["outside the engines", *heading]]
    for name in dict.fromkeys(place[0] for place in cells):
        own = [cells[name, *case] for case in cases]
        lines.append([name, *(f"{one['share']:.0%}, {one['outside_ms']:.2f} ms" for one in own)])
    return {"overhead": lines}
