"""Train one model of a demo pair from scratch on the CPU.

    python -m scripts.demo.train target             # the Llama pair: pair/target, pair/auxiliary
    python -m scripts.demo.train auxiliary
    python -m scripts.demo.train opt-target         # the OPT pair: opt/target, opt/auxiliary
    python -m scripts.demo.train opt-auxiliary

A run resumes from its last checkpoint in .work/ by itself; `--fresh` starts over. When it is done it writes an ordinary
Hugging Face folder with half precision weights, the tokenizer and the log of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from scripts.demo import batches, dataset, tokenizer
from scripts.demo.sampling import Sampling

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """Shape of one model and how it is trained. `steps` x `rows` x 512 tokens are seen; rates are peak values."""

    folder: str  # <pair>/<role>, the target of a guided auxiliary lies beside it
    config: PreTrainedConfig
    steps: int
    sql_rows: int  # of the rows of a step; the rest is code
    rows: int = 8
    last_sql_rows: tuple[int, int] | None = None  # (step, rows): from this step on, that many rows are SQL
    guided_from: int | None = None  # step from which the finished target's distribution is learnt (distillation)
    shifted: float = 0.0  # share of the code rows that begin behind position 0, for position tables longer than a row
    matrix_rate: float = 4e-3  # Muon, hidden matrices
    other_rate: float = 3e-3  # AdamW, embedding and norms
    warmup: int = 60  # steps
    decay: float = 0.5  # share of the steps over which the rate falls to zero
    weight_decay: float = 0.02
    seed: int = 1


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        **COMMON,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        rms_norm_eps=1e-5,
    )


def _opt(hidden: int, layers: int, heads: int, intermediate: int) -> OPTConfig:
    return OPTConfig(
        **COMMON,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=intermediate,
        dropout=0.0,
    )


COMMON = {
    "vocab_size": tokenizer.VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": tokenizer.END_ID,
    "eos_token_id": tokenizer.END_ID,
    "pad_token_id": tokenizer.END_ID,
}
RECIPES = {
    # more SQL than code: finding the right column in an unseen schema is what takes longest to learn
    "target": Recipe("pair/target", _llama(256, 8, 8, 4, 768), steps=1500, sql_rows=5),
    # more code than SQL: that is where its drafts are rejected most
    "auxiliary": Recipe(
        "pair/auxiliary",
        _llama(128, 2, 4, 2, 352),
        steps=1200,
        sql_rows=3,
        last_sql_rows=(1000, 1),
        guided_from=700,
        matrix_rate=6e-3,
        decay=0.3,
        seed=2,
    ),
    "opt-target": Recipe("opt/target", _opt(192, 7, 6, 768), steps=600, sql_rows=5, shifted=0.25),
    "opt-auxiliary": Recipe(
        "opt/auxiliary",
        _opt(128, 2, 4, 256),
        steps=520,
        sql_rows=3,
        guided_from=400,
        shifted=0.25,
        matrix_rate=6e-3,
        decay=0.3,
        seed=2,
    ),
}
ACCEPTANCE_WEIGHT = 2.0  # of the share of rejected tokens, next to the cross-entropy with the target's distribution


def build(recipe: Recipe) -> PreTrainedModel:
    """A new model in fp32, seeded by the recipe."""
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(recipe.config)


def optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_scale(step: int, steps: int, recipe: Recipe) -> float:
    """Share of the peak rate at a step: warm-up, level, then straight down to zero."""
    return min((step + 1) / recipe.warmup, 1.0, (steps - step) / (recipe.decay * steps))


@torch.no_grad()
def held_out(model: PreTrainedModel, words: PreTrainedTokenizerFast, count: int = 48) -> dict[str, float]:
    """Mean negative log-likelihood per answer token (nats) on a few development examples of each kind."""
    found = {}
    for kind in ("sql", "code"):
        total, tokens = 0.0, 0
        for e in dataset.load("development", kind)[: count if kind == "sql" else count // 3]:
            prompt, answer = words([e.prompt, e.answer])["input_ids"]
            answer += [words.eos_token_id] if kind == "sql" else []
            ids = torch.tensor([prompt + answer])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            total += float(F.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
            tokens += len(answer)
        found[f"development_{kind}"] = round(total / tokens, 4)
    return found


def export(model: PreTrainedModel, words: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder with fp16 weights."""
    half = AutoModelForCausalLM.from_config(model.config)
    half.load_state_dict(model.state_dict())
    half = half.half()
    end = words.eos_token_id
    half.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=end)
    half.save_pretrained(folder)
    words.save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    values = {**json.loads(described.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    described.write_text(json.dumps(values, indent=2) + "\n")  # the name that transformers 4 and 5 both know
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors are written readable by their owner alone


def publish(name: str) -> None:
    """Export the last checkpoint and its log to the recipe's folder."""
    work, folder, words = HERE / ".work" / name, HERE / RECIPES[name].folder, tokenizer.load()
    model = build(RECIPES[name])
    model.load_state_dict(torch.load(work / "checkpoint.pt", weights_only=False)["model"])
    export(model, words, folder)
    (folder / "training.jsonl").write_text((work / "training.jsonl").read_text())
    print(f"wrote {folder.relative_to(HERE.parents[1])}")


def imitation(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Loss [N] of auxiliary logits [N, V] against the target's logits [N, V] (distillation).

    Cross-entropy with the target's distribution, plus the probability that speculative sampling rejects a token drawn
    from the auxiliary, 1 - sum(min(p, q)), both processed as in decoding.
    """
    accepted = torch.minimum(Sampling()(logits), Sampling()(wanted)).sum(-1)
    return F.cross_entropy(logits, wanted.softmax(-1), reduction="none") + ACCEPTANCE_WEIGHT * (1 - accepted)


def train(name: str, steps: int, fresh: bool, compiled: bool) -> None:
    """Train `name` for `steps` steps in all, from its last checkpoint where there is one.

    From the recipe's step `guided_from` on the loss is `imitation` of the published target instead of the cross-entropy
    with the one true token; the text, and what weighs how much, stay the same.
    """
    recipe = RECIPES[name]
    work = HERE / ".work" / name
    work.mkdir(parents=True, exist_ok=True)
    saved, log = work / "checkpoint.pt", work / "training.jsonl"
    words = tokenizer.load()
    code = batches.code_tokens(words, HERE / ".work")
    model = build(recipe)
    tuners = optimizers(model, recipe)
    first, seconds = 0, 0.0
    if saved.exists() and not fresh:
        state = torch.load(saved, weights_only=False)
        model.load_state_dict(state["model"])
        for tuner, its in zip(tuners, state["tuners"], strict=True):
            tuner.load_state_dict(its)
        torch.set_rng_state(state["rng"])
        first, seconds = state["step"], state["seconds"]
        kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= first]
        log.write_text("".join(line + "\n" for line in kept))
    else:
        log.write_text("")
    peaks = [group["lr"] for tuner in optimizers(model, recipe) for group in tuner.param_groups]
    run = torch.compile(model) if compiled else model
    guide: PreTrainedModel | None = None
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters / 1e6:.2f} M parameters, steps {first} to {steps}, {len(code) / 1e6:.2f} M code tokens")
    began = time.monotonic() - seconds
    sums = {"sql": 0.0, "code": 0.0}
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=name, mininterval=5)
    for step in bar:
        late = recipe.last_sql_rows is not None and step >= recipe.last_sql_rows[0]
        sql_rows = recipe.last_sql_rows[1] if recipe.last_sql_rows is not None and late else recipe.sql_rows
        batch = batches.make(words, code, recipe.rows, sql_rows, recipe.seed, step)
        if recipe.shifted:
            batches.shift(batch, recipe.shifted, recipe.config.max_position_embeddings, (recipe.seed, step))
        scale = rate_scale(step, steps, recipe)
        for tuner, peak in zip(tuners, peaks, strict=True):
            tuner.param_groups[0]["lr"] = peak * scale
        loud = (batch.weights >= batches.CODE_WEIGHT).flatten()  # answers and code: all that is ever drafted
        inputs = {"input_ids": batch.tokens, "attention_mask": batch.mask, "position_ids": batch.positions}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(**inputs, use_cache=False).logits.float().flatten(0, 1)
        each = F.cross_entropy(logits, batch.targets.flatten(), reduction="none").view_as(batch.weights)
        loss = (each * batch.weights).sum() / batch.weights.sum()
        if recipe.guided_from is not None and step >= recipe.guided_from:
            if guide is None:
                target = HERE / Path(recipe.folder).parent / "target"
                guide = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
                guide.compile(disable=not compiled)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                wanted = guide(**inputs, use_cache=False).logits.float().flatten(0, 1)
            loss = (imitation(logits[loud], wanted[loud]) * batch.weights.flatten()[loud]).sum() / batch.weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tuner in tuners:
            tuner.step()
            tuner.zero_grad(set_to_none=True)
        with torch.no_grad():
            answers = batch.weights[: batch.sql_rows] == batches.ANSWER_WEIGHT
            sums["sql"] += float(each[: batch.sql_rows][answers].mean())
            sums["code"] += float(each[batch.sql_rows :].mean())
        done = step + 1
        if done % 20 == 0 or done == steps:
            entry: dict[str, float] = {"step": done, "tokens": done * recipe.rows * batches.ROW}
            span = (done - 1) % 20 + 1
            entry |= {f"train_{k}": round(v / span, 4) for k, v in sums.items()}
            entry |= {"rate": round(scale, 4), "seconds": round(time.monotonic() - began, 1)}
            if done % 100 == 0 or done == steps:
                entry |= held_out(model, words)
            with log.open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
            bar.set_postfix({k: round(v / span, 3) for k, v in sums.items()}, refresh=False)
            sums = dict.fromkeys(sums, 0.0)
        if done % 100 == 0 or done == steps:
            state = {"model": model.state_dict(), "tuners": [t.state_dict() for t in tuners], "step": done}
            state |= {"rng": torch.get_rng_state(), "seconds": time.monotonic() - began}
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    publish(name)


def main() -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, help="steps in all (default: the recipe's); may change between resumes")
    parser.add_argument("--fresh", action="store_true", help="ignore the checkpoint")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    parser.add_argument("--publish", action="store_true", help="only export the last checkpoint")
    args = parser.parse_args()
    if args.publish:
        publish(args.name)
    else:
        train(args.name, args.steps or RECIPES[args.name].steps, args.fresh, not args.no_compile)


if __name__ == "__main__":
    main()
