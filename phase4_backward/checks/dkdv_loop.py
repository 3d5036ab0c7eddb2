"""Checks dk and dv of grouped heads for tiles of three shapes, full and causal, and that no query is read in vain."""

from phase4_backward import checks
from phase4_backward.checks import gradients, plain_inputs, roomy

import torch

CASES = [
    ((2, 2, 40, 40), dict(heads_kv=1, seq_k=37, poison=True, layout_v="bshd")),
    ((1, 3, 37, 16), dict(heads_kv=1, seq_k=40, is_causal=True, scale=-0.4, layout="sliced")),
]


def check(answer):
    for blocks in ((32, 16), (16, 32)):
        _check_walk(answer.attention_dkdv, *blocks)
    hint = "a tile of queries wholly before the tile's first key, pid_n * BLOCK_N, is read: where does the walk start?"
    first = "Which is the first query of tile pid_n * BLOCK_N // BLOCK_M?"
    in_tiles = f"the walk starts too early: start is a number of queries, not of tiles. {first}"
    options = dict(walk="over queries", products=4 * 2 * 2, hint=hint, in_tiles=in_tiles)
    checks.check_kernel(answer, answer.attention_dkdv, ["dk", "dv"], CASES, **options)
    return "dk, dv in fp16, bf16, fp32, full and causal, grouped heads, three tile shapes; no query is read in vain"


def _check_walk(attention_dkdv, block_m, block_n):
    """One causal problem, 4 query heads on 2 key heads, in which many mistakes are known by their result."""
    inputs = *_, do, o, _ = plain_inputs(4, 2, 70, 50)
    delta = roomy((do * o).sum(-1))

    def wrong_heads(visible):
        return _wrong_heads(inputs, delta, visible, block_m)

    right, mistakes = checks.known_mistakes("over queries", inputs, delta, block_m, block_n, wrong_heads)

    def signs(name, actual):
        head_0 = checks.only_head_0(actual, right[name])
        return {
            "key head 0 is right, key head 1 reads past the last query head: a pointer that is moved in the loop "
            "(q_ptr += ...) stays moved; make a new one for each head": head_0 and actual.isnan().any(),
            "key head 0 is right, the other is not: do q, do, lse and delta belong to query head h?": head_0,
        }

    tiles, case = dict(block_m=block_m, block_n=block_n), checks.causal_case(block_m, block_n, 70, 50)
    checks.require_walk(attention_dkdv, ["dk", "dv"], case, inputs, delta, right, mistakes, signs, **tiles)


def _wrong_heads(inputs, delta, visible, block_m):
    """{sentence: gradients} where a key head is given other query heads, or they another lse or delta."""
    usual = dict(zip(("q", "k", "v", "do", "o", "lse"), inputs, strict=True), visible=visible)
    lse = usual["lse"]
    place = torch.arange(4, device=lse.device)[:, None, None] % 2  # of a query head in its group
    first, last = (dict(visible=visible & (place == n)) for n in (0, 1))
    last_tile = torch.arange(70, device=lse.device)[:, None] >= 69 // block_m * block_m
    replaced = dict(visible=last["visible"] & last_tile)
    modulo, shared, apart = dict(modulo=True), dict(visited=[0, 1, 0, 1]), dict(visited=[0, 1, 1, 2])
    lse_of_0, delta_of_0 = dict(lse=lse[:, :1].expand_as(lse)), dict(delta=delta[:, :1].expand_as(delta))
    changed = {
        "only the first query head of each group is in it: add up the group": first,
        "only the last query head of each group is in it: add up the group": last,
        "only the last tile of the walk is in it: add each tile's product": replaced,
        "key head h_kv is given the query heads with h % heads_kv = h_kv; a group is made of neighbors": modulo,
        "every key head is given the query heads of key head 0: those of h_kv begin at h_kv * group": shared,
        "the groups overlap: key head h_kv begins at query head h_kv, and its group at h_kv * group": apart,
        "every head has the lse of head 0: lse_ptr + h * seq_q": lse_of_0,
        "every head has the delta of head 0: delta_ptr + h * seq_q": delta_of_0,
    }
    wrong = {sentence: gradients(**usual | options)[0] for sentence, options in changed.items()}
    again = {name: 2 * grad for name, grad in gradients(**usual | first)[0].items()}  # a group has two heads
    return wrong | {"every step visits the group's first head: h changes with g": again}
