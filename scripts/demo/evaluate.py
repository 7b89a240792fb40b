"""Measure a demo pair with plain Hugging Face code: perplexity, accuracy, and what speculative sampling gains.

    python -m scripts.demo.evaluate --split development
    python -m scripts.demo.evaluate --split test
    python -m scripts.demo.evaluate --split ambiguous

Nothing of the toolkit is used, so the figures are an independent check of it. "Sampled" is temperature 1, top-k 10,
top-p 0.9 everywhere. Block efficiency is tokens per target pass of token-wise speculative sampling with chains of 4
auxiliary tokens; tokens after the end token are not counted. "Far" is the perplexity of tokens 512 to 2047 of held-out
source files, which only a model that uses its whole context keeps low. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from runtime.commands.entry import Parser, command
from scripts.demo import corpus
from scripts.demo.dataset import SIZES, Example, load, matches
from scripts.demo.sampling import Sampling
from scripts.paths import DEMO

PAIR = DEMO / "pair"
NEW_TOKENS = {"sql": 96, "code": 128, "json": 96}


@torch.no_grad()
def perplexity(model: PreTrainedModel, words: PreTrainedTokenizerBase, examples: list[Example]) -> float:
    """Perplexity of the true answers with their end tokens, per token, under the unprocessed model."""
    total, tokens = 0.0, 0
    for e in examples:
        prompt, answer = words([e.prompt, e.answer])["input_ids"]
        answer.append(words.eos_token_id)
        ids = torch.tensor([prompt + answer])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        total += float(F.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
        tokens += len(answer)
    return math.exp(total / tokens)


@torch.no_grad()
def far_perplexity(model: PreTrainedModel, words: PreTrainedTokenizerBase, split: str) -> tuple[float, float]:
    """Perplexity per token of held-out files, of tokens 256 to 511 and of tokens 512 to 2047."""
    length = model.config.max_position_embeddings
    losses = []
    for _, text in corpus.files(split):
        ids = torch.tensor([words(text, verbose=False)["input_ids"][: length + 1]])
        if ids.shape[1] > length:
            losses.append(F.cross_entropy(model(input_ids=ids[:, :-1]).logits[0].float(), ids[0, 1:], reduction="none"))
    each = torch.stack(losses)
    return float(each[:, 256:512].mean().exp()), float(each[:, 512:].mean().exp())


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, words: PreTrainedTokenizerBase, examples: list[Example], samples: int, rows: int = 50
) -> tuple[float, float]:
    """(share of right answers, its standard error) over examples; `samples` draws each, or greedy for 0."""
    shares: list[float] = []
    for start in range(0, len(examples), rows):
        part = examples[start : start + rows]
        prompts = words([e.prompt for e in part], return_tensors="pt", padding=True)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 10, "top_p": 0.9, "num_return_sequences": samples}
        out = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            max_new_tokens=NEW_TOKENS[part[0].kind],
            **(sampling if samples else {"do_sample": False}),
        )
        texts = words.batch_decode(out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        each = max(samples, 1)
        for i, e in enumerate(part):
            shares.append(sum(is_right(e, text) for text in texts[i * each : (i + 1) * each]) / each)
    values = torch.tensor(shares, dtype=torch.float64)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def is_right(example: Example, text: str) -> bool:
    """Whether a query gives the right rows, or an object is the right one."""
    return matches(example, text) if example.kind == "sql" else text.strip() == example.answer.strip()


@torch.no_grad()
def speculative(
    target: PreTrainedModel,
    auxiliary: PreTrainedModel,
    prompt: list[int],
    limit: int,
    end: int,
    noise: torch.Generator,
    gamma: int = 4,
    process: Sampling | None = None,
) -> tuple[list[int], int]:
    """(new tokens up to `end` or `limit`, target passes) of one prompt. The output has the target's distribution."""
    process = process or Sampling()
    text, passes = list(prompt), 0
    caches = DynamicCache(), DynamicCache()

    def step(model: PreTrainedModel, cache: DynamicCache) -> torch.Tensor:
        fed = torch.tensor([text[cache.get_seq_length() :]])
        return process(model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0])

    def draw(p: torch.Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=noise))

    while len(text) - len(prompt) < limit:
        base = len(text)
        q = []
        for _ in range(gamma):
            q.append(step(auxiliary, caches[1])[-1])
            text.append(draw(q[-1]))
        p = step(target, caches[0])[-gamma - 1 :]
        passes += 1
        drafted, kept = text[base:], 0
        for i, token in enumerate(drafted):
            if float(torch.rand((), generator=noise)) * float(q[i][token]) >= float(p[i][token]):
                break
            kept += 1
        left = p[kept] if kept == gamma else (p[kept] - q[kept]).clamp(min=0)
        del text[base + kept :]
        text.append(draw(left))
        for cache in caches:
            surplus = cache.get_seq_length() - base - kept
            if surplus > 0:
                cache.crop(-surplus)
        new = text[base:]
        if end in new:
            del text[base + new.index(end) + 1 :]
            break
    return text[len(prompt) : len(prompt) + limit], passes


def block_efficiency(
    target: PreTrainedModel, auxiliary: PreTrainedModel, words: PreTrainedTokenizerBase, examples: list[Example]
) -> float:
    """Tokens per target pass over all examples."""
    noise = torch.Generator().manual_seed(0)
    tokens = passes = 0
    for e in examples:
        ids = words(e.prompt)["input_ids"]
        new, used = speculative(target, auxiliary, ids, NEW_TOKENS[e.kind], words.eos_token_id, noise)
        tokens, passes = tokens + len(new), passes + used
    return tokens / passes


@command
def main() -> None:
    parser = Parser(
        prog="scripts.demo.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=SIZES, default="development")
    parser.add_argument("--pair", type=Path, default=PAIR, help="folder with target/ and auxiliary/")
    parser.add_argument("--questions", type=int, default=300, help="SQL questions for accuracy")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each kind for block efficiency")
    parser.add_argument("--samples", type=int, default=4, help="draws per question")
    parser.add_argument("--models", nargs="+", choices=("target", "auxiliary"), default=["target", "auxiliary"])
    args = parser.parse_args()
    torch.manual_seed(0)
    examples = {kind: load(args.split, kind) for kind in SIZES[args.split]}
    words = AutoTokenizer.from_pretrained(args.pair / args.models[0], padding_side="left")
    models: dict[str, PreTrainedModel] = {}
    found: dict[str, Any] = {"split": args.split}
    for name in args.models:
        model = AutoModelForCausalLM.from_pretrained(args.pair / name, dtype=torch.float32).eval()
        models[name], row = model, {"parameters": model.num_parameters()}
        for kind, own in examples.items():
            row[f"{kind}_perplexity"] = round(perplexity(model, words, own), 3)
            for way, samples in (("greedy", 0), ("sampled", args.samples)) if kind != "code" else ():
                share, error = accuracy(model, words, own[: args.questions], samples)
                row[f"{kind}_{way}"] = f"{100 * share:.1f} ± {100 * error:.1f} %"
        if "code" in examples:
            row["near_perplexity"], row["far_perplexity"] = (
                round(x, 2) for x in far_perplexity(model, words, args.split)
            )
        found[name] = row
        print(f"{name}: {', '.join(f'{what} {value}' for what, value in row.items())}", flush=True)
    if len(models) == 2:
        for kind, own in examples.items():
            value = block_efficiency(models["target"], models["auxiliary"], words, own[: args.prompts])
            found[f"{kind}_block_efficiency"] = round(value, 2)
            print(f"block efficiency, speculative, gamma 4, {kind}: {value:.2f}", flush=True)
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
