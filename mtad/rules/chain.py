"""Rules for one drafted path, token by token. Node n of a chain is its token n + 1, and its parent is node n - 1."""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import after, log_prob
from mtad.rules.scored import draft_after, keep_residual, log_p_of, log_q_of


@compiled
def token_wise(row, scored, bonus):
    """Token-wise speculative sampling (arXiv 2211.17192, algorithm 1): lossless.

    A token is accepted with probability min(1, p/q); at the first rejection the bonus token comes from the residual
    max(p - q, 0), after full acceptance from p.
    """
    for node in range(int(scored.drafted.sum())):
        if not scored.accept[node] < ratio_of(scored, node):
            return keep_residual(scored, node - 1, 1.0, bonus)
    return int(scored.drafted.sum()) - 1


@compiled
def ensemble(row, scored, bonus):
    """Static ensemble verification (arXiv 2604.07622): `token_wise` against w p + (1 - w) q, w being the threshold.

    A drafted token is so distributed as that mixture, whose residual max(w p + (1 - w) q - q, 0) is w max(p - q, 0);
    after full acceptance the bonus token comes from p, as in Hugging Face's `assistant_ensemble_weight`. At temperature
    0, drafted tokens that are the mixture's most likely ones are kept. Nothing that constraints forbid is, which a
    looked-up draft does not know of.
    """
    w = row.threshold
    for node in range(int(scored.drafted.sum())):
        possible = scored.p.logits[scored.parents[node] + 1, scored.tokens[node]] != -math.inf
        if row.greedy:
            if not (possible and leads_mixture(scored, node, w)):
                return node - 1
        elif not (possible and scored.accept[node] < w * ratio_of(scored, node) + (1.0 - w)):
            return keep_residual(scored, node - 1, 1.0, bonus)
    return int(scored.drafted.sum()) - 1


@compiled
def relaxed(row, scored, bonus):
    """Relaxed acceptance, as TensorRT-LLM has it for the thoughts of reasoning models, with its names.

    A token passes if it is among the target's `relaxed_topk` most likely ones, and its probability at most
    `relaxed_delta`, the threshold, below the first one's. The target adds its own sample.
    """
    length = 0
    while length < int(scored.drafted.sum()):
        ids, log_p = after(scored.p, length - 1)
        own = log_prob(ids, log_p, scored.tokens[length])
        close = math.exp(np.float64(log_p.max())) - math.exp(own) <= row.threshold
        if not (own > -math.inf and close and rank_of(ids, log_p, scored.tokens[length], own) < row.relaxed_topk):
            break
        length += 1
    return length - 1


@compiled
def ratio_of(scored, node):
    """The ratio p / q of a node's token."""
    return math.exp(min(log_p_of(scored, node) - log_q_of(scored, node), 700.0))


@compiled
def rank_of(ids, log_p, token, own):
    """How many tokens are likelier than `token`, whose log-probability is `own`, or as likely with a smaller id."""
    rank = 0
    for at in range(len(ids)):
        rank += log_p[at] > own or (log_p[at] == own and ids[at] < token)
    return rank


@compiled
def leads_mixture(scored, node, w):
    """Whether no token is likelier under w p + (1 - w) q than the node's own."""
    ids, log_p = after(scored.p, node - 1)
    q_ids, log_q = draft_after(scored, node - 1)
    own = w * math.exp(log_p_of(scored, node)) + (1.0 - w) * math.exp(log_q_of(scored, node))
    for at in range(len(ids)):
        if w * math.exp(np.float64(log_p[at])) + (1.0 - w) * math.exp(log_prob(q_ids, log_q, ids[at])) > own:
            return False
    for at in range(len(q_ids)):
        if w * math.exp(log_prob(ids, log_p, q_ids[at])) + (1.0 - w) * math.exp(np.float64(log_q[at])) > own:
            return False
    return True
