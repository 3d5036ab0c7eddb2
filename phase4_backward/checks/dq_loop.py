"""Checks dq for tiles of three shapes, full and causal, and that no key is read in vain."""

from common import make_qkv
from common.learn.check.require import reject
from common.verify.reference import naive_attention
from phase4_backward.checks import BLOCKS, causal_case, check_kernel, known_mistakes, plain_inputs, require_walk, roomy

import torch

CASES = [
    ((2, 2, 40, 40), dict(seq_k=50, poison=True, layout_v="bshd")),
    ((1, 1, 37, 16), dict(seq_k=80, is_causal=True, scale=-0.4, layout="sliced", layout_v="transposed")),
    # Large logits and a scale that is no power of two: in fp16, an LSE or k * scale loses bits that matter.
    ((1, 1, 64, 32), dict(kind="peaked", scale=0.7)),
]


def check(answer):
    def kernel(*inputs, **tiles):
        return [answer.attention_dq(*inputs, **tiles)]

    inputs = *_, do, o, _ = plain_inputs(2, 2, 50, 70)
    delta = roomy((do * o).sum(-1))
    for block_m, block_n in BLOCKS[:2]:
        right, mistakes = known_mistakes("over keys", inputs, delta, block_m, block_n)
        tiles, case = dict(block_m=block_m, block_n=block_n), causal_case(block_m, block_n, 50, 70)
        require_walk(kernel, ["dq"], case, inputs, delta, right, mistakes, **tiles)
    _check_keys_past_the_end(answer)
    hint = "keys after the tile's last query, (pid_m + 1) * BLOCK_M - 1, are read: where does the walk end?"
    check_kernel(answer, kernel, ["dq"], CASES, walk="over keys", products=3 * 2 * 2, hint=hint)
    return "dq in fp16, bf16 and fp32, full and causal, tiles 16x32, 32x16 and 16x16; no key is read in vain"


def _check_keys_past_the_end(answer):
    q, k, v = make_qkv(1, 1, 19, 16, seq_k=9, dtype=torch.float32, kind="low")
    for is_causal in (False, True):
        o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
        dq = answer.attention_dq(q, k, v, q, lse, (q * o).sum(-1), is_causal, block_m=16, block_n=16)
        if isinstance(dq, torch.Tensor) and not dq.isfinite().all():
            overflow = "k is 0 there, but P = exp(-LSE) overflows below an LSE of -88, in fp16 dS does near -11"
            what = "dq, 19 queries and 9 keys, all logits far below zero"
            reject(f"{what}: keys past the end are not masked: {overflow}; inf * 0 is NaN")
