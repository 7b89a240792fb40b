"""What is trained and how: shapes, rates and lengths of every model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from scripts.demo import tokenizer

LONG = 2048
"""Tokens of a long row, and the context of the models."""


@dataclass(frozen=True)
class Recipe:
    """Shape of one model and how it is trained: `steps`, or a time; rates are peak values.

    With steps the rate warms up, stays level and falls in a straight line; within a time it falls along a cosine.
    """

    folder: str  # <pair>/<role>, the target of a guided auxiliary lies beside it
    config: PreTrainedConfig
    steps: int | None  # None: as many as a time allows
    sql_rows: int  # of the rows of a step; the rest is code
    rows: int = 8
    length: int = 512  # tokens a row
    at_once: int | None = None  # rows of one pass through the model, gradients are added up; None: all rows of a step
    guided_from: float | None = None  # step, or share of the time, from which the finished target's distribution is
    # learnt (distillation)
    long_every: int | None = None  # step, of which each is two rows of `LONG` tokens, see `batches.make_long`
    matrix_rate: float = 4e-3  # Muon, hidden matrices
    other_rate: float = 3e-3  # AdamW, embedding and norms
    warmup: int = 60  # steps
    decay: float = 0.5  # share of the steps over which the rate falls to zero
    weight_decay: float = 0.02
    seed: int = 1
    dtype: str = "float16"  # of the weights that are written

    def tokens(self, steps: int) -> int:
        """Seen in the first `steps` steps."""
        long = steps // self.long_every if self.long_every else 0
        return (steps - long) * self.rows * self.length + long * 2 * LONG


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int = tokenizer.VOCABULARY
) -> LlamaConfig:
    return LlamaConfig(
        **{**COMMON, "vocab_size": vocabulary},
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        rms_norm_eps=1e-5,
    )


COMMON: dict[str, Any] = {
    "vocab_size": tokenizer.VOCABULARY,
    "max_position_embeddings": LONG,
    "tie_word_embeddings": True,
    "bos_token_id": tokenizer.END_ID,
    "eos_token_id": tokenizer.END_ID,
    "pad_token_id": tokenizer.END_ID,
}
RECIPES = {
    # more SQL than code: finding the right column in an unseen schema is what takes longest to learn
    "target": Recipe("pair/target", _llama(256, 8, 4, 2, 768), steps=1600, rows=5, sql_rows=3, long_every=10),
    # more code than SQL: that is where its drafts are rejected most
    "auxiliary": Recipe(
        "pair/auxiliary",
        _llama(128, 2, 4, 2, 352),
        steps=640,
        rows=6,
        sql_rows=2,
        long_every=10,
        guided_from=280,
        matrix_rate=6e-3,
        decay=0.3,
        seed=2,
    ),
}


@dataclass(frozen=True)
class Size:
    """A pair of Python code alone, whatever the packages of a machine hold.

    `shapes` are the target's and the auxiliary's hidden size, layers, heads, KV heads and intermediate size; `at_once`
    is each one's rows of one pass.
    """

    vocabulary: int
    shapes: tuple[tuple[int, int, int, int, int], tuple[int, int, int, int, int]]
    rows: int
    length: int
    at_once: tuple[int, int]

    def recipe(self, role: str, vocabulary: int) -> Recipe:
        """Of `target` or `auxiliary`, with a tokenizer of so many tokens. The auxiliary learns from the target."""
        guided = role == "auxiliary"
        return Recipe(
            f"checkpoints/{role}",
            _llama(*self.shapes[guided], vocabulary=vocabulary),
            steps=None,
            sql_rows=0,
            rows=self.rows,
            length=self.length,
            at_once=self.at_once[guided],
            guided_from=0.5 if guided else None,
            matrix_rate=4e-3 if guided else 2e-3,
            other_rate=2e-3 if guided else 1e-3,
            seed=1 + guided,
            dtype="bfloat16",
        )


SIZES = {
    # 300 M and 20 M parameters. One pass of the target has 16 k tokens: an estimated 35 GB of activations
    "large": Size(16384, ((1024, 24, 16, 8, 2816), (512, 4, 8, 4, 1408)), rows=128, length=1024, at_once=(16, 32)),
    "tiny": Size(512, ((64, 2, 2, 1, 96), (32, 2, 2, 1, 64)), rows=4, length=128, at_once=(2, 4)),
}
"""Of `scripts.gpu.large_pair`. `large` was never executed: its rates are what is usual, not what was tuned."""
