"""Acceptance rules for one drafted path, token by token or as a whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import Candidates
from mtad.distributions.table import Distributions, Table, part
from mtad.ops import index, running_sum, total
from mtad.rows import Rows
from mtad.rules.scored import Chain, Scored, Verdict, after_node, plain


def token_wise(scored: Scored, rows: Rows) -> Verdict:
    """Token-wise speculative sampling (arXiv 2211.17192, algorithm 1).

    A token is accepted with probability min(1, p/q); at the first rejection the bonus token comes from the residual
    max(p - q, 0), after full acceptance from p. The output is distributed as the target's own samples.
    """
    chain = Chain.of(scored)
    return _residual(scored, chain, scored.noise.accept < (chain.log_p - chain.log_q).exp())


def block(scored: Scored, rows: Rows) -> Verdict:
    """Block verification (arXiv 2403.10444, algorithm 2): lossless, and joint.

    With w_i = min(w_{i-1} p_i / q_i, 1), w_0 = 1, and s_i the sum over tokens of max(w_i p - q, 0) after i tokens, the
    longest prefix with u_i < s_i / (s_i + 1 - w_i) is kept, or the whole draft if u < w. The bonus token comes from
    max(w_i p - q, 0), after full acceptance from p. Accepts no fewer tokens than `token_wise` in expectation.
    """
    return verify_block(scored, Chain.of(scored))


def verify_block(scored: Scored, chain: Chain) -> Verdict:
    """Block verification of a path that was drawn from `chain.q`, whatever that is."""
    walk = running_sum((chain.log_p - chain.log_q).masked_fill(~chain.drafted, 0.0))
    # w_i = min(w_{i-1} r_i, 1) keeps the walk of log r below 0: the walk, less its highest point so far
    levels = index(walk.shape[1], walk.device)
    highest = walk[:, None].masked_fill(levels > levels[:, None], 0.0).amax(-1).clamp(min=0)
    w = (walk - highest).exp()
    p = part(chain.after, lambda x: x[:, :-1])
    before = torch.cat([torch.ones_like(w[:, :1]), w[:, :-1]], 1)
    residual = (before[:, :, None] * p.log_prob.exp() - chain.q.among(p.ids, scored.vocab).exp()).clamp(min=0)
    # of the distributions after token i, which exist where the draft goes on behind it
    left = torch.cat([residual[:, 1:].sum(-1), torch.zeros_like(w[:, :1])], 1)
    goes_on = torch.cat([chain.drafted[:, 1:], torch.zeros_like(chain.drafted[:, :1])], 1)
    bound = torch.where(goes_on, left / (left + 1 - w).clamp(min=1e-30), w)
    length = ((chain.drafted & (scored.noise.accept < bound)) * (levels + 1)).amax(-1)
    node = chain.node(length)
    at = length.clamp(max=residual.shape[1] - 1)[:, None, None].expand(-1, 1, residual.shape[2])
    return _bonus(chain, node, length, after_node(scored.after, node), residual.gather(1, at).squeeze(1))


def threshold(scored: Scored, rows: Rows) -> Verdict:
    """A fixed ratio, token by token: p / q > `accept_threshold`, where `token_wise` draws the bound from U(0, 1)."""
    chain = Chain.of(scored)
    return _plain(scored, chain, chain.log_p - chain.log_q > rows.threshold)


def ensemble(scored: Scored, rows: Rows) -> Verdict:
    """Static ensemble verification (arXiv 2604.07622): `token_wise` against w p + (1 - w) q, w being the threshold.

    A drafted token is so distributed as that mixture, whose residual max(w p + (1 - w) q - q, 0) is w max(p - q, 0);
    after full acceptance the bonus token comes from p, as in Hugging Face's `assistant_ensemble_weight`. At temperature
    0, drafted tokens that are the mixture's most likely ones are kept.
    """
    chain, w = Chain.of(scored), rows.threshold
    p = part(chain.after, lambda x: x[:, :-1])
    # the drafted token is q's most likely one, so no token beyond p's candidates is likelier in the mixture
    mixed = w[:, :, None] * p.log_prob.exp() + (1 - w[:, :, None]) * chain.q.among(p.ids, scored.vocab).exp()
    likeliest = w * chain.log_p.exp() + (1 - w) * chain.log_q.exp() >= mixed.amax(-1)
    sampled = scored.noise.accept < w * (chain.log_p - chain.log_q).exp() + (1 - w)
    drawn = rows.drawn[:, None]
    return _residual(scored, chain, (drawn & sampled) | (~drawn & likeliest), rows.drawn)


def relaxed(scored: Scored, rows: Rows) -> Verdict:
    """Relaxed acceptance, as TensorRT-LLM has it for the thoughts of reasoning models, with its names.

    A token passes if it is among the target's `relaxed_topk` most likely ones, and its probability at most
    `relaxed_delta`, the threshold, below the first one's. The target adds its own sample; TensorRT-LLM adds its most
    likely token, as is done here at temperature 0.
    """
    chain = Chain.of(scored)
    p = part(chain.after, lambda x: x[:, :-1])
    close = p.most.exp() - chain.log_p.exp() <= rows.threshold
    return _plain(scored, chain, p.leads(chain.tokens, rows.rule_count) & close & (chain.log_p > -math.inf))


def fly(scored: Scored, rows: Rows) -> Verdict:
    """FLy (arXiv 2511.22972), as vLLM has it: `token_wise`, but some rejected tokens are kept.

    They are where the target is undecided, the sum of -p log p over its three most likely tokens being at least
    `fly_entropy_threshold`, the threshold, and the next `fly_window_size` tokens would all be accepted. At temperature
    0, a token is accepted if it is the target's most likely one.
    """
    chain, window = Chain.of(scored), rows.rule_count
    after, levels = part(chain.after, lambda x: x[:, :-1]), index(chain.drafted.shape[1], window.device)
    p = after.log_prob.topk(3).values if isinstance(after, Table) else after.log_prob
    drawn, ratio = rows.drawn[:, None], (chain.log_p - chain.log_q).exp()
    likeliest = after.leads(chain.tokens, torch.ones_like(window))
    native = chain.drafted & ((drawn & (scored.noise.accept < ratio)) | (~drawn & likeliest))
    before = pad(native.long().cumsum(-1), (1, 0))
    end = (levels + 1 + window).clamp(max=levels.shape[0])
    agrees = before.gather(1, end) - before[:, 1:] == window
    top = index(p.shape[2], p.device) < 3
    entropy = -total(p.exp() * p.clamp(min=-1e4) * top).squeeze(2)
    kept = native | (agrees & (entropy >= rows.threshold) & (chain.log_p > -math.inf))
    return _residual(scored, chain, kept, rows.drawn)


def bild(scored: Scored, rows: Rows) -> Verdict:
    """BiLD (arXiv 2302.07863): tokens that the target does not find too unlikely, as long as the auxiliary is sure.

    Fallback: a token is the target's to choose where the auxiliary's most likely one is less likely than
    `draft_confidence`. Rollback: the first token with -log p above `accept_threshold` goes, and all behind it.
    """
    chain = Chain.of(scored)
    sure = chain.q.most >= rows.log_fallback
    return _plain(scored, chain, sure & (-chain.log_p <= rows.threshold))


def whole(scored: Scored, rows: Rows) -> Verdict:
    """All that the target itself has drafted: the path's last token takes the bonus token's place."""
    chain = Chain.of(scored)
    count = chain.drafted.sum(-1)
    length = (count - 1).clamp(min=0)
    ids = chain.tokens.gather(1, length[:, None]).expand(-1, scored.after.ids.shape[2])
    return Verdict(chain.node(length), length, ids, (index(ids.shape[1], ids.device) == 0).float().expand_as(ids))


def _plain(scored: Scored, chain: Chain, passes: Tensor) -> Verdict:
    """The tokens before the first that fails, and the target's distribution behind them."""
    length = _until_first_failure(chain.drafted & passes)
    return plain(scored.after, chain.node(length), length)


