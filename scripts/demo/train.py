"""Train one model of a demo pair from scratch on the CPU.

    python -m scripts.demo.train target             # pair/target
    python -m scripts.demo.train auxiliary          # pair/auxiliary, which learns from the target in the end

A run resumes from its last checkpoint in .work/ by itself; `--fresh` starts over. When it is done it writes an ordinary
Hugging Face folder with half precision weights, the tokenizer and the log of the training. `scripts.gpu.large_pair`
trains with the same code on a GPU, within a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from runtime.commands.entry import Parser, command
from scripts.demo import batches, chat, corpus, dataset, tokenizer
from scripts.demo.batches import Batch
from scripts.demo.recipes import LONG, RECIPES, Recipe
from scripts.demo.sampling import Sampling
from scripts.demo.schedule import Limit, rate_scale
from scripts.paths import DEMO

ACCEPTANCE_WEIGHT = 2.0  # of the share of rejected tokens, next to the cross-entropy with the target's distribution
LOGGED, SAVED = 20, 100
"""Steps between two lines of the log, and between two checkpoints with a look at held-out text."""


@dataclass(frozen=True)
class Material:
    """What is learnt from.

    Attributes:
        words: the tokenizer.
        code: uint16, all training files; see `batches.code_tokens`.
        held_out: (prompt, answer) by kind of text; an answer that ends has the end token.
    """

    words: PreTrainedTokenizerFast
    code: np.ndarray
    held_out: Mapping[str, Sequence[tuple[str, str]]]


def build(recipe: Recipe) -> PreTrainedModel:
    """A new model in fp32, seeded by the recipe."""
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(recipe.config)


def optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW (on a GPU fused) for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    fused = rest[0].is_cuda or None
    return [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def autocast(device: str) -> torch.autocast:
    """Computing in bfloat16 on a device; in float32 on a CPU without AVX-512, where bfloat16 is many times slower."""
    kind = device.split(":")[0]
    has_bfloat16 = kind != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=has_bfloat16)


@torch.no_grad()
def held_out(model: PreTrainedModel, material: Material) -> dict[str, float]:
    """Mean negative log-likelihood per answer token (nats) on a few held-out examples of each kind."""
    found, words = {}, material.words
    for kind, examples in material.held_out.items():
        total, tokens = 0.0, 0
        for pair in examples:
            prompt, answer = words(list(pair))["input_ids"]
            ids = torch.tensor([prompt + answer], device=model.device)
            with autocast(model.device.type):
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            total += float(F.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
            tokens += len(answer)
        found[f"development_{kind}"] = round(total / tokens, 4)
    return found


def export(model: PreTrainedModel, words: PreTrainedTokenizerFast, folder: Path, dtype: str) -> None:
    """Write a Hugging Face folder with weights in 16 bits."""
    half = AutoModelForCausalLM.from_config(model.config)
    half.load_state_dict(model.state_dict())
    half = half.to(getattr(torch, dtype))
    end = words.eos_token_id
    half.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=end)
    half.save_pretrained(folder)
    words.save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    values = {**json.loads(described.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    described.write_text(json.dumps(values, indent=2) + "\n")  # the name that transformers 4 and 5 both know
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors are written readable by their owner alone


def publish(recipe: Recipe, words: PreTrainedTokenizerFast, work: Path, output: Path) -> None:
    """Export the last checkpoint in `work` and its log to the recipe's folder in `output`."""
    folder, model = output / recipe.folder, build(recipe)
    saved = torch.load(work / "checkpoint.pt", weights_only=False, map_location="cpu")
    model.load_state_dict(saved["model"])
    export(model, words, folder, recipe.dtype)
    (folder / "training.jsonl").write_text((work / "training.jsonl").read_text())
    print(f"wrote {os.path.relpath(folder)}")


