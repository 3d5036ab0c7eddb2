"""Checks the state that waits in memory between tiles of keys, how often it travels, and whole results."""

import ast
import inspect

from common.learn.check.require import counted, guarded, reject, require, tiles_of
from phase2_tiling import checks
from phase2_tiling.checks import FP32, STRIDES, nan_around, one_head, state_of, surrounded, with_own_strides

import torch
import triton


def check(answer):
    _check_continuation(answer)
    _check_strides(answer)
    cases = checks.attention_cases(0, 1, 33)
    with tiles_of(16, 32):
        for seq_q, seq_k, head_dim, dtype, options in cases:
            q, k, v = one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
            checks.verify(answer.attention_keys_outside, q, k, v)
    _check_kept_whole(answer)
    checks.require_any_scale(guarded(answer.attention_keys_outside))
    checks.require_products(answer, answer.attention_keys_outside)
    _require_barrier(answer)
    return f"{len(cases)} cases against SDPA; the state travels as often as it must, and stays normalized in between"


def _require_barrier(answer):
    """The interpreter has no threads, so the source must do."""
    names = {node.attr for node in ast.walk(ast.parse(inspect.getsource(answer))) if isinstance(node, ast.Attribute)}
    if "debug_barrier" not in names:
        reject(
            "tl.debug_barrier() is gone from the end of the outer loop: on a GPU a thread would load a state that "
            "another one has not stored yet"
        )


def _check_continuation(answer):
    """From the state of 12 keys in memory to that of 112, in two tiles of 64; 16 queries a tile."""
    seq_q, seen, seq_k, head_dim, block_m, block_n = 70, 12, 100, 32, 16, 64
    q, k_all, v_all = one_head(seq_q, seen + seq_k, head_dim, dtype=FP32)
    k, v = (surrounded(t[seen:]) for t in (k_all, v_all))
    before, right = (state_of(q, k_all[:n], v_all[:n]) for n in (seen, seen + seq_k))
    o, m, l = (surrounded(t.float()) for t in before)
    tensors = dict(q=q, k=k, v=v, o=o, m=m, l=l)
    with counted(**tensors) as moved:
        answer._attention_keys_outside_kernel[(1,)](
            q, k, v, o, m, l, q.stride(), k.stride(), v.stride(), o.stride(), seq_q, seq_k, head_dim**-0.5,
            HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1,
        )  # fmt: skip
    _require_state((o, m, l), right, before, q, k, v, block_m, block_n)
    if not all(map(nan_around, (o, m, l))):
        reject("something was written outside of o, m and l: do the stores have a mask?")
    if moved:
        _require_visits(moved, tensors, triton.cdiv(seq_k, block_n))


def _check_kept_whole(answer):
    """Keys whose weights are 0 leave an o in fp32 as it was, with inputs in fp16."""
    q, k, v = one_head(20, 70, 16)
    o = torch.linspace(-1, 1, 20 * 16, device=q.device).view(20, 16)
    before, m, l = o.clone(), torch.full_like(o[:, 0], 1000.0), torch.full_like(o[:, 0], 3.0)
    answer._attention_keys_outside_kernel[(1,)](
        q, k, v, o, m, l, q.stride(), k.stride(), v.stride(), o.stride(), 20, 70, 0.25,
        HEAD_DIM=16, BLOCK_M=16, BLOCK_N=32, num_stages=1,
    )  # fmt: skip
    rounded = "o is rounded to the dtype of v at every visit: store it in that of o_ptr, as store_tile does"
    options = dict(mistakes={rounded: before.to(v.dtype).float()}, rtol=1e-5, atol=1e-6)
    require("o in fp32, q, k and v in fp16, all weights 0", o, before, **options)


def _check_strides(answer):
    """o for tensors that have strides of their own each."""
    q, k, v = with_own_strides(*(t.clone() for t in one_head(50, 70, 16, dtype=FP32)))
    with tiles_of(16, 32):
        o = guarded(answer.attention_keys_outside)(q, k, v)
    mistakes = checks.with_other_strides(lambda q, k, v: state_of(q, k, v)[0], STRIDES, q=q, k=k, v=v)
    require("o, 50 queries and 70 keys", o, state_of(q, k, v)[0], mistakes=mistakes)


