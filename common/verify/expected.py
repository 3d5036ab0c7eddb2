"""The truth, and how far from it a correct kernel may stray: the error model of verify_results, element by element."""

import itertools
import math
from dataclasses import dataclass

from common.verify.reference import NEG_INF

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

E = 2.0**-24  # unit roundoff of fp32, in which every kernel accumulates
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: E}
HALF_SUBNORMAL = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
# The smallest normal fp32 number: what exp returns below it may be flushed to zero.
TINY = 2.0**-126

# P in e4m3, its largest near 2^7: rounded to 3 bits of mantissa, and below 2^-6 to a multiple of 2^-9.
U8, H8 = 2.0**-4, 2.0**-10 / 2.0**7
# Of sums of products of e4m3: Hopper's tensor cores keep 14 bits of the largest of 32 terms and the sum before.
E8, TERMS8 = 2.0**-13, 32

CHUNK_ELEMENTS = 2**21  # entries of S handled at once: keeps the fp64 temporaries near 300 MB
# Longer rows, without gradients: o and lse are checked on a sample of them.
SAMPLE_ABOVE_KEYS = 4096
SAMPLE_ROWS = 256


@dataclass
class Expected:
    """A tensor of a correct kernel, and the standard deviation of its rounding errors, in fp64."""

    truth: torch.Tensor
    sigma: torch.Tensor
    rows: torch.Tensor | None = None  # the query rows that truth and sigma cover; None: all

    @property
    def axes(self) -> int:
        return self.truth.dim()

    def of_rows(self, actual: torch.Tensor) -> torch.Tensor:
        """What of a whole result is compared."""
        return actual if self.rows is None else actual.index_select(2, self.rows)


def expected(q, k, v, do, is_causal, scale, in_e4m3=None) -> dict[str, Expected]:
    """Truth and sigma of every tensor, fp64. Works through one kv head and a chunk of query rows at a time.

    in_e4m3: (q, k, v) as an attention in e4m3 has rounded them, and may have rotated q and k; then they are what truth
    and sigma are of. There are no gradients.
    """
    dtype, head_dim = q.dtype, v.shape[3]
    if in_e4m3 is not None:
        q, k, v = in_e4m3
    batch, heads_q, seq_q, _ = q.shape
    heads_kv, seq_k = k.shape[1], k.shape[2]
    group = heads_q // max(1, heads_kv)
    rows = _sample_rows(seq_q) if do is None and seq_k > SAMPLE_ABOVE_KEYS else torch.arange(seq_q)
    rows = rows.to(q.device)
    u, h = UNIT_ROUNDOFF[dtype], HALF_SUBNORMAL[dtype]

    f64 = dict(dtype=torch.float64, device=q.device)
    shapes = dict(o=(batch, heads_q, len(rows), head_dim), lse=(batch, heads_q, len(rows)))
    if do is not None:
        shapes |= dict(dq=tuple(q.shape), dk=tuple(k.shape), dv=tuple(v.shape))
    truth = {name: torch.zeros(shape, **f64) for name, shape in shapes.items()}
    var = {name: torch.zeros(shape, **f64) for name, shape in shapes.items()}

    chunk = max(1, CHUNK_ELEMENTS // max(1, group * seq_k))
    for b, hk in itertools.product(range(batch), range(heads_kv)):
        heads = slice(hk * group, (hk + 1) * group)
        k1, v1 = k[b, hk].double(), v[b, hk].double()
        # Absolute values of the terms, over all query rows and heads of the group.
        sum_dk = sum_dv = shift_dk = lean_dk = 0.0
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            q1 = q[b, heads, rows[part]].double()  # (group, rows, head_dim)
            do1 = None if do is None else do[b, heads, rows[part]].double()
            mask = rows[part, None] >= torch.arange(seq_k, device=q.device) if is_causal else None
            t = _truth(q1, k1, v1, do1, mask, scale)
            if in_e4m3 is None:
                m = _variances(q1, k1, v1, do1, mask, scale, t, dtype)
            else:
                m = _variances_in_e4m3(q1, k1, v1, scale, t, dtype)
            for name in ("o", "lse", "dq") if do is not None else ("o", "lse"):
                truth[name][b, heads, part], var[name][b, heads, part] = t[name], m[name]
            if do is not None:
                for name in ("dk", "dv"):
                    truth[name][b, hk] += t[name]
                    var[name][b, hk] += m[name]
                sum_dk, sum_dv = sum_dk + m["sum_dk"], sum_dv + m["sum_dv"]
                shift_dk, lean_dk = shift_dk + m["shift_dk"], lean_dk + m["lean_dk"]
        if do is not None:
            error = sum_error(group * seq_q)
            var["dk"][b, hk] += u**2 * truth["dk"][b, hk] ** 2 + (error * sum_dk) ** 2
            var["dk"][b, hk] += shift_dk**2 + lean_dk**2
            var["dv"][b, hk] += u**2 * truth["dv"][b, hk] ** 2 + (error * sum_dv) ** 2
    for name in var:
        var[name] += (HALF_SUBNORMAL[torch.float32] if name == "lse" else h) ** 2
    sampled = rows if len(rows) < seq_q else None
    return {n: Expected(truth[n], var[n].sqrt(), sampled if n in ("o", "lse") else None) for n in truth}


def _truth(q, k, v, do, mask, scale) -> dict[str, torch.Tensor]:
    """SDPA (math, fp64) on one kv head: q (group, rows, head_dim); k, v (seq_k, head_dim); mask (rows, seq_k)."""
    grad = do is not None
    q, k, v = (t.detach().requires_grad_(grad) for t in (q, k, v))
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        wide = (t.expand(1, q.shape[0], *t.shape) for t in (k, v))
        o = F.scaled_dot_product_attention(q[None], *wide, attn_mask=mask, scale=scale)[0]
    s = scale * (q.detach() @ k.detach().T)
    if mask is not None:
        s = s.masked_fill(~mask, NEG_INF)
    result = dict(o=o.detach(), s=s, lse=torch.logsumexp(s, dim=-1))
    if grad:
        result |= zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True)
    return result


