"""Trap 13 for the LSE and delta: the row of a head is found beyond 2^31 rows too. No memory of that size is needed:
each kernel is run once more as the program of a head far down, and where it would read and write is noted."""

import ast
import inspect
import textwrap
from unittest import mock

from common import make_qkv
from phase3_forward import forward as phase3
from phase4_backward import backward as phase4
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import numpy as np
import pytest
import torch
from helpers import interpreted_only, without_plans

SEQ = 20  # one tile of queries, one of keys: a program for each head
FAR = 2**31 // SEQ + 1  # a head whose rows lie beyond 2^31
ROWS = "lse_ptr", "lse_out_ptr", "delta_ptr", "dlse_ptr"

pytestmark = [
    interpreted_only,  # compiled: tests/gpu
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where 32 bits do not suffice
]


def touched_far_down(run, kernel, *args, **kwargs):
    """The addresses that the program of head FAR would read and write. Reading gives 0."""
    from triton.runtime import interpreter

    builder, touched = interpreter.interpreter_builder, set()

    def load(ptrs, mask, *_, **__):
        touched.update(ptrs.data[np.asarray(mask.data)].tolist())
        kind = ptrs.get_element_ty()
        return interpreter.TensorHandle(np.zeros(ptrs.data.shape, interpreter._get_np_dtype(kind)), kind)

    def store(ptrs, value, mask, *_, **__):
        touched.update(ptrs.data[np.asarray(mask.data)].tolist())

    far = dict(create_masked_load=load, create_masked_store=store)
    place = mock.patch.object(builder, "set_grid_idx", side_effect=lambda *_: setattr(builder, "grid_idx", (FAR, 0, 0)))
    with mock.patch.multiple(builder, **far), place:
        run(kernel, *args, grid=(1,), warmup=False, **kwargs)
    return touched


def kernels_of(call):
    """The names of the kernels that a call launches; raises where one of them is somewhere else far down."""
    from triton.runtime.interpreter import InterpretedFunction

    names, run = set(), InterpretedFunction.run

    def checked(kernel, *args, grid, warmup=False, **kwargs):
        run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        touched = touched_far_down(run, kernel, *args, **kwargs)
        for name in (name for name in ROWS if given.get(name) is not None):
            first = given[name].data_ptr() + FAR * SEQ * 4
            assert touched >= set(range(first, first + SEQ * 4, 4)), f"{kernel.__name__}: {name}"
        names.add(kernel.__name__)

    with mock.patch.object(InterpretedFunction, "run", checked), without_plans():
        call()
    return names


@pytest.fixture(scope="module")
def saved():
    q, k, v = make_qkv(1, 2, SEQ, 16)
    o, lse = phase3.attention_forward(q, k, v)
    return q, k, v, o, lse, torch.ones_like(o), torch.ones_like(lse)


def test_phases_3_and_4(saved):
    assert kernels_of(lambda: phase3.attention_forward(*saved[:3])) == {"_attn_fwd_kernel"}
    backward = {"_delta_kernel", "_attn_bwd_dkdv_kernel", "_attn_bwd_dq_kernel"}
    assert kernels_of(lambda: phase4.attention_backward(*saved)) == backward


@pytest.mark.parametrize("rung", LADDER[2:], ids=lambda rung: rung.name)
def test_phase_5(saved, rung):
    kernels = dict(dkdv_kernel=rung.dkdv, dq_kernel=rung.dq)
    assert kernels_of(lambda: attention_forward(*saved[:3], kernel=rung.forward)) == {rung.forward.__name__}
    backward = {"_attn_bwd_rows_kernel", rung.dkdv.__name__, rung.dq.__name__}
    assert kernels_of(lambda: attention_backward(*saved, **kernels)) == backward


def test_the_hopper_forward_s_row_of_a_head():
    """Its interpreter knows no integers of 32 bits, so the address is read in its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(hopper_forward._store.fn)))
    (row,) = (n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "lse_row")
    assert ast.unparse(row) == "work.lse_ptr + (b * work.heads_q + h).to(gl.int64) * work.seq_q"


def test_the_hopper_backward_s_small_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    padded, run, touched = 32, InterpretedFunction.run, {}
    do, dq = torch.ones(2, 1, 1, SEQ, 16)
    lse, dlse = torch.zeros(2, 1, 1, SEQ)
    row_lse, delta = torch.zeros(2, padded)
    dq_sum, count = torch.zeros(padded, 64), torch.zeros(2, dtype=torch.int32)

    def noted(kernel, *args, grid, warmup=False, **kwargs):
        touched[kernel.__name__] = touched_far_down(run, kernel, *args, **kwargs)

    sizes = dict(HEAD_DIM=16, BLOCK_D=64, SUM_D=64, BLOCK_M=padded)
    with mock.patch.object(InterpretedFunction, "run", noted):
        hopper_backward._attn_bwd_hopper_rows_kernel[(1,)](
            do, do, lse, dlse, row_lse, delta, dq_sum, count, do.stride(), do.stride(), 1, SEQ, padded,
            ORDERED=False, **sizes,
        )  # fmt: skip
        hopper_backward._attn_bwd_hopper_dq_kernel[(1,)](dq_sum, dq, dq.stride(), 1, SEQ, padded, 1.0, **sizes)
    for t, rows, columns, kernels in (
        (lse, SEQ, 1, ["rows"]), (dlse, SEQ, 1, ["rows"]), (row_lse, padded, 1, ["rows"]), (delta, padded, 1, ["rows"]),
        (dq_sum, padded, 64, ["rows", "dq"]),
    ):  # fmt: skip
        first = t.data_ptr() + FAR * rows * columns * 4
        for kernel in kernels:
            assert touched[f"_attn_bwd_hopper_{kernel}_kernel"] >= set(range(first, first + rows * columns * 4, 4))
