"""Next-token distributions that no top-k cuts down to a short list: the logits, and what the filter makes of them.

Nothing is sorted, no token has noise of its own, and nothing but a few numbers and the mass of each block of tokens is
stored. A token is drawn in two steps: its block, then the token in the block.

An example with 8 tokens in 2 blocks of 4, at temperature 1 with `top_p` 0.8. The tokens have probabilities
0.4, 0, 0.1, 0.1 | 0, 0.3, 0.1, 0 before the filter. Most likely first, 0.4 + 0.3 + 0.1 reach 0.8, so tokens 0, 5 and 2
are kept: `lowest` is the logit of token 2. Tokens 3 and 6 have the same logit, but larger ids, so `last` is 2. The
*mass* of a block is the probability of its kept tokens together: (0.4 + 0.1) / 0.8 and 0.3 / 0.8, of which `blocks` has
the logarithms. An *entry* is one token of one block; `entries` gives the log-probabilities of all entries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import Candidates, invert
from mtad.distributions.prefix import filter_on_host, kept_tokens, log_prob_on_host, share, softmax
from mtad.ops import index
from mtad.rows import BLOCK, Rows, blocks_of

T = TypeVar("T", Candidates, "Table", "Candidates | Table")


class Table(NamedTuple):
    """Filtered distributions, in the order of the token ids. It has the attributes of `Candidates` with K = V.

    Attributes:
        logits: float [..., V], the model's; whoever keeps a table longer than they last copies them first.
        inverse_temperature: float32 [..., 1].
        largest: float32 [..., 1], the largest logit.
        lowest: float32 [..., 1], the smallest logit that the filter keeps; -inf for all.
        last: int64 [..., 1], of the tokens with that logit, the largest id that is kept.
        log_total: float32 [..., 1], what normalises.
        blocks: float32 [..., ceil(V / BLOCK)], logarithm of each block's mass; at temperature 0, where what is drawn is
            the most likely, that of its most likely token.
    """

    logits: Tensor
    inverse_temperature: Tensor
    largest: Tensor
    lowest: Tensor
    last: Tensor
    log_total: Tensor
    blocks: Tensor

    @property
    def ids(self) -> Tensor:
        """int64 [..., V], takes no memory."""
        return index(self.logits.shape[-1], self.logits.device).expand(self.logits.shape)

    @property
    def log_prob(self) -> Tensor:
        """float32 [..., V]; -inf for a token that was filtered out. Takes memory and time: ask for few nodes."""
        if self.logits.device.type == "cpu":
            return log_prob_on_host(*self[:-1])
        return self._value(self.logits, self.ids)

    @property
    def most(self) -> Tensor:
        """Log-probability of the most likely token, [...]."""
        return -self.log_total.squeeze(-1)

    @property
    def log_sum(self) -> Tensor:
        """Logarithm of the sum of the logits' exponentials, [...], where `lowest` says that all are kept; else nan."""
        unfiltered = (self.lowest == -math.inf) & (self.inverse_temperature == 1) & (self.log_total < math.inf)
        return torch.where(unfiltered, self.largest + self.log_total, math.nan).squeeze(-1)

    def at(self, tokens: Tensor) -> Tensor:
        """log-probability of `tokens` [...], -inf where the filter removed them."""
        tokens = tokens.unsqueeze(-1)
        return self._value(self.logits.gather(-1, tokens), tokens).squeeze(-1)

    def below(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """log-probability of `tokens` [R, N] after positions `parents` [R, N] of the S there are."""
        size = self.logits.shape[-1]
        logits = self.logits.flatten(1).gather(1, parents * size + tokens)
        return self.numbers(parents)._value(logits[:, :, None], tokens[:, :, None]).squeeze(-1)

    def leads(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Whether `tokens` [...] are among the `count` [..., 1] most likely ones."""
        own = self.logits.gather(-1, tokens.unsqueeze(-1))
        before = (self.logits > own) | ((self.logits == own) & (self.ids < tokens.unsqueeze(-1)))
        return before.sum(-1) < count

    def among(self, ids: Tensor, vocab: int) -> Tensor:
        """log-probability of every token: what else could be asked for is a table as well."""
        return self.log_prob

    def pick(self, at: Tensor) -> Table:
        """The distributions at positions `at` [R, W] of the S there are."""
        return self.numbers(at)._replace(logits=positions(self.logits, at))

    def numbers(self, at: Tensor) -> Table:
        """`pick` without the logits."""
        rest = (x.gather(1, at[:, :, None].expand(-1, -1, x.shape[2])) for x in self[1:])
        return Table(self.logits, *rest)

    def entries(self, at: Tensor, block: Tensor) -> Tensor:
        """log-probability of each token of block `block` [R, M] at position `at` [R, M]: [R, M, BLOCK]."""
        size = self.logits.shape[-1]
        tokens = block[:, :, None] * BLOCK + index(BLOCK, block.device)
        inside = tokens < size
        tokens = tokens.clamp(max=size - 1)
        logits = self.logits.flatten(1).gather(1, (at[:, :, None] * size + tokens).flatten(1)).view_as(tokens)
        return self.numbers(at)._value(logits, tokens).masked_fill(~inside, -math.inf)

    def _value(self, logits: Tensor, tokens: Tensor) -> Tensor:
        values = (logits.float() - self.largest) * self.inverse_temperature - self.log_total
        kept = (logits > self.lowest) | ((logits == self.lowest) & (tokens <= self.last))
        return values.masked_fill_(~kept, -math.inf)


Distributions = Candidates | Table


def part(of: T, which: Callable[[Tensor], Tensor]) -> T:
    """The same part of each of its tensors, which have the same leading axes."""
    return type(of)(*map(which, of))


def tabulate(logits: Tensor, rows: Rows, wanted: Tensor | None = None) -> Table:
    """What `mtad.distributions.candidates.process` does, for rows whose distributions are tables.

    On a device, all at once and without the host; on the host, only those of the rows concerned.

    Args:
        logits: float [R, S, V].
        wanted: bool [R, S], the distributions that are looked at; by default all.

    Returns:
        [R, S] distributions; anything for other rows and for those that are not wanted.
    """
    if logits.device.type != "cpu":
        return tabulate_at_once(logits, rows)
    scale = rows.inverse_temperature.expand(-1, logits.shape[1], -1)
    wanted = torch.ones(logits.shape[:2], dtype=torch.bool) if wanted is None else wanted
    return Table(logits, scale, *filter_on_host(logits, rows, wanted))


def tabulate_at_once(logits: Tensor, rows: Rows) -> Table:
    """In a fixed number of passes over all distributions."""
    count, positions, size = logits.shape
    scale, greedy = rows.inverse_temperature.expand(-1, positions, -1), rows.greedy[:, :, None]
    largest = logits.amax(-1, keepdim=True).float()
    weights = ((logits - largest) * scale).exp()
    kept = kept_tokens(logits.float(), weights, torch.ones_like(weights), rows.top_k)
    weights = weights * kept
    kept = kept & kept_tokens(logits.float(), weights, weights, rows.top_p * weights.sum(-1, keepdim=True))
    weights = weights * (kept & (weights >= rows.min_p))
    lowest = logits.masked_fill(weights == 0, math.inf).amin(-1, keepdim=True).float()
    last = (index(size, logits.device) * ((logits == lowest) & (weights > 0))).amax(-1, keepdim=True)
    table = pad(weights, (0, -size % BLOCK)).view(count, positions, blocks_of(size), BLOCK)
    mass = torch.where(greedy, table.amax(-1), table.sum(-1))
    log_total = weights.sum(-1, keepdim=True).log()
    return Table(logits, scale, largest, lowest, last, log_total, mass.log() - log_total)


def positions(logits: Tensor, at: Tensor) -> Tensor:
    """Logits [R, S, V] at positions `at` [R, W]: [R, W, V]. Copied as a whole; `gather` would take token by token.

    A single one on the host is not copied.
    """
    if at.numel() == 1 and logits.device.type == "cpu":
        return logits.narrow(1, int(at), 1)
    start = index(len(logits), at.device, logits.shape[1])[:, None]
    return logits.flatten(0, 1).index_select(0, (at + start).flatten()).view(*at.shape, -1)


def log_likelihood(logits: Tensor, at: Tensor, tokens: Tensor, wanted: Tensor, table: Table | None) -> Tensor:
    """Log-probability of tokens under the model itself, without filter and at temperature 1: float32 [R, M].

    Args:
        logits: float [R, S, V].
        at: int64 [R, M], positions among the S.
        tokens: int64 [R, M], one at each.
        wanted: bool [R, M]; on the host, the others are anything.
        table: [R, S], made of these logits; None where it was made of others. Where nothing was filtered it has the sum
            that normalises already.
    """
    size = logits.shape[-1]
    own = logits.flatten(1).gather(1, at * size + tokens).float()
    if logits.device.type != "cpu":
        chosen = logits if at.shape[1] == logits.shape[1] else positions(logits, at)  # all of a chain's, in order
        return own - chosen.float().logsumexp(-1)
    known = torch.full(at.shape, math.nan) if table is None else table.log_sum.gather(1, at)
    computed = torch.ones(2, *at.shape)
    given, (largest, total) = logits.float().numpy(), computed.numpy()

    def work(places: Iterator[tuple[int, int, int]]) -> None:
        for row, number, position in places:
            values = given[row, position]
            best = int(values.argmax())
            most = largest[row, number] = float(values[best])
            total[row, number] = 1 / float(softmax(values, most, 1)[0][best])

    rows, numbers = (wanted & known.isnan()).nonzero().unbind(1)
    share(work, list(zip(rows.tolist(), numbers.tolist(), at[rows, numbers].tolist(), strict=True)))
    return own - torch.where(known.isnan(), computed[0] + computed[1].log(), known)  # the same bits, whichever it is


def draw_one(table: Table, at: Tensor, noise: Tensor, greedy: Tensor) -> Tensor:
    """A token of each row of a table [R, S] at position `at` [R, 1], int64 [R]; the others as of `draw_from`."""
    blocks = table.blocks.gather(1, at[:, :, None].expand(-1, -1, table.blocks.shape[2]))
    block, rest = descend(blocks.squeeze(1).exp(), noise, greedy)
    own = table.entries(at, block).squeeze(1).exp()
    return _token(block, descend(own, rest, greedy)[0], table.logits.shape[-1]).squeeze(1)


def draw_from(weights: Tensor, noise: Tensor, greedy: Tensor) -> Tensor:
    """A token of each row of weights, int64 [R, 1].

    Args:
        weights: float32 [R, V], >= 0, any scale, at least one positive.
        noise: uniform [0, 1) [R].
        greedy: bool [R, 1], rows that take the most likely token.
    """
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    block, rest = descend(torch.where(greedy, blocks.amax(-1), blocks.sum(-1)), noise, greedy)
    own = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    return _token(block, descend(own, rest, greedy)[0], weights.shape[1])


def _token(block: Tensor, entry: Tensor, size: int) -> Tensor:
    """A block's entry as a token; one of the vocabulary also where weights are not numbers."""
    return (block * BLOCK + entry).clamp(max=size - 1)


def descend(mass: Tensor, noise: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of `mass` [R, N] that is drawn, int64 [R, 1], and what is left of the noise to draw within it, [R]."""
    entry = torch.where(greedy, mass.argmax(-1, keepdim=True), invert(mass, noise))
    before = torch.where(index(mass.shape[1], mass.device) < entry, mass, 0.0).sum(-1)
    rest = (noise * mass.sum(-1) - before) / mass.gather(1, entry).squeeze(1).clamp(min=1e-30)
    return entry, rest.clamp(0, 1 - 2.0**-24)
