"""Checks attention against SDPA in many cases, and that every tile of keys and values is loaded
once.
"""

import ast
import inspect

from common import runtime
from common.learn.judge import counted, reject
from phase2_tiling.checks import BF16, FP32, attention_cases, one_head, state_of, verify

import torch
import triton


def check(answer):
    calls = (
        n.func for n in ast.walk(ast.parse(inspect.getsource(answer))) if isinstance(n, ast.Call)
    )
    if any(isinstance(f, ast.Name) and f.id == "attention_tile_step" for f in calls):
        reject(
            "attention_tile_step is the step that you are to write: use online_softmax_step and tl.dot"
        )
    q, k, v = one_head(33, 70, 32, dtype=FP32)
    _, m, l = state_of(q, k, v)
    last = (
        torch.exp(32**-0.5 * q.double() @ k[64:].double().T - m[:, None])
        @ v[64:].double()
        / l[:, None]
    )
    if torch.allclose(answer.attention(q, k, v).double(), last, atol=1e-4):
        reject("o holds the last tile of keys alone: is p v added to what acc held before?")
    cases = attention_cases(0, 1, 32, 33, 64)
    for seq_q, seq_k, head_dim, dtype, options in cases:
        q, k, v = one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
        with counted(k=k, v=v) as moved:
            verify(answer.attention, q, k, v)
        programs = triton.cdiv(seq_q, runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])
        # bf16: the kernel reads a copy.
        for name, t in dict(k=k, v=v).items() if moved and dtype != BF16 else ():
            if moved.loaded_from[name] != programs * t.nbytes:
                reject(
                    f"{moved.loaded_from[name]} bytes of {name} were read, {programs} programs need "
                    f"{programs * t.nbytes}: does the load have a mask, is each tile loaded once?"
                )
    return f"{len(cases)} cases against SDPA: fp16, bf16 and fp32, ragged lengths, peaked rows, logits far below zero"
