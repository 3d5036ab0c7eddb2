"""The error model of attention in e4m3: what a right kernel may return passes, and no more."""

import math

from common import make_qkv, verify_results
from common.verify.reference import causal_mask

import pytest
import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def attention(to=lambda p: p.float().to(E4M3), top=7.0, lse_of=torch.log, drop=0):
    """In PyTorch: P as 2^top p through `to`, sums of what comes out."""

    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        q, k, v = (t.double() for t in (q, k, v))
        s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            s = s.masked_fill(~causal_mask(*s.shape[-2:], device=s.device), -math.inf)
        if drop:
            s[..., -drop:] = -math.inf
        m = s.amax(-1, keepdim=True)
        p = to(torch.exp(s - m) * 2.0**top).double() * 2.0**-top
        total = p.sum(-1)
        return (p @ v / total[..., None]).half(), (m[..., 0] + lse_of(total)).float()

    return fn


def report(fn, kind="normal", seq_q=80, seq_k=200, is_causal=False):
    q, k, v = make_qkv(1, 2, seq_q, 32, seq_k=seq_k, kind=kind)
    codes = [(t.float() * 64).to(E4M3) for t in (q, k, v)]
    q, k, v = (c.half() / 64 for c in codes)  # fp16 holds them
    given = dict(in_e4m3=[t.double() for t in (q, k, v)], is_causal=is_causal)
    return verify_results(fn, q, k, v, **given)


@pytest.mark.parametrize("kind", ["normal", "positive", "peaked", "flat", "low"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_right_one_passes(kind, is_causal):
    assert report(attention(), kind, is_causal=is_causal).z < 3.5


def test_sigma_is_about_what_rounding_makes():
    found = report(attention(), seq_q=200)
    assert 0.25 < found["o"].rms_z < 0.6
    assert found["o"].z > 1
    # A bit less shows in rms_z, as for other dtypes.
    assert report(attention(lambda p: p.float().to(E5M2)), seq_q=200)["o"].rms_z > 1.7 * found["o"].rms_z


def test_many_weights_too_small_for_e4m3_may_be_lost():
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.float16) for n in (4, 4000, 4000))
    q[..., 0], k[:, :, 0, 0], v[:, :, 0, 0] = 4, 12, 1  # one key is 2^17.3 times as heavy as each of the others
    given = dict(in_e4m3=[t.double() for t in (q, k, v)], scale=0.25)
    verify_results(attention(), q, k, v, **given).check()


WRONG = {
    "P to one bit": attention(lambda p: torch.ldexp((torch.frexp(p)[0] * 4).round() / 4, torch.frexp(p)[1])),
    "P without room below": attention(top=-2.0),
    "P cut off": attention(lambda p: p.clamp(max=64.0)),
    "LSE in base 2": attention(lse_of=torch.log2),
    "LSE a tenth off": attention(lse_of=lambda x: x.log() + 0.1),
    "the last key is dropped": attention(drop=1),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_one_is_rejected(mistake):
    found = [report(WRONG[mistake], kind, seq_q=200) for kind in ("normal", "positive", "peaked")]
    assert not all(r.passed for r in found), [r.z for r in found]


def test_there_are_no_gradients():
    q, k, v = make_qkv(1, 1, 8, 16)
    with pytest.raises(ValueError, match="do: expected None beside in_e4m3"):
        verify_results(attention(), q, k, v, do=torch.ones_like(q), in_e4m3=(q, k, v))
