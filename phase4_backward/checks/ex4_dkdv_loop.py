"""Checks dk and dv of grouped heads for tiles of three shapes, full and causal, and that no
query is read in vain.
"""

from common import runtime
from common.learn.judge import require
from phase4_backward.checks import (
    BLOCKS,
    causal_case,
    check_bytes,
    gradients,
    only_head_0,
    plain_inputs,
    roomy,
    verify,
    visible_pairs,
)

import torch


def check(answer):
    inputs = q, k, v, do, o, lse = plain_inputs(4, 2, 70, 50)
    delta = roomy((do * o).sum(-1))
    place = torch.arange(4, device=q.device)[:, None, None] % 2  # of a query head in its group
    for block_m, block_n in ((32, 16), (16, 32)):
        visible, masks = visible_pairs("over queries", 70, 50, block_m, block_n, q.device)
        right, mistakes = gradients(*inputs, visible)
        wrong = {sentence: gradients(*inputs, mask)[0] for sentence, mask in masks.items()}
        for n, which in enumerate(("first", "last")):
            sentence = f"only the {which} query head of each group is in it: add up the group"
            wrong[sentence] = gradients(*inputs, visible & (place == n))[0]
        sentence = "key head h_kv is given the query heads with h % heads_kv = h_kv; a group is made of neighbors"
        wrong[sentence] = gradients(*inputs, visible, modulo=True)[0]
        sentence = "every key head is given the query heads of key head 0: those of h_kv begin at h_kv * group"
        wrong[sentence] = gradients(*inputs, visible, shared=True)[0]
        of_0, delta_0 = lse[:, :1].expand_as(lse), delta[:, :1].expand_as(delta)
        sentence = "every head has the lse of head 0: lse_ptr + h * seq_q"
        wrong[sentence] = gradients(q, k, v, do, o, of_0, visible)[0]
        sentence = "every head has the delta of head 0: delta_ptr + h * seq_q"
        wrong[sentence] = gradients(*inputs, visible, delta=delta_0)[0]
        dkdv = answer.attention_dkdv(
            q, k, v, do, lse, delta, True, block_m=block_m, block_n=block_n
        )
        for name, at in (("dv", 1), ("dk", 0)):
            candidates = {sentence: grad for (of, sentence), grad in mistakes.items() if of == name}
            candidates |= {sentence: grads[name] for sentence, grads in wrong.items()}
            head_0 = only_head_0(dkdv[at], right[name])
            signs = {
                "key head 0 is right, key head 1 reads past the last query head: a pointer that is moved in the loop "
                "(q_ptr += ...) stays moved; make a new one for each head": head_0
                and dkdv[at].isnan().any(),
                "key head 0 is right, the other is not: do q, do, lse and delta belong to query head h?": head_0,
            }
            what = f"{name}, {causal_case(block_m, block_n, 70, 50)}"
            require(what, dkdv[at], right[name], mistakes=candidates, signs=signs)
    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            dk, dv = answer.attention_dkdv(q, k, v, do, lse, delta, is_causal, scale, **tiles)
            return dict(dk=dk, dv=dv)

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dkdv(q, q, q, q, lse, lse, is_causal, **tiles)

        sizes = dict(tiles=(block_m, block_n), heads_kv=1, dtype=dtype)
        verify(theirs, 2, 2, 40, 40, seq_k=37, poison=True, **sizes)
        verify(theirs, 1, 3, 37, 16, seq_k=40, is_causal=True, scale=-0.4, layout="sliced", **sizes)
        hint = (
            "a tile of queries wholly before the tile's first key, pid_n * BLOCK_N, is read: "
            "where does the walk start?"
        )
        check_bytes("dkdv", counted, **tiles, hint=hint)
    return "dk, dv in fp16, bf16, fp32, full and causal, grouped heads, three tile shapes; no query is read in vain"
