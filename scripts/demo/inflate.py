"""Copies of a pair that compute what it computes and cost what larger models cost, for measuring speed.

    python -m scripts.demo.inflate 310M build/inflated      # build/inflated/target and build/inflated/auxiliary

Each layer's MLP gets more rows of gate and up weights (random) whose columns in the down projection are zero. The
logits stay the same up to the order of summation, while as many weights are read and multiplied as in the larger model.
So a small trained pair has its own, realistic acceptance at any size. Attention and the KV cache keep their size.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from scripts.paths import DEMO

SIZES = {"78M": (78_000_000, 6_700_000), "310M": (310_000_000, 27_000_000), "1B": (1_000_000_000, 100_000_000)}
"""Parameters of the target and of the auxiliary."""
MULTIPLE = 64
"""Of which the width of an MLP is one, as in models of that size."""


def inflate(source: Path, folder: Path, parameters: int) -> int:
    """Write a copy of a checkpoint with at least `parameters` parameters; returns how many it has.

    Args:
        source: a Hugging Face folder, of Llama or another family with gate, up and down projections.
        folder: where the copy is written, with the tokenizer and in the precision of the source.
        parameters: more than the source has.

    Raises:
        InvalidInput: the source has another kind of MLP, or is not smaller.
    """
    small = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    weights = small.state_dict()
    widened = [name for name in weights if name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight"))]
    if not widened:
        raise InvalidInput("checkpoint", str(source), "its MLPs have no gate, up and down projections to widen")
    missing = parameters - small.num_parameters()
    if missing <= 0:
        raise InvalidInput("parameters", parameters, f"{source} has {small.num_parameters()} already; ask for more")
    per_unit = sum(weights[name].numel() for name in widened) // small.config.intermediate_size
    config = AutoConfig.from_pretrained(source)
    config.intermediate_size += math.ceil(missing / per_unit)
    config.intermediate_size += -config.intermediate_size % MULTIPLE
    random = torch.Generator().manual_seed(0)
    for name in widened:
        old = weights[name]
        rows, columns = old.shape
        if name.endswith("down_proj.weight"):
            new = old.new_zeros(rows, config.intermediate_size)
        else:
            new = (0.02 * torch.randn(config.intermediate_size, columns, generator=random)).to(old.dtype)
        new[:rows, :columns] = old
        weights[name] = new
    large = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    large.load_state_dict(weights)
    large.generation_config = small.generation_config
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    found: int = large.num_parameters()
    return found


@command
def main() -> None:
    parser = Parser(
        prog="scripts.demo.inflate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SIZES, help="of the target")
    parser.add_argument("folder", type=Path, help="for target/ and auxiliary/")
    parser.add_argument("--pair", type=Path, default=DEMO / "pair", help="checkpoints that are copied")
    args = parser.parse_args()
    for role, parameters in zip(("target", "auxiliary"), SIZES[args.size], strict=True):
        found = inflate(args.pair / role, args.folder / role, parameters)
        print(f"{args.folder / role}: {found:,} parameters")


if __name__ == "__main__":
    main()