def _require_state(state, right, before, q, k, v, block_m, block):
    """Hold (o, m, l) against `right`; `before` is the state without the keys k, in tiles of `block`."""
    of_keys, last = state_of(q, k, v), state_of(q, k[block:], v[block:])
    tail = _joined(right, state_of(q, 0 * k[: -len(k) % block], 0 * v[: -len(v) % block]))
    acc = _visits(q, k, v, before, block, lambda o, l, new, alpha, pv: alpha * o + pv)
    row = torch.arange(len(q), device=q.device)
    first, whole = row < block_m, row < len(q) // block_m * block_m
    walked = row % block < block_m  # by a walk in steps of `block`
    new = right[2] - before[2] * torch.exp(before[1] - right[1])  # what the keys add to l
    visits = (state[2].double() - right[2]) / new + 1
    twice = torch.allclose(visits, visits.round(), atol=1e-3) and (visits > 1.5).any()
    signs = {"some queries meet a tile of keys more than once: a tile of queries has BLOCK_M rows": bool(twice)}
    of_o = {
        "it is acc that waits in memory: divide by l' at every visit": acc / right[2][:, None],
        "it is acc, which is never divided: what waits in memory is acc' / l', at every visit": acc,
    } | {sentence: _visits(q, k, v, before, block, update) for sentence, update in _WRONG_UPDATES.items()}
    for i, name in ((1, "m"), (2, "l"), (0, "o")):  # a wrong m or l makes o wrong, too
        some, visited, met = (
            torch.where(rows.view(-1, *[1] * (right[i].dim() - 1)), right[i], before[i])
            for rows in (first, whole, walked)
        )
        mistakes = {
            "it is as it was: is it stored on every visit?": before[i],
            "the state that was in memory is forgotten at the first visit": of_keys[i],
            "it is that of the last tile of keys alone: are o, m and l loaded and taken along?": last[i],
            "only the first tile of queries is visited: do the offsets contain start_m?": some,
            "keys past the end count as logit 0: replace s by -inf there": tail[i],
            "the last, partial tile of queries is never visited: the inner loop ends at seq_q": visited,
            "some queries are never visited: the inner loop goes by BLOCK_M": met,
        }
        mistakes |= of_o if name == "o" else {}
        require(name, state[i], right[i], mistakes=mistakes, signs=signs, atol=1e-4)


def _require_visits(moved, tensors, visits):
    """k and v are read once, q at every visit; o, m and l are read and written at every visit."""
    for name, t in tensors.items():
        reads, writes = (1, 0) if name in "kv" else (visits, 0 if name == "q" else visits)
        for done, count, times in (("read", moved.loaded_from, reads), ("written", moved.stored_to, writes)):
            if count[name] != times * t.nbytes:
                reject(
                    f"with {visits} tiles of keys, {count[name]} bytes of {name} were {done}, {times * t.nbytes} "
                    f"expected ({times} times {t.nbytes}): are the accesses masked, is each done once a visit?"
                )


# o' = update(o, l, l', alpha, p v)
_WRONG_UPDATES = {
    "the old o is rescaled by alpha alone: it was divided by the old l": lambda o, l, new, a, pv: (a * o + pv) / new,
    "the old o is multiplied by the new l: it was divided by the old one": lambda o, l, new, a, pv: a * o + pv / new,
    "the old o is multiplied by its l but not by alpha": lambda o, l, new, a, pv: (l * o + pv) / new,
    "the old o is left as it was: make it acc again before p v is added": lambda o, l, new, a, pv: o + pv / new,
    "the old o is divided by alpha: multiply": lambda o, l, new, a, pv: (l / a * o + pv) / new,
    "p v is multiplied by alpha, too: only the old part is": lambda o, l, new, a, pv: a * (l * o + pv) / new,
    "it is not divided by l' at every visit": lambda o, l, new, a, pv: a * l * o + pv,
    "it is divided by the old l, not by l'": lambda o, l, new, a, pv: a * o + pv / l,
    "(alpha l / l') o is divided by l' once more: p v alone has yet to be divided": (
        lambda o, l, new, a, pv: (a * l / new * o + pv) / new
    ),
    "p v is not divided by l', only the old o": lambda o, l, new, a, pv: a * l / new * o + pv,
    "the old o is missing": lambda o, l, new, a, pv: pv / new,
}


def _joined(one, other):
    """(o, m, l) of two sets of keys together."""
    m = torch.maximum(one[1], other[1])
    weights = [l * torch.exp(part - m) for _, part, l in (one, other)]
    l = sum(weights)
    o = sum(w[:, None] * part[0] for w, part in zip(weights, (one, other), strict=True))
    return o / l[:, None], m, l


def _visits(q, k, v, state, block, update):
    """The o after all visits when o' = update(o, l, l', alpha, p v); fp64."""
    o, m, l = (t.view(len(t), -1) for t in state)
    for start in range(0, len(k), block):
        tile = slice(start, start + block)
        s = q.shape[1] ** -0.5 * q.double() @ k[tile].double().T
        m_new = torch.maximum(m, s.amax(dim=1, keepdim=True))
        alpha, p = torch.exp(m - m_new), torch.exp(s - m_new)
        l_new = alpha * l + p.sum(dim=1, keepdim=True)
        o, m, l = update(o, l, l_new, alpha, p @ v[tile].double()), m_new, l_new
    return o
