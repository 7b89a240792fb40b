"""How logits become the distribution a token is drawn from, everywhere in the demo."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p on what is left; the demo's settings are the defaults."""

    temperature: float = 1.0
    top_k: int = 10
    top_p: float = 0.9

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities [..., V] from logits [..., V]; differentiable, as a fixed choice of tokens."""
        logits = logits.float() / self.temperature
        values, at = logits.topk(self.top_k, dim=-1)
        p = values.softmax(-1)
        p = torch.where(p.cumsum(-1) - p < self.top_p, p, 0.0)  # the token that crosses top_p is kept
        return torch.zeros_like(logits).scatter(-1, at, p / p.sum(-1, keepdim=True))
