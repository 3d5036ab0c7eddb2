"""Checks the mended kernel; while it is wrong, says what its errors look like, and not which line makes them."""

from common import make_qkv
from common.learn.check.require import close, guarded, reject, require_none, require_verified, tiles_of
from common.verify.reference import naive_attention
from phase3_forward.checks import BF16, FP32, indices

import torch
import torch.nn.functional as F

BLOCK_M, BLOCK_N = 32, 16


def check(answer):
    with tiles_of(BLOCK_M, BLOCK_N):
        for seq_k in (BLOCK_N, 3 * BLOCK_N, 3 * BLOCK_N - 6):
            _require_keys(answer.attention_ahead, seq_k)
        for seq_k in (64, 50, 90):
            _require_mask(answer.attention_ahead, seq_k)
    fn = answer.attention_ahead
    for is_causal in (False, True):
        q, k, v = make_qkv(2, 4, 100, 40, heads_kv=2, seq_k=150, layout="bshd", layout_v="sliced")
        require_verified("4 heads on 2", fn, q, k, v, is_causal=is_causal, enable_gqa=True)
        q, k, v = make_qkv(1, 2, 70, 80, seq_k=70, poison=True, dtype=BF16)
        require_verified("NaN all around", fn, q, k, v, is_causal=is_causal)
    return "one tile, several, ragged ones; full and causal; grouped heads"


def _same(results, expected):
    return all(map(close, results, expected))


def _require_keys(attention, seq_k):
    """Without a causal mask: which keys does it see?"""
    q, k, v = make_qkv(1, 2, 40, 16, seq_k=seq_k, dtype=FP32, layout_v="bshd")
    results = guarded(attention)(q, k, v)
    right, tiles = naive_attention(q, k, v)[:2], -(-seq_k // BLOCK_N)
    if _same(results, right):
        return
    what = f"{seq_k} keys in tiles of {BLOCK_N}"
    if (results[1] == -torch.inf).all():
        reject(f"{what}: lse is -inf and o is 0 in every row, as if there were no key at all. Which keys does it hide?")
    for seen in range(1, tiles):
        first = slice(0, seen * BLOCK_N)
        if _same(results, naive_attention(q, k[:, :, first], v[:, :, first])[:2]):
            reject(f"{what}: this is the attention to the first {seen} of {tiles} tiles; nothing else is wrong")
    past = naive_attention(q, *(F.pad(t, (0, 0, 0, -seq_k % BLOCK_N)) for t in (k, v)))[:2]
    signs = {
        "keys past the end count, as logit 0: the last tile needs a mask of its own": (
            seq_k % BLOCK_N and _same(results, past)
        ),
        "lse is right and o is wrong. So the logits and their mask are; what else enters o?": (
            close(results[1], right[1])
        ),
        "o and lse are wrong, and no number of whole tiles explains them. Are k, v and the mask of one and "
        "the same tile when attention_tile_step takes them? Compare with the twin after each tile": True,
    }
    require_none(signs, what)


def _require_mask(attention, seq_k):
    """With a causal mask: how far ahead or back does a query see?"""
    q, k, v = make_qkv(1, 2, 70, 16, seq_k=seq_k, dtype=FP32, layout_v="bshd")
    o, lse = guarded(attention)(q, k, v, is_causal=True)
    if _same((o, lse), naive_attention(q, k, v, is_causal=True)[:2]):
        return
    what = f"causal, {seq_k} keys"
    (i, j), lse = indices(70, seq_k), lse.cpu()
    s = (q.double() @ k.double().mT / 4).cpu()
    for shift in (-BLOCK_N, -1, 1, BLOCK_N):
        shifted = s.masked_fill(j > i + shift, -torch.inf).logsumexp(dim=-1)
        if close(lse, shifted):
            side = f"{-shift} keys too few" if shift < 0 else f"{shift} keys too many"
            reject(f"{what}: query i sees {side}, the last is i {shift:+d}. Calls without a mask are right")
    if close(lse, s.logsumexp(dim=-1)):
        reject(f"{what}: every query sees every key. Calls without a mask are right")
    reject(f"{what}: wrong, where calls without a mask are right. Which tile is the causal mask made for?")