def sum_error(terms: int) -> float:
    """Error of an fp32 sum, in units of the sum of the terms' absolute values.

    Added up one after the other, as a chain of fused multiply-adds does, n terms are rounded n times. The roundings are
    independent, so that their effect grows like sqrt(n); measured on such chains of positive terms, it stays below.
    """
    return E * max(2.0, math.sqrt(terms) / 2)


def _variances(q, k, v, do, mask, scale, truth, dtype) -> dict[str, torch.Tensor]:
    """The squared rounding error of a correct kernel: every line names the rounding that it stands for."""
    u, h = UNIT_ROUNDOFF[dtype], HALF_SUBNORMAL[dtype]
    s, lse = truth["s"], truth["lse"]
    head_dim, seq_k = k.shape[1], k.shape[0]
    finite_lse = torch.where(lse.isfinite(), lse, 0.0)
    visible = torch.ones_like(s) if mask is None else mask.double().expand_as(s)
    p = torch.exp(s - torch.where(lse == NEG_INF, 0.0, lse)[..., None])
    logit_sum = abs(scale) * (q.abs() @ k.abs().T)
    # Relative error of P: the logit's fp32 sum, exp, and the LSE subtracted.
    rho = E * (2 + max(1.0, math.sqrt(head_dim) / 2) * logit_sum + finite_lse.abs()[..., None])
    rho = torch.where(p == 0, 0.0, rho)
    # P recomputed, and rounded to the input dtype before a product.
    w = p**2 * (u**2 + rho**2) + TINY**2 * visible
    var = {"lse": _lse_variance(s, p, rho, finite_lse)}
    o = truth["o"]
    # An error of a logit changes P, and the sum that P is divided by.
    r = (p * torch.expm1(rho.clamp(max=20.0))) ** 2
    var["o"] = (
        (p**2 * u**2 + TINY**2 * visible) @ v**2  # P rounded to the input dtype, or flushed to zero
        # r weighs (v - o)^2.
        + (r @ v**2 - 2 * o * (r @ v) + o**2 * r.sum(dim=-1, keepdim=True)).clamp(min=0.0)
        + u**2 * o**2  # the result rounded to its dtype
        + h**2 * (visible @ v**2)  # P too small for the dtype's normal numbers
        + (sum_error(seq_k) * (p @ v.abs())) ** 2  # the fp32 sum over keys
    )
    if do is None:
        return var

    var["dv"] = (w.mT @ do**2 + h**2 * (visible.mT @ do**2)).sum(dim=0)
    var["sum_dv"] = (p.mT @ do.abs()).sum(dim=0)
    abs_delta = (do * truth["o"]).abs().sum(dim=-1)
    dp = do @ v.T
    # O rounded when it is stored; the rounding of P before P V, which reaches all columns of O.
    var_delta = (do**2 * u**2 * truth["o"] ** 2).sum(dim=-1) + (w * dp**2).sum(dim=-1)
    # Of the fp32 sums over head_dim and, within O, over keys.
    of_sums = (sum_error(seq_k) * do.abs() * (p @ v.abs())).sum(dim=-1)
    var_delta += (sum_error(head_dim) * abs_delta) ** 2 + of_sums**2
    delta = (do * truth["o"]).sum(dim=-1, keepdim=True)
    size = do.abs() @ v.abs().T + abs_delta[..., None]  # what dP - delta is the small difference of
    e_ds = w * (dp - delta) ** 2 + h**2 * visible + (sum_error(head_dim) * p * size) ** 2
    abs_ds = (p * (dp - delta)).abs()
    var["dq"] = scale**2 * (e_ds @ k**2 + var_delta[..., None] * (p @ k) ** 2) + u**2 * truth["dq"] ** 2
    var["dq"] += (scale * sum_error(seq_k) * (abs_ds @ k.abs())) ** 2
    var["sum_dk"] = abs(scale) * (abs_ds.mT @ q.abs()).sum(dim=0)
    var["dk"] = scale**2 * (e_ds.mT @ q**2 + (p**2 * var_delta[..., None]).mT @ q**2).sum(dim=0)
    # Where rows of O are alike, so are their errors, and they add up: of the fp32 sums over keys
    # (their sign is not known), and of the rounding before delta.
    var["lean_dk"] = abs(scale) * ((p * of_sums[..., None]).mT @ q.abs()).sum(dim=0)
    of_o = (o.to(dtype).double() - o).nan_to_num(0.0, 0.0, 0.0)
    var["shift_dk"] = scale * ((p * (do * of_o).sum(dim=-1, keepdim=True)).mT @ q).sum(dim=0)
    return var


