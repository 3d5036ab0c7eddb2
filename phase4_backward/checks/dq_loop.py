"""Checks dq for tiles of three shapes, full and causal, and that no key is read in vain."""

from common import make_qkv, runtime
from common.learn.check.require import reject, require
from common.verify.reference import naive_attention
from phase4_backward.checks import (
    BLOCKS,
    causal_case,
    check_bytes,
    gradients,
    plain_inputs,
    require_full,
    require_products,
    roomy,
    verify,
    visible_pairs,
    wrong_strides,
)

import torch


def check(answer):
    inputs = q, k, v, do, o, lse = plain_inputs(2, 2, 50, 70)
    delta = roomy((do * o).sum(-1))
    for block_m, block_n in BLOCKS[:2]:
        visible, wrong = visible_pairs("over keys", 50, 70, block_m, block_n, q.device)
        right, mistakes = gradients(*inputs, visible)
        mistakes = {sentence: grad for (name, sentence), grad in mistakes.items() if name == "dq"}
        mistakes |= {sentence: gradients(*inputs, mask)[0]["dq"] for sentence, mask in wrong.items()}
        misread = wrong_strides(*inputs, visible, delta)
        mistakes |= {sentence: grads["dq"] for sentence, grads in misread.items()}
        dq = answer.attention_dq(q, k, v, do, lse, delta, True, block_m=block_m, block_n=block_n)
        require(f"dq, {causal_case(block_m, block_n, 50, 70)}", dq, right["dq"], mistakes=mistakes)
    _check_keys_past_the_end(answer)
    require_full("over keys", lambda *inputs, **tiles: [answer.attention_dq(*inputs, **tiles)], ["dq"])

    def run(q, lse):
        answer.attention_dq(q, q, q, q, lse, lse, block_m=16, block_n=16)

    require_products(answer, run, 3 * 2 * 2)
    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            return dict(dq=answer.attention_dq(q, k, v, do, lse, delta, is_causal, scale, **tiles))

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dq(q, q, q, q, lse, lse, is_causal, **tiles)

        sizes = dict(tiles=(block_m, block_n), dtype=dtype)
        verify(theirs, 2, 2, 40, 40, seq_k=50, poison=True, layout_v="bshd", **sizes)
        layouts = dict(layout="sliced", layout_v="transposed")
        verify(theirs, 1, 1, 37, 16, seq_k=80, is_causal=True, scale=-0.4, **layouts, **sizes)
        hint = "keys after the tile's last query, (pid_m + 1) * BLOCK_M - 1, are read: where does the walk end?"
        check_bytes("dq", counted, **tiles, hint=hint)
    return "dq in fp16, bf16 and fp32, full and causal, tiles 16x32, 32x16 and 16x16; no key is read in vain"


def _check_keys_past_the_end(answer):
    q, k, v = make_qkv(1, 1, 19, 16, seq_k=9, dtype=torch.float32, kind="low")
    for is_causal in (False, True):
        o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
        dq = answer.attention_dq(q, k, v, q, lse, (q * o).sum(-1), is_causal, block_m=16, block_n=16)
        if isinstance(dq, torch.Tensor) and not dq.isfinite().all():
            reject(
                "dq, 19 queries and 9 keys, all logits far below zero: keys past the end are not masked: k is 0 "
                "there, but P = exp(0 - LSE) overflows where LSE is below -88, and inf * 0 is NaN"
            )
