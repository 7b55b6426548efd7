"""Has the gated delta rule in torch: chunked for training, one token at a time for generation.

    D = exp(g) * S;  delta = beta * (v - D^T k);  S = D + k delta^T;  o = S^T q / sqrt(S_k)

The chunked form (Gated DeltaNet, arXiv 2412.06464) is matmuls only. Within a chunk the triangular
system (I + A) X = [beta v | beta exp(c) k] is solved by its explicit inverse; between chunks the state
obeys S' = M S + N with M and N of all chunks computed at once, so the sequential part is one baddbmm
for each chunk. Everything that decays or accumulates is F32, the matmuls take `v.dtype`.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def l2norm(x: Tensor) -> Tensor:
    """Computes F32 x / sqrt(sum(x^2) + 1e-6) over the last axis. That is the model's constant, not the RMS
    epsilon."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def small_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Computes x @ y in true F32 whatever the TF32 setting, for blocks of at most 16 x 16."""
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


def _blocks(a: Tensor, size: int, row: int, step: int) -> Tensor:
    """Blocks (i*step + row, i*step) of a (n, C, C) in units of `size`: (n, C/(size*step), size, size)."""
    n, c, _ = a.shape
    count = c // (size * step)
    tiles = a.view(n, count, step, size, count, step, size)[:, :, row, :, :, 0, :]
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def inverse_of_unit_lower(a: Tensor) -> Tensor:
    """Computes (I + a)^-1 for strictly lower a (n, C, C), F32, with C a power of two from 8 on.

    It takes Neumann's product on 8 x 8 diagonal blocks, where its powers cannot grow large, then merges pairs
    of blocks. So it is stable also where all keys of a chunk are alike.
    """
    eye = torch.eye(8, dtype=a.dtype, device=a.device)
    base = _blocks(a, 8, 0, 1)  # (n, C/8, 8, 8)
    square = small_matmul(base, base)
    fourth = small_matmul(square, square)
    t = small_matmul(small_matmul(eye - base, eye + square), eye + fourth)
    size = 8
    while size < a.shape[-1]:
        mm = small_matmul if size <= 8 else torch.matmul
        low = _blocks(a, size, 1, 2)  # (n, C/(2 size), size, size)
        upper, lower = t[:, 0::2], t[:, 1::2]
        corner = -mm(mm(lower, low), upper)
        top = torch.cat([upper, torch.zeros_like(upper)], -1)
        t = torch.cat([top, torch.cat([corner, lower], -1)], -2)
        size *= 2
    return t[:, 0]


class _Inverse(torch.autograd.Function):
    """Computes inverse_of_unit_lower and keeps its result T in `dtype`. The backward is -T^T dT T^T."""

    @staticmethod
    def forward(ctx, a: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        t = inverse_of_unit_lower(a).to(dtype)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, dt: Tensor):  # type: ignore[override, no-untyped-def]
        (t,) = ctx.saved_tensors
        tt = t.transpose(-1, -2)
        return -(tt @ dt.to(t.dtype) @ tt).float().tril(-1), None