def _variances_in_e4m3(q, k, v, scale, truth, dtype) -> dict[str, torch.Tensor]:
    """The squared rounding error of a correct kernel whose operands are e4m3, P too, and which divides by the sum of P
    as it was rounded.
    """
    u, lse, o = UNIT_ROUNDOFF[dtype], truth["lse"], truth["o"]
    p = torch.exp(truth["s"] - lse[..., None])
    rho = E8 * max(2.0, math.sqrt(k.shape[1] / TERMS8) / 2) * abs(scale) * (q.abs() @ k.abs().T)
    rho = torch.where(p == 0, 0.0, rho)
    # What is rounded alone, and what is lost or won alike by all that are smaller than half of the least number.
    r = p**2 * U8**2 + (p * torch.expm1(rho.clamp(max=20.0))) ** 2
    small = p.clamp(max=H8 * p.amax(dim=-1, keepdim=True) if p.shape[-1] else None)
    lost = small.sum(dim=-1, keepdim=True)
    var = (
        (r @ v**2 - 2 * o * (r @ v) + o**2 * r.sum(dim=-1, keepdim=True)).clamp(min=0.0)  # r weighs (v - o)^2
        + (small @ v.abs() + lost * o.abs()) ** 2
        + (E8 * max(2.0, math.sqrt(k.shape[0] / TERMS8) / 2) * (p @ v.abs())) ** 2  # the sum over keys
        + u**2 * o**2  # the result rounded to its dtype
    )
    # All of a row may be rounded alike: the LSE is off by up to U8, which is to be six times sigma.
    of_lse = (U8 / 6) ** 2 + lost[..., 0] ** 2 + (p * rho**2).sum(dim=-1) + (2 * E * (4 + lse.abs())) ** 2
    return dict(o=var, lse=of_lse)


def _lse_variance(s, p, rho, finite_lse):
    largest = torch.where(s.isfinite(), s, 0.0).abs().amax(dim=-1) if s.shape[-1] else torch.zeros_like(finite_lse)
    return (2 * E * (4 + largest + finite_lse.abs())) ** 2 + (p * rho**2).sum(dim=-1)


def expected_softmax(x, kind: str) -> Expected:
    """Of softmax(x) over the last axis, or of its logsumexp. kind: "softmax" or "logsumexp"."""
    s = x.double().reshape(x.shape[:-1].numel(), x.shape[-1])
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    finite_lse = torch.where(lse.isfinite(), lse, 0.0)
    rho = E * (2 + torch.where(s.isfinite(), s, 0.0).abs() + finite_lse.abs())
    p = torch.exp(s - torch.where(lse == NEG_INF, 0.0, lse))
    if kind == "softmax":
        shape, usual = x.shape, 0 < x.shape[-1] <= SAMPLE_ABOVE_KEYS and x.isfinite().all()
        truth = _softmax_by_sdpa(s) if usual else torch.where(lse == NEG_INF, 0.0, torch.softmax(s, dim=-1))
        var = p**2 * (UNIT_ROUNDOFF[x.dtype] ** 2 + rho**2) + HALF_SUBNORMAL[x.dtype] ** 2 + TINY**2
    else:
        shape, truth = x.shape[:-1], lse[:, 0]
        var = _lse_variance(s, p, rho, finite_lse[:, 0])
    return Expected(truth.reshape(shape), var.sqrt().reshape(shape))


def _softmax_by_sdpa(s):
    eye = torch.eye(s.shape[-1], dtype=torch.float64, device=s.device)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(s[None], eye[None], eye[None], scale=1.0)[0]


def _sample_rows(seq_q: int) -> torch.Tensor:
    if seq_q <= SAMPLE_ROWS:
        return torch.arange(seq_q)
    edge = SAMPLE_ROWS // 4
    middle = torch.randperm(seq_q - 2 * edge, generator=torch.Generator().manual_seed(0))[: SAMPLE_ROWS - 2 * edge]
    return torch.cat([torch.arange(edge), edge + middle.sort().values, torch.arange(seq_q - edge, seq_q)])
