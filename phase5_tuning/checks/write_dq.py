"""Runs the backward kernel with the answer's writers in many orders of turns, and compiles it."""

from common import make_qkv
from common.learn.check.require import reject
from common.verify.reference import naive_attention
from phase5_tuning.checks import FP16, hopper_case, on_model, require_compiled, wrong_rows
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import interpreter

import torch

CASES = [  # heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 1, 100, 100, 64, False),
    (1, 1, 300, 500, 64, False),
    (2, 1, 400, 400, 64, True),
    (1, 1, 200, 300, 128, False),
    (2, 1, 400, 400, 128, True),
]
SEEDS = range(3)


def check(answer):
    if "_write" in answer.write.fn.__code__.co_names:
        reject("write calls _write of hopper_backward: write it out")
    for ordered in (True, False):
        for case in CASES if ordered else CASES[1:3]:
            _check_case(answer, case, ordered)
    q, k, v = make_qkv(1, 4, 300, 64, heads_kv=2, dtype=FP16)
    given = q, k, v, q, torch.empty(1, 4, 300), q, None
    call = lambda: hopper_backward.plan(*given, True, 0.125, 1)(*given)  # noqa: E731
    require_compiled(answer, hopper_backward, "_attn_bwd_hopper_kernel", call, "_write = write")
    runs = len(CASES) * len(SEEDS)
    return f"{runs} runs in the interpreter with the same bits in each, others in any order; it compiles for an H100"


def _check_case(answer, case, ordered):
    said, q, k, v = hopper_case(1, *case)
    said, is_causal = said + ", in any order" * (not ordered), case[-1]
    o, lse, _ = naive_attention(*(t.double() for t in (q, k, v)), is_causal=is_causal)
    o, lse, do = o.to(FP16), lse.float(), q.flip(2)

    def gradients(replaced=(), seed=0):
        given = q, k, v, o, lse, do, None
        with interpreter.interpreted(seed, replaced=replaced):
            return hopper_backward.plan(*given, is_causal, q.shape[3] ** -0.5, 1, ordered)(*given)

    right, tolerance = gradients(), dict(rtol=2e-2, atol=2e-2)
    for seed in SEEDS:
        with on_model(said):
            found = gradients([(hopper_backward._write, answer.write)], seed)
        for name, got, wanted in zip(("dq", "dk", "dv"), found, right, strict=True):
            close = torch.allclose(got, wanted, **tolerance)
            if not close or (ordered and not torch.equal(got, wanted)):
                why = f"the last bits of {name} are not those of the fixed order: parts are added in another"
                unfilled = "its sum or a part was used before anybody filled it"
                reject(f"{said}: {why if close else wrong_rows(name, got, wanted, unfilled, **tolerance)}")
