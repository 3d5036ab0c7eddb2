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
    """q, k, v of one head, each with strides of its own; NaN lies around them. transposed: the
    stride of rows of q and k is 1.
    """
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options))
    if transposed:
        return surrounded(q.T, 8).T, surrounded(k.T).T, surrounded(v)
    return surrounded(q, 8), surrounded(k), surrounded(v, 12)


def surrounded(x, beside=4):
    """x inside larger memory full of NaN: a stray access of less than a tile does no harm and
    leaves a trace. beside: how many NaN lie before and after each row.
    """
    margins = [64, beside][: x.dim()]
    memory = x.new_full([n + 2 * margin for n, margin in zip(x.shape, margins, strict=True)], NAN)
    for axis, margin in enumerate(margins):
        memory = memory.narrow(axis, margin, x.shape[axis])
    return memory.copy_(x)


def with_own_strides(*matrices):
    """A copy of each matrix; the distance of rows is another one for each, and what lies between
    them is finite.
    """
    wide = matrices[0].shape[1] + 8 * len(matrices)
    copies = []
    for n, x in enumerate(matrices):
        rows, cols = x.shape
        memory = torch.linspace(-2, 2, (rows + 64) * wide, dtype=x.dtype, device=x.device)
        copies.append(memory.as_strided((rows, cols), (cols + 8 * (n + 1), 1)).copy_(x))
    return copies


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