def _residual(scored: Scored, chain: Chain, passes: Tensor, drawn: Tensor | None = None) -> Verdict:
    """The tokens before the first that fails, and max(p - q, 0) there; p in rows [R] where nothing is `drawn`."""
    length = _until_first_failure(chain.drafted & passes)
    node = chain.node(length)
    p = after_node(scored.after, node)
    q = _at(chain.q, length).among(p.ids[:, None], scored.vocab).squeeze(1)
    residual = (p.log_prob.exp() - q.exp()).clamp(min=0)
    return _bonus(chain, node, length, p, residual if drawn is None else residual * drawn[:, None])


def _bonus(chain: Chain, node: Tensor, length: Tensor, p: Candidates, residual: Tensor) -> Verdict:
    """The bonus from the residual where a drafted token was rejected, else from p.

    p == q up to rounding leaves no residual; a rejection then has probability ~0 and p itself is right.
    """
    at = length.clamp(max=chain.drafted.shape[1] - 1)[:, None]
    rejected = (length < chain.drafted.shape[1]) & chain.drafted.gather(1, at).squeeze(1) & (residual.sum(-1) > 0)
    return Verdict(node, length, p.ids, torch.where(rejected[:, None], residual, p.log_prob.exp()))


def _until_first_failure(passes: Tensor) -> Tensor:
    return ((~passes).long().cumsum(-1) == 0).sum(-1)


def _at(q: Distributions, length: Tensor) -> Distributions:
    """The draft's distribution behind `length` [R] tokens, or the last one: [R, 1, K]."""
    return q.pick(length.clamp(max=q.ids.shape[1] - 1)[:, None])
