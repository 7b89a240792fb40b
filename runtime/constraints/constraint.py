"""What each request asks of both models' logits, kept up with its text.

A `Constrainer` serves a pair, a `Constraint` one request that asks for something, a `Constraints` one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtad.constrain import Paths, Penalties, Terms, barrier, constrain
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.follower import Follower, Grammar
from runtime.constraints.grammar import Grammars

_LARGEST_BIAS, _LARGEST_REPETITION = 1e9, 1e6  # beyond, float32 logits could overflow


class ConstraintFailed(InvalidInput):
    """A request's text reached a point where its own constraints allow no token, or take too long.

    Args:
        name: of the request.
        cause: which of its fields is wrong, and where.
    """

    def __init__(self, name: object, cause: InvalidInput) -> None:
        self.name = name
        super().__init__(cause.field, cause.value, cause.problem)


class Constrainer:
    """Makes the constraints of one pair's requests. Safe to share between threads.

    Args:
        tokenizer: the pair's; looked at when the first request with a grammar comes.
        vocab_size: V.
        eos: tokens that end a text.
        device: of the logits.

    Attributes:
        grammars: compiles the languages of constrained requests.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.eos = torch.tensor(list(eos), dtype=torch.int64, device=device)
        self.zeros = torch.zeros(vocab_size, device=device)
        self.unseen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.grammars = Grammars(tokenizer, vocab_size, eos)

    def check(self, params: DecodingParams) -> Grammar | None:
        """Refuse constraints that cannot be kept; to be called before a request is queued.

        Returns:
            the compiled language of a constrained request.

        Raises:
            InvalidInput: a biased token does not exist; a number would overflow; or as in `Grammars.compile`.
        """
        self._check_numbers(params)
        return self.grammars.compile(params) if params.constrained else None

    async def check_soon(self, params: DecodingParams) -> Grammar | None:
        """The same, without a thread that waits for a compilation; see `Grammars.compile_soon`.

        Raises:
            InvalidInput: as `check`.
            Stopped: `grammars` was closed.
        """
        self._check_numbers(params)
        return await self.grammars.compile_soon(params) if params.constrained else None

    def _check_numbers(self, params: DecodingParams) -> None:
        for token, bias in params.logit_bias.items():
            if token >= self.vocab_size:
                problem = f"token ids are integers from 0 to {self.vocab_size - 1}; leave it out"
                raise InvalidInput("logit_bias", token, problem)
            if abs(bias) > _LARGEST_BIAS:
                raise InvalidInput("logit_bias", bias, f"give numbers from {-_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}")
        if not 1 / _LARGEST_REPETITION <= params.repetition_penalty <= _LARGEST_REPETITION:
            problem = f"give a number from {1 / _LARGEST_REPETITION:g} to {_LARGEST_REPETITION:g}"
            raise InvalidInput("repetition_penalty", params.repetition_penalty, problem)

    def constraint(
        self, name: object, params: DecodingParams, prompt: Sequence[int], grammar: Grammar | None = None
    ) -> Constraint | None:
        """The constraint of a request that starts to run; None if it asks for nothing.

        Args:
            name: of the request, for errors.
            params: what `check` accepted.
            prompt: token ids.
            grammar: what `check` returned; None asks it again.
        """
        if not (params.constrained or params.logit_bias or params.min_tokens or _penalises(params)):
            return None
        follower = None
        if params.constrained:
            grammar = grammar or self.grammars.compile(params)
            follower = Follower(grammar, self.vocab_size, self.grammars.eos, params)
        return Constraint(name, params, prompt, follower, self)


class Constraint:
    """What one running request asks of its logits; advanced as its tokens are committed.

    Attributes:
        name, params: of the request.
        generated: tokens of the text so far.
        bias: float32 [V], `logit_bias`; None without.
        counts: float32 [V], how often each token is in the text; None without penalties.
        seen: bool [V], whether it is in prompt or text; None without penalties.
        distinct: tokens in prompt or text, in the order they came; empty without penalties.
        follower: of the grammar; None without.
        constrainer: that made it.
    """

    def __init__(
        self,
        name: object,
        params: DecodingParams,
        prompt: Sequence[int],
        follower: Follower | None,
        constrainer: Constrainer,
    ) -> None:
        self.name, self.params, self.follower, self.constrainer = name, params, follower, constrainer
        self.generated = 0
        self.bias: Tensor | None = None
        self.counts: Tensor | None = None
        self.seen: Tensor | None = None
        self.distinct: dict[int, None] = {}
        if params.logit_bias:
            self.bias = constrainer.zeros.clone()
            self.bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values())).to(self.bias)
        if _penalises(params):
            self.counts, self.seen = constrainer.zeros.clone(), constrainer.unseen.clone()
            self.seen[list(prompt)] = True
            self.distinct.update(dict.fromkeys(prompt))

    def advance(self, tokens: Sequence[int]) -> None:
        """Append committed tokens: those of the block that the text keeps, an end-of-sequence token included.

        Raises:
            ConstraintFailed: the text came to a dead end of its grammar (`runtime.constraints.grammar.Follower`). The
                request must be finished with this error; others are not affected.
        """
        self.generated += len(tokens)
        if self.counts is not None and self.seen is not None:
            at = torch.tensor(tokens, dtype=torch.int64, device=self.counts.device)
            self.counts.index_add_(0, at, torch.ones_like(at, dtype=self.counts.dtype))
            self.seen[at] = True
            self.distinct.update(dict.fromkeys(tokens))
        if self.follower is not None:
            problem = self.follower.advance(tokens)
            if problem is not None:
                raise ConstraintFailed(self.name, problem)

    @property
    def min_left(self) -> int:
        """Tokens needed before an end may follow; 0 with a grammar, which sees to it where an end is all it has."""
        return max(0, self.params.min_tokens - self.generated) if self.follower is None else 0


