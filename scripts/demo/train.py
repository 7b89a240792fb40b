"""Train a pair such as the demo's from scratch on the CPU: the target, then the auxiliary, which learns from it.

    python -m scripts.demo.train build/new-pair              # build/new-pair/target and build/new-pair/auxiliary
    python -m scripts.demo.train build/tiny-pair --quick     # narrow models, few steps: to see that it works

Interrupted, the same command goes on from the last checkpoint. Each model is an ordinary Hugging Face folder with
weights in half precision, the tokenizer, and the log of its training.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from runtime.commands.entry import Parser, command
from scripts.demo import batches, corpus, dataset, tokenizer
from scripts.demo.batches import Batch

LOGGED, SAVED = 20, 100
"""Steps between two lines of the log, and between two checkpoints with a look at held-out text."""
WEIGHT_DECAY = 0.02
ACCEPTANCE_WEIGHT = 2.0  # of the share of rejected tokens, next to the cross-entropy with the target's distribution


@dataclass(frozen=True)
class Recipe:
    """Shape of a model and how it is trained: the rate warms up, stays level, and falls in a straight line to zero."""

    shape: tuple[int, int, int, int]  # hidden size, layers, KV heads (of 4 heads), intermediate size
    steps: int
    sql_rows: int  # of a step
    code_rows: int
    matrix_rate: float  # at its peak
    decay: float  # share of the steps over which the rate falls
    seed: int
    warmup: int = 60  # steps until the rate's peak
    shown: int = 48  # held-out examples of each kind by which the training is followed
    guided_from: float = 1.0  # share of the steps behind which the target's distribution is learnt (distillation)
    embedding_rate: float = 3e-3  # at its peak
    saved: int | None = None  # steps between two checkpoints; by default, `SAVED`

    @property
    def config(self) -> LlamaConfig:
        hidden, layers, kv_heads, intermediate = self.shape
        return LlamaConfig(
            vocab_size=tokenizer.VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            rms_norm_eps=1e-5,
            max_position_embeddings=batches.LONG,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


RECIPES = {
    # more SQL than code: finding the right column in an unseen schema is what takes longest to learn
    "target": Recipe((256, 8, 2, 768), 1600, sql_rows=3, code_rows=2, matrix_rate=4e-3, decay=0.5, seed=1),
    # more code than SQL: that is where its drafts are rejected most
    "auxiliary": Recipe(
        (128, 2, 2, 352), 640, sql_rows=2, code_rows=4, matrix_rate=6e-3, decay=0.3, seed=2, guided_from=280 / 640
    ),
}
QUICK = {
    role: replace(recipe, shape=(32, 2, 2, 48), steps=10, sql_rows=1, code_rows=1, warmup=2, shown=2)
    for role, recipe in RECIPES.items()
}


def material(files: int | None = None, groups: int = 2500) -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """The vocabulary, and the ids of all code with an end token behind each text; the same for one Python version."""
    code, made = corpus.files("train")[:files], islice(dataset.training_groups(), groups)
    sql = (schema + "".join(prompt + answer for prompt, answer in pairs) for schema, pairs in made)
    words = tokenizer.train(chain(sql, code))
    ids = (words(text, verbose=False)["input_ids"] for text in chain(code, functions(code)))
    return words, np.concatenate([np.array([*one, words.eos_token_id], np.uint16) for one in ids])


def functions(files: list[str]) -> list[str]:
    """The functions of files in random order, which teach where code ends; some are answers in a conversation."""
    whole = corpus.functions(files)
    random.Random(1).shuffle(whole)
    for n in range(0, len(whole), 4):
        if middle := whole[n].find("\n", 60) + 1:
            start, rest = whole[n][:middle], whole[n][middle:]
            whole[n] = f"{dataset.USER}Complete this function:\n{start}{dataset.ASSISTANT}{rest}"
    return whole


def orthogonalized(
    grad: torch.Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    """Muon's Newton-Schulz iteration as in `torch.optim._muon`, but in float32."""
    a, b, c = ns_coefficients
    found = grad.T if grad.size(0) > grad.size(1) else grad
    found = found / found.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if grad.size(0) > grad.size(1) else found


def optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    if not has_bfloat16():
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalized
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, recipe.matrix_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, recipe.embedding_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def has_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16; elsewhere it takes ten times as long as float32, or more."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[R, T, V], computed in bfloat16 where the CPU has it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits.float()


def processed(logits: torch.Tensor) -> torch.Tensor:
    """The distribution that a token is drawn from, of top-k 10 and top-p 0.9; differentiable."""
    values, at = logits.topk(10, dim=-1)
    p = values.softmax(-1)
    p = torch.where(p.cumsum(-1) - p < 0.9, p, 0.0)  # the token that crosses top_p is kept
    return torch.zeros_like(logits).scatter(-1, at, p / p.sum(-1, keepdim=True))


