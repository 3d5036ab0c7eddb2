"""Checks dv in fp64, and as part of the whole backward pass for dtypes, lengths, strides and low logits."""

from common import make_tensor, runtime
from common.learn.check.require import counted, guarded, require
from phase4_backward.checks import only_head_0, plain_inputs, require_products, verify

import torch


def check(answer):
    _check_full(answer.attention_dv)
    _check_long_sum(answer.attention_dv)
    # 32 queries in two tiles, 32 keys in one
    require_products(answer, lambda q, lse: answer.attention_dv(q, q, q, lse), 2 * 2)

    def theirs(q, k, v, o, lse, do, delta, is_causal, scale):
        return dict(dv=answer.attention_dv(q, k, do, lse, scale))

    tiles = dict(tiles=(16, 32))
    for dtype in runtime.DTYPES:
        verify(theirs, 2, 2, 37, 40, seq_k=50, dtype=dtype, poison=True, do_layout="expanded", **tiles)
    verify(theirs, 1, 2, 50, 32, seq_k=20, layout="sliced", do_layout="transposed", scale=-0.3, **tiles)
    verify(theirs, 1, 1, 40, 16, kind="low", **tiles)
    # A scale that is no power of two, and large logits: q * scale would lose bits in fp16.
    verify(theirs, 1, 1, 64, 32, seq_k=80, dtype=torch.float16, scale=0.7, kind="peaked", **tiles)
    return "dv in fp16, bf16 and fp32, ragged lengths, strides, NaN all around, logits far below zero"


def _check_long_sum(attention_dv):
    """P is 1 everywhere; the first dO is large, and the tiles after it add less than fp16 can see."""
    q, lse = torch.zeros(1, 1, 256, 16, device=runtime.DEVICE), torch.zeros(1, 1, 256)
    do = torch.full_like(q, 0.05)
    do[:, :, 0], do[:, :, 1:16] = 2048, 0
    q, do = q.half(), do.half()
    dv = attention_dv(q, q[:, :, :1], do, lse.to(q.device))
    right = do.double().sum(dim=2, keepdim=True)
    lost = "what is small is lost: dv is to be added up in fp32, and rounded once, when it is stored"
    require("dv, 256 queries and 1 key", dv, right, mistakes={lost: torch.full_like(right, 2048)}, rtol=1e-3)


def _check_full(attention_dv):
    """One problem in which many mistakes are known by their result."""
    q, k, _, _, _, lse = plain_inputs(2, 2, 60, 40, is_causal=False)
    generator = torch.Generator().manual_seed(1)
    do = make_tensor(q.shape, dtype=q.dtype, layout="transposed", generator=generator)
    with counted(lse=lse) as moved:
        dv = guarded(attention_dv, names=["dv"])(q, k, do, lse)
    past_end = moved and moved.loaded_from["lse"] > 2 * lse.numel() * 4  # two tiles of keys read it
    right, mistakes = _right_and_mistakes(*(t.double() for t in (q, k, do, lse[..., None])))
    sentence = "head 0 is right, the others are not: lse_ptr is that of this head already; is it moved again?"
    short = [t for t in (torch.float16, torch.bfloat16) if torch.equal(dv, dv.to(t).float())]
    signs = {
        "lse is loaded past the last query: the load needs the mask offs_m < seq_q": past_end,
        "it is rounded to 16 bits on the way: dv is to be added up in fp32": bool(short),
        sentence: only_head_0(dv, right),
    }
    what = "dv, 60 queries and 40 keys, tiles of 16 queries x 32 keys"
    require(what, dv, right, mistakes=mistakes, signs=signs)


def _right_and_mistakes(q, k, do, lse):
    """dv in fp64, and {sentence: dv with that mistake}."""
    s = q @ k.mT / 4
    p = torch.exp(s - lse)
    padded = torch.nn.functional.pad(s, (0, 24))  # to whole tiles of 32 keys
    of_tile = torch.softmax(padded.unflatten(-1, (2, 32)), dim=-1).flatten(-2)[..., :40]

    def dv_of(p, start=0, stop=60):
        return p[:, :, start:stop].mT @ do[:, :, start:stop]

    base_2, tile_0 = torch.exp2(s - lse), dv_of(p, 0, 16)
    mistakes = {
        "P is exp(S) here: subtract the LSE": dv_of(torch.exp(s)),
        "P is exp(S + LSE) here: subtract the LSE": dv_of(torch.exp(s + lse)),
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
    return dv_of(p), mistakes
