"""Checks the step and LSE in powers of two on states of every kind, attention, and that nothing calls exp."""

import ast
import contextlib
import functools
import inspect
import math
from unittest import mock

from common import make_qkv, runtime
from common.learn.check.require import reject, require, require_verified
from phase5_tuning.checks import BF16, FP16, FP32, INF, finite

import torch
import triton
import triton.language as tl

LN2 = math.log(2)
FAR = "logits near -10^7"  # whole numbers and a scale of 1/2: nothing is rounded


def check(answer):
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ("exp", "online_softmax_step"):
            reject(f"line {node.lineno} uses {name}: with log2(e) in the scale, exp2 is enough")
    step = functools.partial(_step, answer)
    for what, state in _states().items():
        if what == FAR:  # mistakes in the numbers are known by their result, in the states before
            _count_products(step, *state)
        _check_step(what, step, *state)
    _check_scale(answer)

    def base2(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.attention(q, k, v, is_causal, scale)

    for dtype, kind in ((FP16, "normal"), (BF16, "peaked"), (FP32, "low"), (FP16, "large")):
        inputs = make_qkv(1, 2, 40, 24, seq_k=70, dtype=dtype, kind=kind, layout="bshd", layout_v="bhsd")
        require_verified(f"{kind} inputs, {dtype}", base2, *inputs, is_causal=kind != "low", scale=0.5)
    q, k, v = make_qkv(1, 2, 40, 16, seq_k=70, dtype=FP32)
    k[0, 0, 3, 0] = math.nan
    if not answer.attention(q, k, v)[0][0, 0].isnan().all():
        reject("a NaN in k does not reach o: it must, or nobody learns of it. Is it only -inf that is replaced?")
    require_verified("no keys", base2, *make_qkv(1, 1, 3, 16, seq_k=0))
    return "states of six kinds, LSE, attention in fp16, bf16 and fp32, logits from tiny to hundreds; no exp"


@triton.jit
def _step_kernel(
    m_ptr, l_ptr, s_ptr, alpha_ptr, p_ptr, lse_ptr, scale,
    STEP: tl.constexpr, LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs = offs_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m_i, l_i, alpha, p = STEP(tl.load(m_ptr + offs_m), tl.load(l_ptr + offs_m), tl.load(s_ptr + offs), scale)
    tl.store(m_ptr + offs_m, m_i)
    tl.store(l_ptr + offs_m, l_i)
    tl.store(alpha_ptr + offs_m, alpha)
    tl.store(p_ptr + offs, p)
    tl.store(lse_ptr + offs_m, LSE(m_i, l_i))


def _step(answer, m, l, s, scale):
    """(m, l, alpha, p, lse) after a step: m, l (rows,), s (rows, cols), fp32, contiguous, both sizes powers of two."""
    m, l, alpha, lse, p = m.clone(), l.clone(), torch.empty_like(m), torch.empty_like(m), torch.empty_like(s)
    functions = dict(STEP=answer.step_base2, LSE=answer.lse_base2)
    with runtime.on_device_of(s):
        _step_kernel[(1,)](m, l, s, alpha, p, lse, scale, **functions, BLOCK_M=s.shape[0], BLOCK_N=s.shape[1])
    return m, l, alpha, p, lse


def _count_products(step, m, l, s, scale):
    """Reject a step that multiplies or divides a tile more than once or last, or takes the maximum of the product."""
    if not runtime.INTERPRETED:
        return
    from triton.runtime.interpreter import ReduceOps
    from triton.runtime.interpreter import interpreter_builder as builder

    made, powers, reduced, min_max = [], [], [], ReduceOps.min_max

    def counting(operation):
        def counted(*args, **kwargs):
            product = operation(*args, **kwargs)
            made.append(product.data)
            return product

        return counted

    def power(x, exp2=builder.create_exp2):
        powers.append(x.data)
        return exp2(x)

    def watched(self, tile, *args, **kwargs):
        reduced.append(torch.from_numpy(tile.handle.data.copy()))
        return min_max(self, tile, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ReduceOps, "min_max", watched))
        for name in ("create_fmul", "create_fdiv"):
            replaced = counting(getattr(builder, name))
            stack.enter_context(mock.patch.object(builder, name, replaced))
        stack.enter_context(mock.patch.object(builder, "create_exp2", power))
        step(m, l, s, scale)
    if any(tile.shape == s.shape and torch.equal(tile, s * scale) for tile in reduced):
        reject(
            "the maximum is taken of the scaled tile. Compiled, each logit then costs a multiplication beside its "
            "multiply-add: scale the maximum of a row, not the row before its maximum"
        )
    products = [x for x in made if x.shape == s.shape]
    if len(products) > 1:
        reject(
            f"the step multiplies or divides the tile {len(products)} times. The multiplication by log2(e) is the one "
            "to remove: with log2(e) in the scale, s * scale is enough"
        )
    if any(x is product for x in powers for product in products):
        reject(
            "the tile is multiplied after the subtraction, and a multiply-add multiplies first: compiled, these are "
            "two instructions for each logit. Subtract m' from s * scale"
        )


def _check_scale(answer):
    """o and lse for the usual scale and for another one, with mistakes in log2(e)."""
    q, k, v = make_qkv(1, 2, 40, 16, seq_k=70, dtype=FP32)
    s = q.double() @ k.double().mT / 4

    def o_of(factor):
        return torch.softmax(factor * s, dim=-1) @ v.double()

    o, lse = answer.attention(q, k, v)
    mistakes = {
        "P is 2^S: does the scale that the kernel is given hold log2(e)?": o_of(LN2),
        "log2(e) has been multiplied to the scale twice, or 2^x divided by it": o_of(1 / LN2),
        "the scale is divided by log2(e), which is to be multiplied": o_of(LN2 * LN2),
        "the scale is 0.2 percent too small: log2(e) is not 1.44, but LOG2E.value": o_of(1.44 * LN2),
    }
    require("o", o, o_of(1), mistakes=mistakes)
    right = s.logsumexp(-1)
    require("lse", lse, right, mistakes={"this is the LSE in base 2: multiply by ln(2)": right / LN2})
    half = answer.attention(q, k, v, False, 0.5)[0]
    require("o, scale=0.5", half, o_of(2), mistakes={"the argument `scale` is ignored": o_of(1)})


def _states():
    """What to check a step on: {kind: (m, l, s, scale)}."""

    def randn(*shape, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(runtime.DEVICE)

    s, m, l = 5 * randn(16, 32, seed=0), 3 * randn(16, seed=1), 1 + 9 * randn(16, seed=2).abs()
    fresh, none = torch.full_like(m, -INF), torch.zeros_like(l)
    mixed = torch.where(m > 0, m, fresh), torch.where(m > 0, l, none)
    masked = s.clone()
    masked[::2, 1:] = masked[1] = -INF
    scale = 0.3 / LN2
    return {
        "a tile with larger logits": (m, l, s + 40, scale),
        "a tile with smaller logits": (m, l, s - 40, scale),
        "a tile masked in part": (*mixed, masked, scale),
        "the first tile": (fresh, none, s - 1000, scale),
        "a tile of -inf": (*mixed, torch.full_like(s, -INF), scale),
        FAR: (fresh, none, s.round() - 1e7, 0.5),
    }


def _check_step(what, step, m, l, s, scale):
    got = dict(zip(("m", "l", "alpha", "p", "lse"), step(m, l, s, scale), strict=True))
    if what == FAR and ((got["m"] > -1e6).any() or not got["p"].any()):
        reject(f"{what}: m' is kept above a floor, but logits can be as low as that: only -inf is to be replaced")
    for name in ("m", "l", "alpha", "p"):
        if got[name].isnan().any():
            row = int(got[name].isnan().nonzero()[0, 0])
            reject(f"{what}: {name} is NaN in row {row}. Is it -inf minus -inf?")
    m, l, s = m.double(), l.double(), s.double()
    m_new = torch.maximum(m, s.amax(1) * scale)
    shift = finite(m_new)
    alpha, p = torch.exp2(m - shift), torch.exp2(s * scale - shift[:, None])
    l_new = alpha * l + p.sum(1)
    lse = m_new * LN2 + torch.log(torch.where(l_new == 0, 1.0, l_new))
    right = dict(m=m_new, alpha=alpha, p=p, l=l_new, lse=lse)
    mistakes = _wrong_powers(m, s, scale, m_new) | _wrong_sums(l, **right)
    for name in right:
        # Exponents up to about 300 in fp32: 300 * 2^-24 * ln(2) = 1.3e-5.
        require(f"{name}, {what}", got[name], right[name], mistakes=mistakes[name], atol=1e-5)


def _wrong_powers(m, s, scale, m_new):
    """{sentence: value} of mistakes in m, p and alpha."""
    own, shift = s.amax(1), finite(m_new)
    log2e, column = 1 / LN2, shift[:, None]
    unguarded = torch.where(m == -INF, 0.0, m_new)[:, None]
    wrong_m = {
        "the largest logit of the tile is not scaled: m counts scaled logits": own,
        "log2(e) is multiplied a second time: the scale holds it already": own * scale * log2e,
        "m is in natural units here: it counts in powers of two": own * scale * LN2,
    }
    wrong_m = {sentence: torch.maximum(m, of_tile) for sentence, of_tile in wrong_m.items()} | {
        "m_i is scaled again: it was scaled when it came in": torch.maximum(m, own) * scale,
        "what was seen before is forgotten: m' = max(m, ...)": own * scale,
    }
    exponents = {
        "this is e^x: use exp2": (s * scale - column) * log2e,
        "the logits are not scaled": s - column,
        "log2(e) is multiplied a second time: the scale holds it": s * scale * log2e - column,
        "the difference is scaled, m' with it, which is scaled already": (s - column) * scale,
        "it is m', the new maximum, that must be tested for -inf, not the old m": s * scale - unguarded,
        "the old maximum is subtracted: it must be the new one": s * scale - finite(m)[:, None],
        "the tile's own maximum is subtracted: it must be m', which may be larger": (s - finite(own)[:, None]) * scale,
    }
    wrong_alpha = {
        "this is e^x: use exp2": torch.exp(m - shift),
        "it is upside down: 2^(m - m')": torch.exp2(shift - m),
        "the difference is scaled, but m is scaled already": torch.exp2((m - shift) * scale),
    }
    wrong_p = {sentence: torch.exp2(x) for sentence, x in exponents.items()}
    return dict(m=wrong_m, p=wrong_p, alpha=wrong_alpha)


def _wrong_sums(l_old, m, alpha, p, l, lse):
    """{sentence: value} of mistakes in l and lse; all but l_old are right."""
    l_safe = torch.where(l == 0, 1.0, l)
    base_2 = m + torch.log2(l_safe)
    wrong_l = {
        "the old l is not rescaled by alpha": l_old + p.sum(1),
        "the old l is missing": p.sum(1),
        "the sum over the tile is missing": alpha * l_old,
    }
    wrong_lse = {
        "it is in base 2: divide by log2(e)": base_2,
        "m counts in powers of two, log(l) does not": m + torch.log(l_safe),
        "log2(l) is one of two terms in powers of two": m * LN2 + torch.log2(l_safe),
        "it is multiplied by log2(e) where it should be divided": base_2 / LN2,
        "log(l) is natural already": (m + torch.log(l_safe)) * LN2,
    }
    return dict(l=wrong_l, lse=wrong_lse)
