"""Checks both formulas in fp64, and the kernel for dtypes, strides, the term dlse and what it
stores.
"""

import itertools

from common import make_qkv, make_tensor, runtime
from common.learn.judge import counted, reject, require
from common.verify.harness import E
from phase4_backward.checks import UNWRITTEN, roomy

import torch


def check(answer):
    q, k, v = (t.double() for t in make_qkv(2, 3, 7, 5, seq_k=11, dtype=torch.float32))
    # Its rows do not sum to 1: delta_over_keys needs p.
    p, do = torch.softmax(q @ k.mT, dim=-1) + 0.1, q.flip(-1)
    dp = do @ v.mT
    mistakes = {
        "P is missing: the sum is over P * dP": dp.sum(-1),
        "this is the mean; wanted is the sum": (p * dp).mean(-1),
    }
    # (p @ v * do).sum(-1), which sums over keys first, is the same number and as good.
    _require_fp64("delta_over_keys", answer.delta_over_keys(p, do, v), (p * dp).sum(-1), mistakes)
    mistakes = {"this is the mean; wanted is the sum": (do * q).mean(-1)}
    _require_fp64(
        "delta_over_head_dim", answer.delta_over_head_dim(q, do), (do * q).sum(-1), mistakes
    )

    for lead in ((), (2, 1, 3)):
        p, do, v, o = (
            torch.ones(*lead, *sizes, dtype=torch.float64)
            for sizes in ((7, 11), (7, 5), (11, 5), (7, 5))
        )
        ones = torch.ones(*lead, 7, dtype=torch.float64)
        for what, given, right in (
            ("delta_over_keys", (p, do, v), 55 * ones),
            ("delta_over_head_dim", (o, do), 5 * ones),
        ):
            try:
                actual = getattr(answer, what)(*given)
            except (IndexError, RuntimeError) as error:
                reject(
                    f"{what}: with {len(lead)} leading axes it raises {error}. Count axes from the end: dim=-1, .mT"
                )
            require(f"{what}, {len(lead)} leading axes", actual, right, rtol=1e-12, atol=1e-12)

    for dtype, layout in (
        (torch.float16, "contiguous"),
        *itertools.product(runtime.DTYPES, ("transposed", "sliced")),
    ):
        _check_delta_kernel(answer, dtype, 40, layout, with_dlse=layout == "transposed")
    _check_delta_kernel(answer, torch.float16, 64, "a sum's", with_dlse=False)
    return "both formulas in fp64; the kernel in fp16, bf16, fp32, dO transposed, sliced, with stride 0; less dlse"


def _require_fp64(what, actual, right, mistakes):
    if isinstance(actual, torch.Tensor) and actual.shape == right.shape:
        error = (actual.double() - right).abs().max().item()
        if 1e-10 < error < 1e-4:
            reject(
                f"{what}: computed in fp32 (off by {error:.0e}), the inputs are fp64: stay in their dtype"
            )
    require(what, actual, right, rtol=1e-12, atol=1e-12, mistakes=mistakes)


def _check_delta_kernel(answer, dtype, head_dim, layout, *, with_dlse):
    shape, rows = (2, 3, 37, head_dim), 6 * 37
    o = make_tensor(
        shape, dtype=dtype, poison=layout == "sliced", generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(1)
    if layout == "a sum's":
        do = torch.ones((), dtype=dtype, device=o.device).expand(shape)
    elif layout == "contiguous":  # with finite numbers behind the last row
        o, do = (
            make_tensor((2, 3, 40, head_dim), dtype=dtype, generator=generator)
            .flatten()[: rows * head_dim]
            .view(shape)
            for _ in range(2)
        )
    else:
        do = make_tensor(shape, dtype=dtype, layout=layout, generator=generator)
    dlse = (
        roomy(make_tensor((1, *shape[:3]), dtype=torch.float32, generator=generator)[0])
        if with_dlse
        else None
    )
    memory = torch.full((64 + 3 * rows,), 7.0, device=o.device)
    delta = memory[64 : 64 + rows].view(shape[:3]).fill_(UNWRITTEN)
    kernel_o, kernel_do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o), counted() as moved:
        answer._delta_kernel[(2 * 6,)](
            kernel_o, kernel_do, dlse, delta, kernel_o.stride(), kernel_do.stride(), 3, 37,
            HEAD_DIM=head_dim, BLOCK_D=64, BLOCK_M=32,
        )  # fmt: skip
    what = f"delta, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}, dO in {layout} memory"
    what += ", with dlse" if with_dlse else ""
    less = dlse.double() if with_dlse else 0.0
    rounded = (do * o).double().sum(-1) - less
    past = None
    if layout == "contiguous":
        wide_o, wide_do = (
            torch.as_strided(t, (*shape[:3], 64), t.stride()).double() for t in (o, do)
        )
        past = (wide_o * wide_do).sum(-1)
    o, do = o.double(), do.double()
    product = (do * o).sum(-1)
    right = product - less
    size = (do * o).abs().sum(-1).max().item() + (dlse.abs().max().item() if with_dlse else 0.0)
    # fp32: at most one rounding for each of the terms.
    exact = dict(rtol=0, atol=(head_dim + 2) * E * size)

    def good(part):
        return torch.allclose(delta[part].double(), right[part], **exact)

    def missing(part):
        return (delta[part] == UNWRITTEN).all()

    outside = not ((memory[:64] == 7).all() and (memory[64 + rows :] == 7).all())
    if good((0, 0)) and missing((0, 1)):
        reject(
            f"{what}: head 0 is right, head 1 is never written: delta_ptr is that of this head already"
        )
    if outside:
        reject(f"{what}: something was written behind the last row: does the store have a mask?")
    if (delta == UNWRITTEN).any():
        count = int((delta == UNWRITTEN).sum())
        reject(
            f"{what}: {count} of {rows} elements are never written: does every program store all its rows?"
        )
    mistakes = {
        "every head has the delta of head 0: are both pointers moved to batch b and head h?": right[
            :1, :1
        ].expand(2, 3, 37),
        "do is read with the strides of o: it has four of its own": (do.mT.reshape(shape) * o).sum(
            -1
        )
        - less,
        "the products are rounded before they are summed: convert o and do to fp32 first": rounded,
    }
    if past is not None:
        mistakes["columns past head_dim are in the sum: mask offs_d < HEAD_DIM"] = past
    if with_dlse:
        mistakes["dlse is not subtracted: what dS needs is delta - dlse"] = product
        mistakes["dlse is added: what dS needs is delta - dlse"] = product + less
        mistakes["every head subtracts the dlse of head 0: dlse_ptr + pid_bh * seq_q"] = (
            product - less[:1, :1]
        )
    others = (slice(None), slice(1, 3))
    signs = {
        "batch 0 is right, batch 1 is not: b * stride_o[0], b * stride_do[0]?": good(0)
        and not good(1),
        "head 0 is right, the others are not: h * stride_o[1], h * stride_do[1], dlse of this head?": (
            good((slice(None), 0)) and not good(others)
        ),
        "NaN came in from outside: both loads need a mask, of rows < seq_q and columns offs_d < HEAD_DIM": (
            delta.isnan().any()
        ),
    }
    require(what, delta, right, **exact, mistakes=mistakes, signs=signs)
    most = 2 * rows * head_dim * kernel_o.element_size() + (4 * rows if with_dlse else 0)
    if moved and moved.loaded > most:
        reject(
            f"{what}: {moved.loaded} bytes are loaded, there are {most}: mask the rows past seq_q in the loads too"
        )