class _Scan(torch.autograd.Function):
    """States before each chunk and after the last: S_0 = first, S_{c+1} = m_c S_c + n_c.

    m, n: (B, NC, K, K), (B, NC, K, V) F32; first: (B, K, V). Returns (B, NC + 1, K, V)."""

    @staticmethod
    def forward(ctx, m: Tensor, n: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        states = [first]
        for c in range(m.shape[1]):
            states.append(torch.baddbmm(n[:, c], m[:, c], states[-1]))
        out = torch.stack(states, 1)
        ctx.save_for_backward(m, out)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):  # type: ignore[override, no-untyped-def]
        m, states = ctx.saved_tensors
        chunks = m.shape[1]
        grads = [d_out[:, chunks]]  # These are the gradients of S_{c+1}, from the last one back.
        for c in range(chunks - 1, -1, -1):
            grads.append(torch.baddbmm(d_out[:, c], m[:, c].transpose(-1, -2), grads[-1]))
        d_next = torch.stack(grads[:-1][::-1], 1)  # (B, NC, K, V)
        d_m = d_next @ states[:, :-1].transpose(-1, -2)
        return d_m, d_next, grads[-1]


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the rule by chunks over q, k (B, T, Hk, K), raw; v (B, T, Hv, V); g, beta (B, T, Hv) F32. T is a
    multiple of CHUNK, and v head h has k head h // (Hv / Hk). Returns o (B, T, Hv, V) in v's type and the
    last state (B, Hv, K, V) F32."""
    b, t, hk, dk = q.shape
    hv, dv = v.shape[2:]
    r, nc, dtype = hv // hk, t // CHUNK, v.dtype

    def by_chunk(x: Tensor, heads: int) -> Tensor:  # (B, T, H, D) -> (B, H, NC, C, D)
        return x.view(b, nc, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    q = by_chunk(l2norm(q) * dk**-0.5, hk)
    k = by_chunk(l2norm(k), hk)
    v = by_chunk(v, hv).reshape(b, hk, r, nc, CHUNK, dv)
    g, beta = (x.view(b, nc, CHUNK, hk, r).permute(0, 3, 4, 1, 2) for x in (g, beta))  # (B,Hk,R,NC,C)
    total = g.cumsum(-1)  # It is the log decay since the chunk's start, with this row's.
    q16, k16 = q.to(dtype), k.to(dtype)
    kk = (k16 @ k16.transpose(-1, -2)).unsqueeze(2)  # (B, Hk, 1, NC, C, C)
    qk = (q16 @ k16.transpose(-1, -2)).unsqueeze(2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    a = (kk * decay * beta.unsqueeze(-1)).tril(-1)  # (B, Hk, R, NC, C, C)
    inverse = _Inverse.apply(a.reshape(-1, CHUNK, CHUNK), dtype)
    attn = (qk * decay).to(dtype).reshape(-1, CHUNK, CHUNK)

    grown = total.exp().unsqueeze(-1)  # (B, Hk, R, NC, C, 1)
    k6 = k.unsqueeze(2)
    right = torch.cat([v * beta.unsqueeze(-1), k6 * (beta.unsqueeze(-1) * grown)], -1).to(dtype)
    x = inverse @ right.reshape(-1, CHUNK, dv + dk)  # [U | W] (n, C, V + K)
    y = attn @ x  # (n, C, V + K)
    last = total[..., -1:]
    k_last = (k6 * (last - total).exp().unsqueeze(-1)).to(dtype).reshape(-1, CHUNK, dk)
    z = (k_last.transpose(-1, -2) @ x).float().view(b * hv, nc, dk, dv + dk)
    kept = last.exp().reshape(b * hv, nc, 1, 1)
    m = kept * torch.eye(dk, dtype=torch.float32, device=q.device) - z[..., dv:]
    start = torch.zeros(b * hv, dk, dv, dtype=torch.float32, device=q.device)
    if first is not None:
        start = first.float().reshape(b * hv, dk, dv)
    states = _Scan.apply(m, z[..., :dv], start)  # (B*Hv, NC + 1, K, V)
    reads = (q.unsqueeze(2) * grown).reshape(-1, CHUNK, dk) - y[..., dv:]
    o = reads.to(dtype) @ states[:, :-1].reshape(-1, dk, dv).to(dtype) + y[..., :dv]
    o = o.view(b, hv, nc, CHUNK, dv).permute(0, 2, 3, 1, 4).reshape(b, t, hv, dv)
    return o, states[:, -1].view(b, hv, dk, dv)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs one row: q, k (B, Hk, K), raw; v (B, Hv, V); g, beta (B, Hv); state (B, Hv, K, V) F32. Returns o
    (B, Hv, V) in v's type and the new state."""
    r = v.shape[1] // q.shape[1]
    q = (l2norm(q) * q.shape[-1] ** -0.5).repeat_interleave(r, 1).unsqueeze(-1)  # (B, Hv, K, 1)
    k = l2norm(k).repeat_interleave(r, 1).unsqueeze(-1)
    decayed = g.exp()[..., None, None] * state
    delta = beta.unsqueeze(-1) * (v.float() - (decayed * k).sum(-2))
    state = decayed + k * delta.unsqueeze(-2)
    return (state * q).sum(-2).to(v.dtype), state
