"""Copies of a pair that compute what it computes and cost what larger models cost, for measuring speed.

    python -m scripts.demo.inflate 310M build/inflated      # build/inflated/target and build/inflated/auxiliary

Each layer's MLP gets more rows of gate and up weights (random) whose columns in the down projection are zero. The
logits stay the same up to the order of summation, while as many weights are read and multiplied as in the larger model.
So a small trained pair has its own, realistic acceptance at any size. Attention and the KV cache keep their size.
"""

from __future__ import annotations

import math
from pathlib import Path

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
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    small = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    weights = small.state_dict()
    widened = [name for name in weights if name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight"))]
    if not widened:
        raise InvalidInput("checkpoint", str(source), "its MLPs have no gate, up and down projections to widen")
    missing = parameters - small.num_parameters()
    if missing <= 0:
        raise InvalidInput("parameters", parameters, f"{source} has {small.num_parameters()} already; ask for more")
    config = AutoConfig.from_pretrained(source)
    per_unit = sum(weights[name].numel() for name in widened) // config.intermediate_size
    more = math.ceil(missing / per_unit)
    more += -(config.intermediate_size + more) % MULTIPLE
    config.intermediate_size += more
    random = torch.Generator().manual_seed(0)
    for name in widened:
        old = weights[name]
        if name.endswith("down_proj.weight"):
            weights[name] = torch.cat([old, old.new_zeros(len(old), more)], 1)
        else:
            added = 0.02 * torch.randn(more, old.shape[1], generator=random)
            weights[name] = torch.cat([old, added.to(old.dtype)])
    large = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    large.load_state_dict(weights)
    large.generation_config = small.generation_config
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return int(large.num_parameters())


@command
def main() -> None:
    parser = Parser(prog="scripts.demo.inflate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", choices=SIZES, help="of the target")
    parser.add_argument("folder", type=Path, help="for target/ and auxiliary/")
    parser.add_argument("--pair", type=Path, default=DEMO / "pair", help="checkpoints that are copied")
    args = parser.parse_args()
    for role, parameters in zip(("target", "auxiliary"), SIZES[args.size], strict=True):
        found = inflate(args.pair / role, args.folder / role, parameters)
        print(f"{args.folder / role}: {found:,} parameters")


if __name__ == "__main__":
    main()
