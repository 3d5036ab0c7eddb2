"""Checks the largest logits for ragged lengths, with NaN around the inputs, and counts the bytes that are read."""

from common.learn.check.require import counted, reject, require, require_none
from phase2_tiling.checks import FP16, FP32, NAN, nan_around, one_head, surrounded

import torch
import triton

INF = float("inf")


def check(answer):
    lengths, block = ((150, 70), (128, 64), (1, 1), (65, 129), (63, 31), (40, 0)), 64
    for (seq_q, seq_k), dtype, kind in zip(lengths, (FP16, FP32) * 3, ("low", "normal") * 3, strict=True):
        q, k, _ = one_head(seq_q, seq_k, 16, dtype=dtype, kind=kind)
        scale = 1e30 if kind == "low" else 0.25  # below any number that is not -inf
        if seq_k < block:  # the same logits
            q.neg_(), k.neg_()
        if kind == "normal":  # keys that exist may have the logit 0, too
            q[0] = 0
        out = surrounded(torch.full((seq_q,), NAN, device=q.device))
        with counted(q=q, k=k) as moved:
            answer.largest_logit(q, k, scale, out)
        what = f"seq_q = {seq_q}, seq_k = {seq_k}"
        logits = torch.nn.functional.pad(scale * q.double() @ k.double().T, (1, 0), value=-INF)
        right = logits.amax(dim=1)
        full = torch.arange(seq_q, device=q.device) < seq_q // block * block
        mistakes = {
            "the queries of the last, partial tile have no program: is the grid rounded up?": right.where(full, NAN),
            "the last, partial tile of keys is dropped: the loop ends at seq_k": (
                logits[:, : 1 + seq_k // answer.BLOCK_N * answer.BLOCK_N].amax(dim=1)
            ),
            "NaN comes in from memory past the last key: does the load of k have a mask?": right * NAN,
            "a logit of 0 is taken for one of a key that does not exist. One that exists may have it: ask for its "
            "number, offs_n < seq_k": right.masked_fill(right == 0, -INF),
            "a key that does not exist has the logit inf: load 0 for it, and replace its logit by -inf after the "
            "product": torch.full_like(right, INF),
        }
        signs = {
            f"a key that does not exist wins with the logit {out[0].item():g}: what is its logit? All that exist may "
            "be lower, so only -inf will do": out.isfinite().all() and (out == out[0]).all()
        }
        require(f"out, {what}", out, right, mistakes=mistakes, signs=signs)
        if not nan_around(out):
            reject(f"{what}: something was written outside of out: does the store have a mask?")
        programs = triton.cdiv(seq_q, block)
        read_q, read_k = (moved.loaded_from[name] for name in "qk") if moved else (q.nbytes, programs * k.nbytes)
        signs = {
            f"{read_q} bytes of q were read, it has {q.nbytes}: is the load masked?": read_q != q.nbytes,
            f"{read_k} bytes of k were read, {programs} programs need {programs * k.nbytes}: does the load have a "
            "mask, does every program own a query?": read_k != programs * k.nbytes,
        }
        require_none(signs, what)
    _check_lowest_logits(answer)
    return f"lengths {', '.join(f'{m} x {n}' for m, n in lengths)}; nothing read or written outside"


def _check_lowest_logits(answer):
    """All logits are the lowest number of fp32: only -inf is below them."""
    q, k, _ = one_head(3, 33, 16, dtype=FP32)
    lowest = torch.finfo(FP32).min
    q.zero_()[:, 0], k.zero_()[:, 0] = 1.0, lowest
    out = torch.full((3,), NAN, device=q.device)
    answer.largest_logit(q, k, 1.0, out)
    finite = (
        f"a key that does not exist wins with the logit {out[0].item():g}: logits may be lower, so only -inf will do"
    )
    right = torch.full_like(out, lowest)
    require(f"out, all logits {lowest:g}", out, right, signs={finite: bool((out > lowest).all())}, rtol=1e-6, atol=0.0)