def imitation(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Loss [N] of auxiliary logits [N, V] against the target's logits [N, V] (distillation).

    Cross-entropy with the target's distribution, plus the probability that speculative sampling rejects a token drawn
    from the auxiliary, 1 - sum(min(p, q)), both processed as in decoding.
    """
    accepted = torch.minimum(processed(logits), processed(wanted)).sum(-1)
    return F.cross_entropy(logits, wanted.softmax(-1), reduction="none") + ACCEPTANCE_WEIGHT * (1 - accepted)


def backward(model: Any, batch: Batch, guide: Any) -> dict[str, float]:
    """Add up the gradients of a batch; the mean loss of each kind of text in nats per token.

    With a guide, the loss is `imitation` of it instead of the cross-entropy with the one true token.
    """
    logits, weights = logits_of(model, batch.inputs).flatten(0, 1), batch.weights.flatten()
    each = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
    loss = each * weights
    if guide is not None:
        loud = weights >= batches.CODE_WEIGHT  # answers and code: all that is ever drafted
        with torch.no_grad():
            wanted = logits_of(guide, batch.inputs).flatten(0, 1)[loud]
        loss = imitation(logits[loud], wanted) * weights[loud]
    (loss.sum() / weights.sum()).backward()  # type: ignore[no-untyped-call]
    kinds = {"sql": batches.ANSWER_WEIGHT, "code": batches.CODE_WEIGHT}
    return {kind: each[weights == weight].mean().item() for kind, weight in kinds.items() if (weights == weight).any()}


@torch.no_grad()
def surprises(model: PreTrainedModel, words: PreTrainedTokenizerFast, prompt: str, answer: str) -> torch.Tensor:
    """Negative log-likelihood (nats) of each token of an answer behind a prompt."""
    before, behind = words([prompt, answer])["input_ids"]
    logits = logits_of(model, {"input_ids": torch.tensor([before + behind])})[0, len(before) - 1 : -1]
    return F.cross_entropy(logits, torch.tensor(behind), reduction="none")


def held_out(model: PreTrainedModel, words: PreTrainedTokenizerFast, count: int) -> dict[str, float]:
    """Mean negative log-likelihood per answer token (nats) on a few development examples of each kind."""
    found = {}
    for kind in dataset.SIZES["development"]:
        examples = dataset.load("development", kind)[:count]
        losses = [surprises(model, words, one.prompt, one.answer + dataset.END) for one in examples]
        found[f"development_{kind}"] = round(float(torch.cat(losses).mean()), 4)
    return found


def fit(
    recipe: Recipe,
    words: PreTrainedTokenizerFast,
    make: Callable[[int], Batch],
    folder: Path,
    compiled: bool,
    start: Path | None = None,
    look: Callable[[PreTrainedModel, PreTrainedTokenizerFast, int], dict[str, float]] = held_out,
) -> None:
    """Train a model from its last checkpoint on, which lies beside `folder`, and write it there.

    A model that is guided learns from the one in `target`, beside it too.

    Args:
        make: the batch of a step.
        start: a model to begin with; without it, one with random weights and the recipe's shape.
        look: how far it is, on held-out text.
    """
    torch.manual_seed(recipe.seed)
    if start:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        model.resize_token_embeddings(len(words))
    else:
        model = AutoModelForCausalLM.from_config(recipe.config)
    tuners, first, guide, losses = optimizers(model, recipe), 0, None, list[dict[str, float]]()
    peaks, log, checkpoint = [tuner.param_groups[0]["lr"] for tuner in tuners], [], folder.with_suffix(".checkpoint")
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for tuner, its in zip(tuners, state["tuners"], strict=True):
            tuner.load_state_dict(its)
        first, log = state["step"], state["log"]

    def ready(model: PreTrainedModel) -> Any:
        return torch.compile(model, dynamic=False) if compiled else model

    saved = recipe.saved or SAVED
    run, began = ready(model), time.monotonic() - (log[-1]["seconds"] if log else 0)
    for step in tqdm(range(first, recipe.steps), desc=folder.name, initial=first, total=recipe.steps):
        rate = min((step + 1) / recipe.warmup, 1.0, (1 - step / recipe.steps) / recipe.decay)
        for tuner, peak in zip(tuners, peaks, strict=True):
            tuner.param_groups[0]["lr"] = peak * rate
        if guide is None and step >= recipe.guided_from * recipe.steps:
            guide = ready(AutoModelForCausalLM.from_pretrained(folder.with_name("target"), dtype=torch.float32))
        losses.append(backward(run, make(step), guide))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        for tuner in tuners:
            tuner.step()
            tuner.zero_grad(set_to_none=True)
        now = step + 1
        if now % LOGGED == 0 or now == recipe.steps:
            means = {f"train_{kind}": round(fmean(one[kind] for one in losses), 4) for kind in losses[0]}
            about = {"rate": round(rate, 4), "seconds": round(time.monotonic() - began, 1)}
            seen = look(model, words, recipe.shown) if now % saved == 0 or now == recipe.steps else {}
            log.append({"step": now, **means, **about, **seen})
            losses.clear()
        if now % saved == 0:
            states = [tuner.state_dict() for tuner in tuners]
            torch.save({"model": model.state_dict(), "tuners": states, "step": now, "log": log}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
    write(model.half(), words, log, folder)
    checkpoint.unlink(missing_ok=True)


def batches_of(recipe: Recipe, words: PreTrainedTokenizerFast, code: np.ndarray) -> Callable[[int], Batch]:
    """The batch of each step."""
    return lambda step: batches.make(words, code, recipe.sql_rows, recipe.code_rows, recipe.seed, step)


def write(model: PreTrainedModel, words: PreTrainedTokenizerFast, log: list[dict[str, float]], folder: Path) -> None:
    """A Hugging Face folder with the log of its training."""
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, bos_token_id=0)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    values = {**json.loads(described.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    described.write_text(json.dumps(values, indent=2) + "\n")  # the name that transformers 4 and 5 both know
    (folder / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


@command
def main() -> None:
    parser = Parser(prog="scripts.demo.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for target/ and auxiliary/; a model that is there is kept")
    parser.add_argument("--quick", action="store_true", help="narrow models, few steps, little text")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    words, code = material(40, 100) if args.quick else material()
    for role, recipe in (QUICK if args.quick else RECIPES).items():
        if not (args.folder / role / "training.jsonl").exists():
            fit(recipe, words, batches_of(recipe, words, code), args.folder / role, compiled=not args.quick)
        print(args.folder / role)


if __name__ == "__main__":
    main()
