"""Checks the state that waits in memory between tiles of keys, how often it travels, and whole
results.
"""

from common.learn.judge import counted, reject, require
from phase2_tiling.checks import (
    FP32,
    attention_cases,
    nan_around,
    one_head,
    state_of,
    surrounded,
    verify,
)

import torch
import triton


def check(answer):
    _check_continuation(answer)
    cases = attention_cases(0, 1, 33)
    for seq_q, seq_k, head_dim, dtype, options in cases:
        verify(
            answer.attention_keys_outside, *one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
        )
    return f"{len(cases)} cases against SDPA; the state travels as often as it must, and stays normalized in between"


def _check_continuation(answer):
    """From the state of 12 keys in memory to that of 62, in two tiles."""
    seq_q, seen, seq_k, head_dim, block = 70, 12, 50, 16, 32
    q, k_all, v_all = one_head(seq_q, seen + seq_k, head_dim, dtype=FP32)
    k, v = (surrounded(t[seen:]) for t in (k_all, v_all))
    before, right = (state_of(q, k_all[:n], v_all[:n]) for n in (seen, seen + seq_k))
    o, m, l = (surrounded(t.float()) for t in before)
    tensors = dict(q=q, k=k, v=v, o=o, m=m, l=l)
    with counted(**tensors) as moved:
        answer._attention_keys_outside_kernel[(1,)](
            q, k, v, o, m, l, q.stride(), k.stride(), v.stride(), o.stride(), seq_q, seq_k, head_dim**-0.5,
            HEAD_DIM=head_dim, BLOCK_M=block, BLOCK_N=block, num_stages=1,
        )  # fmt: skip
    _require_state((o, m, l), right, before, q, k, v, block)
    if not all(map(nan_around, (o, m, l))):
        reject("something was written outside of o, m and l: do the stores have a mask?")
    if moved:
        _require_visits(moved, tensors, triton.cdiv(seq_k, block))


def _require_state(state, right, before, q, k, v, block):
    """Hold (o, m, l) against `right`; `before` is the state without the keys k, in tiles of `block`."""
    last = state_of(q, k[block:], v[block:])
    acc = _visits(q, k, v, before, block, lambda o, l, new, alpha, pv: alpha * o + pv)
    acc = acc / right[2][:, None]
    of_o = {"it is acc that waits in memory: divide by l' at every visit": acc} | {
        sentence: _visits(q, k, v, before, block, update)
        for sentence, update in _WRONG_UPDATES.items()
    }
    for i, name in ((1, "m"), (2, "l"), (0, "o")):  # a wrong m or l makes o wrong, too
        mistakes = {
            "it is as it was: is it stored on every visit?": before[i],
            "it is that of the last tile of keys alone: are o, m and l loaded and taken along?": (
                last[i]
            ),
        }
        mistakes |= of_o if name == "o" else {}
        require(name, state[i], right[i], mistakes=mistakes, atol=1e-4)


def _require_visits(moved, tensors, visits):
    """k and v are read once, q at every visit; o, m and l are read and written at every visit."""
    for name, t in tensors.items():
        reads, writes = (1, 0) if name in "kv" else (visits, 0 if name == "q" else visits)
        for done, count, times in (
            ("read", moved.loaded_from, reads),
            ("written", moved.stored_to, writes),
        ):
            if count[name] != times * t.nbytes:
                reject(
                    f"with {visits} tiles of keys, {count[name]} bytes of {name} were {done}, {times * t.nbytes} "
                    f"expected ({times} times {t.nbytes}): are the accesses masked, is each done once a visit?"
                )


_WRONG_UPDATES = {
    "the old o is rescaled by alpha alone: it was divided by the old l": lambda o, l, new, alpha, pv: (
        (alpha * o + pv) / new
    ),
    "the old o is multiplied by the new l: it was divided by the old one": lambda o, l, new, alpha, pv: (
        (alpha * new * o + pv) / new
    ),
    "the old o is multiplied by its l but not by alpha": lambda o, l, new, alpha, pv: (
        (l * o + pv) / new
    ),
    "the old o is divided by alpha: multiply": lambda o, l, new, alpha, pv: (
        (l / alpha * o + pv) / new
    ),
    "it is not divided by l' at every visit": lambda o, l, new, alpha, pv: alpha * l * o + pv,
    "it is divided by the old l, not by l'": lambda o, l, new, alpha, pv: alpha * o + pv / l,
    "the old o is missing": lambda o, l, new, alpha, pv: pv / new,
}


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
