"""One recurrence for every linear system, in float64, and its quadratic forms: the second opinion on the public code.

Shapes as the library has them: [tokens, heads of the operand, dim]; head h of the output reads head h / (heads / n) of
an operand with n heads. S [heads, features, value_dim], natural-log decays g <= 0.

    additive                    S' = Diag(exp g) S + k v^T                        o = scale S'^T q
    delta                       S~ = Diag(exp g) S; S' = S~ + k beta (v - S~^T k)^T             the same
    exclusive_bonus             S' = Diag(exp g) S + k v^T                        o = scale (S + Diag(u) k v^T)^T q
    diagonal_plus_low_rank      S' = Diag(exp g) S + d (a^T S) + k v^T            o = scale S'^T q
"""
import math

import torch


def spread(x, heads):
    """[tokens, x_heads, ...] -> [tokens, heads, ...]"""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def full_decay(decay, tokens, heads, features):
    """None, [heads], [tokens, gates, 1] or [tokens, gates, features] -> [tokens, heads, features]"""
    if decay is None:
        return torch.zeros(tokens, heads, features, dtype=torch.float64)
    if decay.ndim == 1:
        decay = decay[None, :, None].expand(tokens, -1, 1)
    return spread(decay, heads).expand(tokens, heads, features)


def recurrent(update, heads, scale, query, key, value, decay=None, beta=None, bonus=None, removal=None,
              replacement=None, state=None):
    """-> output [tokens, heads, value_dim], the state after the last token."""
    q, k, v = (spread(x, heads) for x in (query, key, value))
    alpha = full_decay(decay, *k.shape).exp()
    beta, removal, replacement = (None if x is None else spread(x, heads) for x in (beta, removal, replacement))
    S = torch.zeros(*k.shape[1:], v.shape[-1], dtype=torch.float64) if state is None else state
    outer = lambda a, b: a[:, :, None] * b[:, None, :]
    read = lambda S, x: torch.einsum("hfv,hf->hv", S, x)
    rows = []
    for t in range(len(q)):
        before, S = S, alpha[t][:, :, None] * S
        if update == "delta":
            S = S + outer(k[t], beta[t] * (v[t] - read(S, k[t])))
        else:
            S = S + outer(k[t], v[t])
        if update == "diagonal_plus_low_rank":
            S = S + outer(replacement[t], read(before, removal[t]))
        seen = before + outer(bonus * k[t], v[t]) if update == "exclusive_bonus" else S
        rows.append(scale * read(seen, q[t]))
    return torch.stack(rows), S


def quadratic(update, heads, scale, query, key, value, decay=None, beta=None, bonus=None, removal=None,
              replacement=None):
    """The whole history at once: scores with decay; for the delta rule and low rank one triangular system a head."""
    q, k, v = (spread(x, heads).transpose(0, 1) for x in (query, key, value))
    tokens, features = len(query), k.shape[-1]
    g = full_decay(decay, tokens, heads, features).transpose(0, 1)
    total = g.cumsum(1)

    def scores(x, y, of, strict=False):
        """sum_c x_tc y_sc exp(of_tc - total_sc) where s <= t, or s < t"""
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(-1 if strict else 0)[None, :, :, None]
        fade = (of[:, :, None] - total[:, None]).masked_fill(~seen, -math.inf).exp()
        return torch.einsum("htc,hsc,htsc->hts", x, y, fade)

    if update == "additive":
        return scale * (scores(q, k, total) @ v).transpose(0, 1)
    if update == "exclusive_bonus":
        own = (q * bonus[:, None] * k).sum(-1, keepdim=True) * v
        return scale * (scores(q, k, total - g, strict=True) @ v + own).transpose(0, 1)
    one = torch.eye(tokens, dtype=torch.float64)
    if update == "delta":
        b = spread(beta, heads).transpose(0, 1)
        written = torch.linalg.solve_triangular(one + b * scores(k, k, total, strict=True), b * v, upper=False)
        return scale * (scores(q, k, total) @ written).transpose(0, 1)
    a, d = (spread(x, heads).transpose(0, 1) for x in (removal, replacement))
    before = total - g  # a reads the state that has not decayed yet
    moved = torch.linalg.solve_triangular(one - scores(a, d, before, strict=True),
                                          scores(a, k, before, strict=True) @ v, upper=False)
    return scale * (scores(q, k, total) @ v + scores(q, d, total) @ moved).transpose(0, 1)
