"""`mtad tune --estimate`: what drafts would gain for two checkpoints, without engines and without generating."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from engines.prompts import read_prompts
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.config import use_torch


def run(options: argparse.Namespace, given: dict[str, Any]) -> None:
    """Print the estimate.

    Raises:
        InvalidInput: a checkpoint or prompt is not usable.
    """
    for name in ("target", "auxiliary"):
        if getattr(options, name) is None:
            raise InvalidInput(name, None, "give the checkpoint, as for mtad export")
    params = DecodingParams.from_dict(given)
    if params.temperature == 0:
        raise InvalidInput("params", 0, "the estimate is for sampling; give a temperature above 0")
    examples = read_prompts(options.prompts)[: options.limit]
    costs = (options.auxiliary_cost, options.token_cost)
    if (None in costs and costs != (None, None)) or any(cost is not None and cost < 0 for cost in costs):
        raise InvalidInput(
            "auxiliary_cost", costs, "give --auxiliary-cost and --token-cost, both at least 0, or neither"
        )
    use_torch()
    import torch
    from tqdm import tqdm

    from engines.folder import vocabulary_hash
    from export.checkpoint.checkpoint import find
    from runtime.tuning.estimate import Costs, estimate

    target, auxiliary = (find(name, str(getattr(options, name))) for name in ("target", "auxiliary"))
    tokenizer = target.tokenizer()
    if vocabulary_hash(tokenizer.get_vocab()) != vocabulary_hash(auxiliary.tokenizer().get_vocab()):
        raise InvalidInput("auxiliary", str(options.auxiliary), "its vocabulary is not the target's")
    texts = []
    for one in examples:
        prompt = tokenizer(one.prompt).input_ids
        if one.answer is None:
            texts.append((prompt, max(1, len(prompt) // 2)))
        else:
            texts.append(([*prompt, *tokenizer(one.answer, add_special_tokens=False).input_ids], len(prompt)))
    models = target.load(torch.float32), auxiliary.load(torch.float32)
    assumed = None if None in costs else Costs(*costs)
    with tqdm(total=len(texts), desc="reading", unit="text", file=sys.stderr, disable=None) as bar:
        report = estimate(*models, texts, params, assumed, bar.update)
    if options.json:
        print(json.dumps(report.to_dict()))
        return
    low, middle, high = report.quantiles
    print(
        f"{report.texts} texts, {report.positions} positions; a drafted token is accepted with probability "
        f"{report.acceptance:.3f} ± {report.acceptance_error:.3f}\n"
        f"(at 10 % of the positions below {low:.2f}, at half below {middle:.2f}, at 90 % below {high:.2f})\n"
        f"costs, as shares of a target's step ({'assumed' if assumed else 'measured here'}): an auxiliary's step "
        f"{report.costs.auxiliary:.3f}, each further scored token {report.costs.token:.4f}\n\n"
        "draft_len  width  tokens per pass  x sample"
    )
    for row in report.estimates:
        best = "  <- fastest" if row is report.best else ""
        print(f"{row.draft_len:9}  {row.width:5}  {row.tokens_per_pass:15.2f}  {row.speed:8.2f}{best}")
