"""Attention in linear time: sums over the keys that all queries share.

    y_t = Σ_s (q_t·k_s)·v_s = q_t·S,   S = Σ_s k_s ⊗ v_s,   over all positions s, or with a running sum over s ≤ t

``kernel_attention`` divides by the sum of the weights, which come as logarithms, so that no query or key is too large
for it, and no stabilizer looks at what a query must not see.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longlens.ops.checks import at_least_float32, no_autocast
from longlens.ops.scan import linear_scan

CHUNK = 64  # within a chunk all pairs, 64·L products; between chunks L / 64 states


@no_autocast
def causal_product(query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None = None) -> Tensor:
    """y_t = Σ_{s ≤ t} (q_t·k_s)·v_s, in float32 at least, for query and key (..., L, F), value (..., L, E).

    ``log_scale`` are logarithms c, (..., L), for keys e^{c_s}·k_s that could overflow; y_t is then relative to the
    largest scale so far, Σ_{s ≤ t} e^{c_s - max_{r ≤ t} c_r}·(q_t·k_s)·v_s. They take no gradient."""
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    length = query.shape[-2]
    if length == 0:
        return value.clone()
    chunk = min(CHUNK, length)
    q, k, v = (in_chunks(x, chunk) for x in (query, key, value))  # (..., n, C, ·)
    pairs = q @ k.mT  # (..., n, C, C)
    if log_scale is None:
        states = before((k.mT @ v).cumsum(-3))  # (..., n, F, E): what all earlier chunks add up to
        return (pairs.tril() @ v).add_(q @ states).flatten(-3, -2)[..., :length, :]
    within, leaving, arriving, kept = _weights(at_least_float32(log_scale.detach()), chunk)
    sums = (k * leaving).mT @ v
    # A scan wants (B, n, F·E).
    flat = [x.flatten(-2).flatten(0, -3) for x in (kept.expand_as(sums), sums)]
    states = before(linear_scan(*flat).view_as(sums))
    return ((pairs * within) @ v).add_((q * arriving) @ states).flatten(-3, -2)[..., :length, :]


def causal_product_reference(query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor | None = None) -> Tensor:
    """The same by its definition, with an L×L matrix."""
    weights = (query @ key.mT).tril()
    if log_scale is not None:
        scale = log_scale.unsqueeze(-2) - log_scale.cummax(-1).values.unsqueeze(-1)
        weights = weights * scale.clamp_max(0.0).exp()  # the scales of s ≤ t are all at most 0
    return weights @ value


def causal_step(
    query: Tensor, key: Tensor, value: Tensor, scale: Tensor, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One position of ``causal_product``, (..., E), with a log scale (...), and the next state: the sum so far,
    (..., F, E), and its log scale; None at the start."""
    new = key.unsqueeze(-1) * value.unsqueeze(-2)
    if state is not None:
        before, old = state
        largest = torch.maximum(old, scale)
        new = before * (old - largest).exp()[..., None, None] + new * (scale - largest).exp()[..., None, None]
        scale = largest
    return (query.unsqueeze(-1) * new).sum(-2), (new, scale)


@no_autocast
def kernel_attention(
    log_query: Tensor, log_key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """Attention whose weights, before they are divided by their sum, are w_ts = Σ_f exp(log_query_tf + log_key_sf), in
    float32 at least. The logarithms of positive features are (B, H, L, F), the values (B, H, L, E). ``mask`` (B, L) is
    True for the keys that count; if none counts, all do."""
    log_query, log_key, value = (at_least_float32(x) for x in (log_query, log_key, value))
    if value.shape[-2] == 0:
        return value.clone()
    log_key = _hide(log_key, mask)
    if is_causal:
        query, key, scale = scaled_features(log_query, log_key)
        sums = causal_product(query, key, F.pad(value, (0, 1), value=1.0), scale)
        return sums[..., :-1] / sums[..., -1:]
    # Each feature has a total over the keys and a mean of their values; a query chooses among features.
    largest = log_key.detach().amax(-2, keepdim=True)  # (B, H, 1, F)
    sums = (log_key - largest).exp_().mT @ F.pad(value, (0, 1), value=1.0)  # (B, H, F, E + 1)
    total, mean = sums[..., -1:], sums[..., :-1] / sums[..., -1:]  # the total is at least 1
    return torch.softmax(log_query + (largest + total.log().mT), dim=-1) @ mean


def kernel_attention_reference(
    log_query: Tensor, log_key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """The same by its definition, with an L×L matrix."""
    log_weights = torch.logsumexp(log_query.unsqueeze(-2) + _hide(log_key, mask).unsqueeze(-3), dim=-1)  # (B, H, L, L)
    if is_causal:
        log_weights = log_weights.masked_fill(torch.ones_like(log_weights, dtype=torch.bool).triu(1), -torch.inf)
    return log_weights.softmax(-1) @ value


def scaled_features(log_query: Tensor, log_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For a running sum: features of at most 1, each query's and each key's divided by their largest, and the
    logarithm of that of the keys. That of the queries is in numerator and denominator."""
    scale = log_key.detach().amax(-1, keepdim=True)
    # A query may be large only where a key underflows: what is added is nothing, except that their product is not 0.
    key = (log_key - scale).exp() + torch.finfo(log_key.dtype).tiny ** 0.5
    return (log_query - log_query.detach().amax(-1, keepdim=True)).exp(), key, scale.squeeze(-1)


def _hide(log_key: Tensor, mask: Tensor | None) -> Tensor:
    """Keys that do not count get features so small that they vanish beside any other: finite ones, unlike -inf, give
    no NaN where there are no others."""
    if mask is None:
        return log_key
    return log_key.masked_fill(~mask[:, None, :, None], torch.finfo(log_key.dtype).min / 4)


def _weights(log_scale: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The factors, of at most 1, from the scale of a key or a state to that of a query or a later state."""
    largest = log_scale.cummax(-1).values
    own, so_far = (  # (..., n, C), after the end as at the end
        torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -x.shape[-1] % chunk)], dim=-1).unflatten(-1, (-1, chunk))
        for x in (log_scale, largest)
    )
    last = so_far[..., -1:]  # (..., n, 1): the scale of a chunk's state
    before = torch.cat([torch.full_like(last[..., :1, :], -torch.inf), last[..., :-1, :]], dim=-2)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=log_scale.device).triu(1)
    within = (own.unsqueeze(-2) - so_far.unsqueeze(-1)).masked_fill_(future, -torch.inf).exp_()  # (..., n, C, C)
    leaving, arriving = (own - last).exp().unsqueeze(-1), (before - so_far).exp().unsqueeze(-1)  # (..., n, C, 1)
    return within, leaving, arriving, (before - last).exp().unsqueeze(-1)


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(..., L, d) -> (..., n, C, d), with zeros after the end."""
    rest = -x.shape[-2] % chunk
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(-2, (-1, chunk))


def before(states: Tensor) -> Tensor:
    """(..., n, F, E): for each chunk the state of the one before it; 0 without one."""
    return torch.cat([torch.zeros_like(states[..., :1, :, :]), states[..., :-1, :, :]], dim=-3)