def imitation(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Loss [N] of auxiliary logits [N, V] against the target's logits [N, V] (distillation).

    Cross-entropy with the target's distribution, plus the probability that speculative sampling rejects a token drawn
    from the auxiliary, 1 - sum(min(p, q)), both processed as in decoding.
    """
    accepted = torch.minimum(Sampling()(logits), Sampling()(wanted)).sum(-1)
    return F.cross_entropy(logits, wanted.softmax(-1), reduction="none") + ACCEPTANCE_WEIGHT * (1 - accepted)


class Trainer:
    """One model in training: weights, optimizers, and the log and checkpoint in `work`.

    Args:
        recipe: of the model.
        material: what it learns from.
        work: folder of its own; a checkpoint there is gone on with.
        output: where `recipe.folder` is, and its target beside it.
        device: torch's name; see `autocast`.
        fresh: ignore the checkpoint.
        compiled: run through torch.compile; a model of code alone layer by layer, with the causal kernel.
    """

    def __init__(
        self,
        recipe: Recipe,
        material: Material,
        work: Path,
        output: Path,
        device: str = "cpu",
        fresh: bool = False,
        compiled: bool = True,
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.recipe, self.material, self.work, self.device = recipe, material, work, device
        self._target, self._compiled = output / Path(recipe.folder).parent / "target", compiled
        self.saved, self.log = work / "checkpoint.pt", work / "training.jsonl"
        self.model = build(recipe).to(device)
        self.tuners = optimizers(self.model, recipe)
        self.peaks = [group["lr"] for tuner in self.tuners for group in tuner.param_groups]
        self.step, self.seconds = 0, 0.0
        if self.saved.exists() and not fresh:
            self._restore()
        else:
            self.log.write_text("")
        self._run: Any = self._ready(self.model)
        self._guide: Any = None
        self._sums: dict[str, float] = {}
        self._summed = 0

    def _ready(self, model: PreTrainedModel) -> Any:
        if not self._compiled:
            return model
        if self.recipe.sql_rows:
            return torch.compile(model, dynamic=False)  # one graph for short rows, one for long ones
        for layer in model.model.layers:
            layer.compile()
        return model

    def _restore(self) -> None:
        state = torch.load(self.saved, weights_only=False, map_location="cpu")
        self.model.load_state_dict(state["model"])
        for tuner, its in zip(self.tuners, state["tuners"], strict=True):
            tuner.load_state_dict(its)
        torch.set_rng_state(state["rng"])
        self.step, self.seconds = state["step"], state["seconds"]
        kept = [line for line in self.log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
        self.log.write_text("".join(line + "\n" for line in kept))

    def save(self, seconds: float) -> None:
        """Write the checkpoint, in one step; `seconds` of training are over."""
        self.seconds = seconds
        state = {"model": self.model.state_dict(), "tuners": [t.state_dict() for t in self.tuners], "step": self.step}
        state |= {"rng": torch.get_rng_state(), "seconds": seconds}
        torch.save(state, self.saved.with_suffix(".new"))
        os.replace(self.saved.with_suffix(".new"), self.saved)

    def batch(self) -> Batch:
        """Of the next step."""
        recipe, step = self.recipe, self.step
        words, code = self.material.words, self.material.code
        if recipe.long_every and step % recipe.long_every == recipe.long_every - 1:
            return batches.make_long(words, code, recipe.seed, step, LONG)
        return batches.make(words, code, recipe.rows, recipe.sql_rows, recipe.seed, step, recipe.length)

    def backward(self, batch: Batch, guided: bool) -> dict[str, float]:
        """Add up the gradients of a batch; the mean loss of each kind of text, nats a token.

        Guided, the loss is `imitation` of the published target instead of the cross-entropy with the one true token;
        the text, and what weighs how much, stay the same.
        """
        everything, losses = batch.weights.sum().to(self.device), []
        for part in batch.parts(self.recipe.at_once, self.device):
            with autocast(self.device):
                logits = self._run(**part.inputs, use_cache=False).logits.float().flatten(0, 1)
            each = F.cross_entropy(logits, part.targets.flatten(), reduction="none").view_as(part.weights)
            loss = (each * part.weights).sum() / everything
            if guided:
                loud = (part.weights >= batches.CODE_WEIGHT).flatten()  # answers and code: all that is ever drafted
                wanted = self._wanted(part)[loud]
                loss = (imitation(logits[loud], wanted) * part.weights.flatten()[loud]).sum() / everything
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(each.detach().cpu())
        each, kinds = torch.cat(losses), {"sql": batches.ANSWER_WEIGHT, "code": batches.CODE_WEIGHT}
        found = {kind: float(each[batch.weights == weight].mean()) for kind, weight in kinds.items()}
        found = {kind: loss for kind, loss in found.items() if not math.isnan(loss) or kind == "code"}
        if not math.isfinite(found["code"]):
            raise ArithmeticError(f"the loss of step {self.step} is {found['code']}")
        return found

    @torch.no_grad()
    def _wanted(self, part: Batch) -> torch.Tensor:
        if self._guide is None:
            guide = AutoModelForCausalLM.from_pretrained(self._target, dtype=torch.float32).to(self.device).eval()
            self._guide = self._ready(guide)
        with autocast(self.device):
            logits: torch.Tensor = self._guide(**part.inputs, use_cache=False).logits.float().flatten(0, 1)
        return logits

    def advance(self, limit: Limit, seconds: float) -> dict[str, float]:
        """One step, after `seconds` of training; what `backward` found, and the rate's scale."""
        share = limit.share(self.step, seconds)
        scale = rate_scale(self.step, share, self.recipe, limit.steps)
        for tuner, peak in zip(self.tuners, self.peaks, strict=True):
            tuner.param_groups[0]["lr"] = peak * scale
        start = self.recipe.guided_from
        losses = self.backward(self.batch(), start is not None and (self.step if limit.steps else share) >= start)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for tuner in self.tuners:
            tuner.step()
            tuner.zero_grad(set_to_none=True)
        self.step += 1
        for kind, loss in losses.items():
            self._sums[kind] = self._sums.get(kind, 0.0) + loss
        self._summed += 1
        return {"scale": scale, **losses}

    def note(self, scale: float, seconds: float, look: bool) -> dict[str, float]:
        """Write a line of the log; with a `look` at held-out text. Returns the mean losses since the last."""
        entry: dict[str, float] = {"step": self.step, "tokens": self.recipe.tokens(self.step)}
        means = {k: v / self._summed for k, v in self._sums.items()}
        entry |= {f"train_{k}": round(v, 4) for k, v in means.items()}
        entry |= {"rate": round(scale, 4), "seconds": round(seconds, 1)}
        if look:
            entry |= held_out(self.model, self.material)
        with self.log.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        self._sums, self._summed = {}, 0
        return means

    def train(self, limit: Limit, name: str) -> bool:
        """Train from where it is; returns whether the training is complete, or this call's time is up."""
        began, spent = limit.clock() - self.seconds, self.seconds
        first, total = (self.step, limit.steps) if limit.steps else (round(spent), round(limit.seconds))
        with tqdm(initial=first, total=total, desc=name, mininterval=5, unit="step" if limit.steps else "s") as bar:
            while limit.share(self.step, spent) < 1:
                if limit.clock() >= limit.until:
                    self.save(spent)
                    return False
                found = self.advance(limit, limit.clock() - began)
                spent = limit.clock() - began
                look = limit.share(self.step, spent) >= 1 or self.step % SAVED == 0
                if look or self.step % LOGGED == 0:
                    means = self.note(found["scale"], spent, look)
                    bar.set_postfix({k: round(v, 3) for k, v in means.items()} | {"step": self.step}, refresh=False)
                if look:
                    self.save(spent)
                bar.update((self.step if limit.steps else min(round(spent), round(limit.seconds))) - bar.n)
        return True


def code_texts() -> list[str]:
    """Training files, and then their functions one by one, in random order: these teach where code ends.

    Some functions are answers in a conversation.
    """
    rng = random.Random(1)
    files = [text for _, text in corpus.files("train")]
    whole = list(dict.fromkeys(one for text in files for one in corpus.functions(text)))
    rng.shuffle(whole)
    for n, text in enumerate(whole):
        if n % 4 == 0 and (middle := text.find("\n", 60) + 1):
            whole[n] = f"{chat.USER}Complete this function:\n{text[:middle]}{chat.ASSISTANT}{text[middle:]}"
    return files + whole


def demo_material() -> Material:
    """The demo's, made where it is not in .work/ yet."""
    words, work = tokenizer.demo(), DEMO / ".work"
    code = batches.code_tokens(words, work, code_texts())
    counts = {"sql": 48, "code": 48, "json": 16}
    shown = {kind: dataset.load("development", kind)[:count] for kind, count in counts.items()}
    held_out = {kind: [(e.prompt, e.answer + chat.END) for e in own] for kind, own in shown.items()}
    return Material(words, code, held_out)


def train(name: str, steps: int | None, fresh: bool, compiled: bool) -> None:
    """Train a model of the demo for `steps` steps in all (None: the recipe's), from its last checkpoint; publish it."""
    recipe, material, work = RECIPES[name], demo_material(), DEMO / ".work" / name
    steps = steps or recipe.steps
    trainer = Trainer(recipe, material, work, DEMO, fresh=fresh, compiled=compiled)
    parameters, tokens = sum(p.numel() for p in trainer.model.parameters()), len(material.code)
    print(f"{name}: {parameters / 1e6:.2f} M parameters, steps {trainer.step} to {steps}, {tokens / 1e6:.2f} M tokens")
    trainer.train(Limit(steps), name)
    publish(recipe, material.words, work, DEMO)


@command
def main() -> None:
    """Command line of the trainer."""
    parser = Parser(
        prog="scripts.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, help="steps in all (default: the recipe's); may change between resumes")
    parser.add_argument("--fresh", action="store_true", help="ignore the checkpoint")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    parser.add_argument("--publish", action="store_true", help="only export the last checkpoint")
    args = parser.parse_args()
    if args.publish:
        publish(RECIPES[args.name], tokenizer.demo(), DEMO / ".work" / args.name, DEMO)
    else:
        train(args.name, args.steps, args.fresh, not args.no_compile)


if __name__ == "__main__":
    main()
