"""What several checks of phase 2's exercises need; each check is a module beside this one (see
common.learn.judge).
"""

from common import make_qkv, verify_results

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN = float("nan")


def attention_cases(*lengths):
    """(seq_q, seq_k, head_dim, dtype, options of `one_head`): dtypes, kinds of numbers, lengths
    and strides.
    """
    cases = [(100, 150, 64, dtype, {}) for dtype in (FP16, BF16, FP32)]
    cases += [
        (70, 150, 32, dtype, dict(kind=kind))
        for dtype in (FP16, BF16, FP32)
        for kind in ("peaked", "low")
    ]
    return cases + [(33, seq_k, 32, FP32, dict(transposed=True)) for seq_k in lengths]


def one_head(seq_q, seq_k, head_dim, *, transposed=False, **options):
    """q, k, v of one head; NaN lies around them. transposed: the stride of rows is 1."""
    tensors = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options))
    return [surrounded(t.T).T if transposed else surrounded(t) for t in tensors]


def surrounded(x):
    """x inside larger memory full of NaN: a stray access of less than a tile does no harm and
    leaves a trace.
    """
    margins = [64, 4][: x.dim()]
    memory = x.new_full([n + 2 * margin for n, margin in zip(x.shape, margins, strict=True)], NAN)
    for axis, margin in enumerate(margins):
        memory = memory.narrow(axis, margin, x.shape[axis])
    return memory.copy_(x)


def nan_around(x):
    """Whether the memory around a tensor that `surrounded` made (and that holds no NaN itself)
    is untouched.
    """
    return int((~x._base.isnan()).sum()) == x.numel()


def state_of(q, k, v):
    """o, m, l of these keys; fp64."""
    s = q.shape[1] ** -0.5 * q.double() @ k.double().T
    m = s.amax(dim=1)
    p = torch.exp(s - m[:, None])
    return p @ v.double() / p.sum(dim=1, keepdim=True), m, p.sum(dim=1)


def verify(fn, q, k, v):
    verify_results(
        lambda q, k, v, *, scale, **_: fn(q, k, v, scale), q, k, v, compare_sdpa=False
    ).check()
