"""Checks dv in fp64, and as part of the whole backward pass for dtypes, lengths, strides and low
logits.
"""

from common import make_tensor, runtime
from common.learn.judge import require
from phase4_backward.checks import only_head_0, plain_inputs, verify

import torch


def check(answer):
    _check_full(answer.attention_dv)

    def theirs(q, k, v, o, lse, do, delta, is_causal, scale):
        return dict(dv=answer.attention_dv(q, k, do, lse, scale))

    for dtype in runtime.DTYPES:
        options = dict(seq_k=50, dtype=dtype, poison=True, do_layout="expanded")
        verify(theirs, 2, 2, 37, 40, tiles=(16, 32), **options)
    options = dict(seq_k=20, layout="sliced", do_layout="transposed", scale=-0.3)
    verify(theirs, 1, 2, 50, 32, tiles=(16, 32), **options)
    verify(theirs, 1, 1, 40, 16, tiles=(16, 32), kind="low")
    return (
        "dv in fp16, bf16 and fp32, ragged lengths, strides, NaN all around, logits far below zero"
    )


def _check_full(attention_dv):
    """One problem in which many mistakes are known by their result."""
    q, k, _, _, _, lse = plain_inputs(2, 2, 60, 40, is_causal=False)
    generator = torch.Generator().manual_seed(1)
    do = make_tensor(q.shape, dtype=q.dtype, layout="transposed", generator=generator)
    dv = attention_dv(q, k, do, lse)
    q, k, do, lse = (t.double() for t in (q, k, do, lse[..., None]))
    s = q @ k.mT / 4
    p = torch.exp(s - lse)
    padded = torch.nn.functional.pad(s, (0, 24))  # to whole tiles of 32 keys
    of_tile = torch.softmax(padded.unflatten(-1, (2, 32)), dim=-1).flatten(-2)[..., :40]

    def dv_of(p, start=0, stop=60):
        return p[:, :, start:stop].mT @ do[:, :, start:stop]

    base_2, tile_0 = torch.exp2(s - lse), dv_of(p, 0, 16)
    mistakes = {
        "P is exp(S) here: subtract the LSE": dv_of(torch.exp(s)),
        "S is not multiplied by the scale": dv_of(torch.exp(4 * s - lse)),
        "P is a power of 2 here: LSE is a natural logarithm, it goes with exp": dv_of(base_2),
        "each tile is normalized by its own sum: use LSE": dv_of(of_tile),
        "only the last tile of queries is in it: add to dv, do not overwrite it": dv_of(p, 48),
        "every tile of queries is the first one: do the offsets contain start_m?": 4 * tile_0,
        "queries are skipped: the walk goes by BLOCK_M": tile_0 + dv_of(p, 32, 48),
        "the walk ends at seq_k: it runs over queries, seq_q of them": dv_of(p, 0, 48),
        "this is P^T Q: dV takes dO": p.mT @ q,
        "do is read with the strides of q: it has four of its own": p.mT @ do.mT.reshape(do.shape),
    }
    sentence = "head 0 is right, the others are not: lse_ptr is that of this head already; is it moved again?"
    right = dv_of(p)
    signs = {sentence: only_head_0(dv, right)}
    what = "dv, 60 queries and 40 keys, tiles of 16 queries x 32 keys"
    require(what, dv, right, mistakes=mistakes, signs=signs)
