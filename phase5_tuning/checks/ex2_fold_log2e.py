"""Checks the step and LSE in powers of two on states of every kind, attention, and that nothing
calls exp.
"""

import ast
import inspect
import math

from common import make_qkv, runtime
from common.learn.judge import guarded, reject, require, require_verified
from common.verify.reference import naive_attention
from phase5_tuning.checks import BF16, FP16, FP32, INF

import torch

LN2 = math.log(2)


def check(answer):
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ("exp", "online_softmax_step"):
            reject(f"line {node.lineno} uses {name}: with log2(e) in the scale, exp2 is enough")
    _check_states(answer.step)

    q, k, v = make_qkv(1, 2, 40, 16, seq_k=70, dtype=FP32)
    s = q.double() @ k.double().mT / 4

    def o_of(factor):
        return torch.softmax(factor * s, dim=-1) @ v.double()

    log2e = 1 / LN2
    got = answer.attention(q, k, v)
    mistakes = {
        "P is 2^S: does the scale that the kernel is given hold log2(e)?": o_of(LN2),
        "log2(e) has been multiplied to the scale twice, or 2^x divided by it": o_of(log2e),
        "the scale is divided by log2(e), which is to be multiplied": o_of(LN2 * LN2),
        "the scale is 0.2 percent too small: log2(e) is not 1.44, but LOG2E.value": o_of(
            1.44 * LN2
        ),
    }
    require("o", got[0], o_of(1), mistakes=mistakes)
    lse = s.logsumexp(-1)
    mistakes = {"this is the LSE in base 2: multiply by ln(2)": lse * log2e}
    require("lse", got[1], lse, mistakes=mistakes)

    def base2(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.attention(q, k, v, is_causal, scale)

    o = naive_attention(q.double(), k.double(), v.double(), scale=0.5)[0]
    mistakes = {"the argument `scale` is ignored": o_of(1)}
    require("o, scale=0.5", answer.attention(q, k, v, False, 0.5)[0], o, mistakes=mistakes)
    for dtype, kind in ((FP16, "normal"), (BF16, "peaked"), (FP32, "low"), (FP16, "large")):
        inputs = make_qkv(1, 2, 40, 24, seq_k=70, dtype=dtype, kind=kind, layout="bshd")
        require_verified(
            f"{kind} inputs, {dtype}", guarded(base2), *inputs, is_causal=kind != "low", scale=0.5
        )
    broken = k.clone()
    broken[0, 0, 3, 0] = math.nan
    if not answer.attention(q, broken, v)[0][0, 0].isnan().all():
        reject(
            "a NaN in k does not reach o: it must, or nobody learns of it. Is it only -inf that is replaced?"
        )
    require_verified("no keys", guarded(base2), *make_qkv(1, 1, 3, 16, seq_k=0))
    return "states of six kinds, LSE, attention in fp16, bf16 and fp32, logits from tiny to hundreds; no exp"


def _check_states(step):
    def randn(*shape, seed):
        return (
            torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
            .to(runtime.DEVICE)
            .double()
        )

    scale, log2e = 0.3 / LN2, 1 / LN2
    s, m, l = 5 * randn(16, 32, seed=0), 3 * randn(16, seed=1), 1 + 9 * randn(16, seed=2).abs()
    fresh, none = torch.full_like(m, -INF), torch.zeros_like(l)
    masked = s.clone()
    masked[::2, 1:] = masked[1] = -INF
    far = "logits near -10^7"  # whole numbers and a scale of 1/2: nothing is rounded
    cases = {
        "a tile with larger logits": (m, l, s + 40, scale),
        "a tile with smaller logits": (m, l, s - 40, scale),
        "a tile masked in part": (
            torch.where(m > 0, m, fresh),
            torch.where(m > 0, l, none),
            masked,
            scale,
        ),
        "the first tile": (fresh, none, s - 1000, scale),
        "a tile of -inf": (
            torch.where(m > 0, m, fresh),
            torch.where(m > 0, l, none),
            torch.full_like(s, -INF),
            scale,
        ),
        far: (fresh, none, s.round() - 1e7, 0.5),
    }
    for what, (*state, scale) in cases.items():
        m, l, s = (t.float() for t in state)
        m_got, l_got, alpha_got, p_got, lse_got = step(m, l, s, scale)
        m, l, s = m.double(), l.double(), s.double()

        if what == far and ((m_got > -1e6).any() or not p_got.any()):
            reject(
                f"{what}: m' is kept above a floor, but logits can be as low as that: only -inf is to be replaced"
            )

        def largest(factor, m=m, s=s):
            return torch.maximum(m, s.amax(1) * factor)

        m_new = largest(scale)
        shift = torch.where(m_new == -INF, 0.0, m_new)
        alpha, p = torch.exp2(m - shift), torch.exp2(s * scale - shift[:, None])
        l_new = alpha * l + p.sum(1)
        for name, t in dict(m=m_got, l=l_got, alpha=alpha_got, p=p_got).items():
            if t.isnan().any():
                reject(
                    f"{what}: {name} is NaN in row {int(t.isnan().nonzero()[0, 0])}. Is it -inf minus -inf?"
                )
        wrong_m = {
            "the largest logit of the tile is not scaled: m counts scaled logits": largest(1.0),
            "log2(e) is multiplied a second time: the scale holds it already": largest(
                scale * log2e
            ),
            "m is in natural units here: it counts in powers of two": largest(scale * LN2),
            "m_i is scaled again: it was scaled when it came in": torch.maximum(m, s.amax(1))
            * scale,
            "what was seen before is forgotten: m' = max(m, ...)": s.amax(1) * scale,
        }
        wrong_p = {
            "this is e^x: use exp2": torch.exp(s * scale - shift[:, None]),
            "the logits are not scaled": torch.exp2(s - shift[:, None]),
            "log2(e) is multiplied a second time: the scale holds it": torch.exp2(
                s * scale * log2e - shift[:, None]
            ),
            "the difference is scaled, m' with it, which is scaled already": torch.exp2(
                (s - shift[:, None]) * scale
            ),
            "it is m', the new maximum, that must be tested for -inf, not the old m": (
                torch.exp2(s * scale - torch.where(m == -INF, 0.0, m_new)[:, None])
            ),
            "the old maximum is subtracted: it must be the new one": (
                torch.exp2(s * scale - torch.where(m == -INF, 0.0, m)[:, None])
            ),
        }
        wrong_alpha = {
            "this is e^x: use exp2": torch.exp(m - shift),
            "it is upside down: 2^(m - m')": torch.exp2(shift - m),
            "the difference is scaled, but m is scaled already": torch.exp2((m - shift) * scale),
        }
        wrong_l = {
            "the old l is not rescaled by alpha": l + p.sum(1),
            "the old l is missing": p.sum(1),
            "the sum over the tile is missing": alpha * l,
        }
        l_safe = torch.where(l_new == 0, 1.0, l_new)
        natural = m_new * LN2 + torch.log(l_safe)
        wrong_lse = {
            "it is in base 2: divide by log2(e)": m_new + torch.log2(l_safe),
            "m counts in powers of two, log(l) does not": m_new + torch.log(l_safe),
            "log2(l) is one of two terms in powers of two": m_new * LN2 + torch.log2(l_safe),
            "it is multiplied by log2(e) where it should be divided": (m_new + torch.log2(l_safe))
            * log2e,
            "log(l) is natural already": (m_new + torch.log(l_safe)) * LN2,
        }
        # Exponents up to about 300 in fp32: 300 * 2^-24 * ln(2) = 1.3e-5.
        tolerance = dict(rtol=1e-4, atol=1e-5)
        require(f"m, {what}", m_got, m_new, mistakes=wrong_m, **tolerance)
        require(f"alpha, {what}", alpha_got, alpha, mistakes=wrong_alpha, **tolerance)
        require(f"p, {what}", p_got, p, mistakes=wrong_p, **tolerance)
        require(f"l, {what}", l_got, l_new, mistakes=wrong_l, **tolerance)
        require(f"lse, {what}", lse_got, natural, mistakes=wrong_lse, **tolerance)