class Constraints:
    """The constraints of one block's rows, until one of them advances.

    Both models' logits go through `adjust` at every node of the token tree, before `mtad.distribution.process`.
    """

    def __init__(self, constraints: Sequence[Constraint | None]) -> None:
        rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
        self._members = [constraint for constraint in constraints if constraint is not None]
        shared = self._shared = self._members[0].constrainer
        self._rows = None if len(rows) == len(constraints) else torch.tensor(rows, device=shared.device)
        bias = min_left = None
        if any(member.bias is not None for member in self._members):
            bias = torch.stack([shared.zeros if m.bias is None else m.bias for m in self._members])
        if any(member.min_left for member in self._members):
            min_left = torch.tensor([member.min_left for member in self._members], device=shared.device)
        self._terms = Terms(bias, self._penalties(), shared.eos, min_left)

    @classmethod
    def of(cls, constraints: Sequence[Constraint | None]) -> Constraints | None:
        """The constraints of rows 0 .. R-1; None where no row has any."""
        return cls(constraints) if any(constraint is not None for constraint in constraints) else None

    def adjust(self, logits: Tensor, path_tokens: Tensor, valid: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits under each row's constraints: float32 [R, S, V]; the argument is not written to.

        A row's result does not depend, to the bit, on the other rows; rows without a constraint are unchanged.

        Args:
            logits: float [R, S, V], of either model, after S nodes.
            path_tokens, valid: int64 and bool [R, S, D], `mtad.constrain.Paths` of the nodes; the valid ones first.
            out: float32 [R, S, V], where the result is written; None for new memory.
        """
        out = torch.empty(logits.shape, device=logits.device) if out is None else out
        if self._rows is None:
            paths = Paths(path_tokens, valid)
            return constrain(logits.float(), paths, self._terms, self._barrier(paths), out)
        paths, own = Paths(path_tokens[self._rows], valid[self._rows]), logits[self._rows].float()
        out.copy_(logits)
        return out.index_copy_(0, self._rows, constrain(own, paths, self._terms, self._barrier(paths), own))

    def _penalties(self) -> Penalties | None:
        members, shared = self._members, self._shared
        if all(member.counts is None for member in members):
            return None
        params = [member.params for member in members]
        numbers = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        repetition, presence, frequency = torch.tensor(numbers, dtype=torch.float32, device=shared.device).unbind(1)
        # padded to a power of two, so that a text that grows brings few shapes
        length = 1 << max(len(member.distinct) for member in members).bit_length()
        tokens = np.zeros((len(members), length), dtype=np.int64)
        for row, member in zip(tokens, members, strict=True):
            row[: len(member.distinct)] = list(member.distinct)
        return Penalties(
            repetition,
            presence,
            frequency,
            counts=torch.stack([shared.zeros if m.counts is None else m.counts for m in members]),
            seen=torch.stack([shared.unseen if m.seen is None else m.seen for m in members]),
            tokens=torch.from_numpy(tokens).to(shared.device),
        )

    def _barrier(self, paths: Paths) -> Tensor | None:
        """What the grammars forbid after each node, `mtad.constrain.barrier`; None where no row has a grammar."""
        if all(member.follower is None for member in self._members):
            return None
        rows, nodes, _ = paths.tokens.shape
        bits = np.full((rows, nodes, -(-self._shared.vocab_size // 8)), 255, dtype=np.uint8)
        table = zip(self._members, bits, paths.tokens.tolist(), paths.valid.sum(-1).tolist(), strict=True)
        for member, row, tokens, lengths in table:
            if member.follower is not None:
                for node, (path, length) in enumerate(zip(tokens, lengths, strict=True)):
                    row[node] = member.follower.allowed(tuple(path[:length]))
        return barrier(torch.from_numpy(bits).to(self._shared.device), self._shared.vocab_size)


def _penalises(params: DecodingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
