"""Checks o and lse row by row, rows that saw no key among them, and that nothing is stored outside."""

import math

from common import make_qkv
from common.learn.check.require import close, guarded, reject
from common.verify import guard
from phase3_forward.checks import BF16, FP32, INF, bottom_right, indices, require_nothing_added, verify_masked

import torch


def check(answer):
    def ask(unwritten, outside):
        if not unwritten:
            return "is its store masked? Rows end at seq_q, columns at HEAD_DIM"
        if unwritten[0] == "o":
            return "is it stored with stride_o[2], stride_o[3]? Is the head's offset added twice (it is in o_ptr)?"
        return "is it stored? Is the head's offset added twice? lse_ptr already stands at this head"

    cases = [
        make_qkv(2, 2, 70, 40, seq_k=45, layout="bshd", poison=True),
        make_qkv(1, 2, 40, 64, seq_k=70, dtype=FP32),
        make_qkv(1, 2, 33, 16, layout="transposed"),
        make_qkv(1, 1, 33, 16, kind="large", dtype=FP32),
        make_qkv(1, 1, 5, 16, seq_k=3, dtype=BF16),
        make_qkv(1, 2, 3, 16, seq_k=0, dtype=FP32),
    ]
    for q, k, v in cases:
        seq_q, seq_k = q.shape[2], k.shape[2]
        mask = bottom_right(*indices(seq_q, seq_k), seq_q, seq_k)
        _require_rows_without_a_key(answer.bottom_right_attention, q, k, v)
        results = guarded(answer.bottom_right_attention, ask)(q, k, v)
        unseen = max(0, seq_q - seq_k)
        o, lse = (t[:, :, :unseen] for t in results)
        if o.isnan().any():
            reject("rows that saw no key: o is NaN, which is what 0 / 0 gives")
        if (lse != -INF).any():
            reject(f"rows that saw no key: lse is {lse.max().item():g}, not -inf. Is m_i part of it?")
        if not results[1][:, :, unseen:].isfinite().all():
            outside = "Where logits are large exp(m_i) overflows: add m_i outside of the logarithm"
            reject(f"lse is not finite in rows that saw keys. {outside}")
        _require_row_sums(results[0], q, k, v, mask)
        _require_lse(results[1], q, k, mask)
        require_nothing_added(answer.bottom_right_attention)
        verify_masked(lambda *_, results=results: results, q, k, v, mask)
    _require_large_values_and_nan(answer.bottom_right_attention)
    return "o and lse of 184 rows a head in fp16, bf16 and fp32, 30 of them without a key; nothing stored outside"


def _require_rows_without_a_key(attention, q, k, v):
    """Reject stores that leave out the rows without a key, and no others."""
    unseen = max(0, q.shape[2] - k.shape[2])
    with guard.watched():
        results = attention(q, k, v)
    for name, result in zip(("o", "lse"), results, strict=True):
        missing = guard.never_stored(result)
        why = "Nobody else stores them: they must leave with o = 0 and lse = -inf"
        if unseen and missing[:, :, :unseen].all() and not missing[:, :, unseen:].any():
            reject(f"{name}: the rows that saw no key are never stored, and all others are. {why}")


def _require_lse(lse, q, k, mask):
    """Reject an lse that is known to be wrong, or whose every element has the digits of 16 bits."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[3])
    right = s.masked_fill(~mask.to(q.device), -INF).logsumexp(-1) if s.numel() else lse.double()
    largest = s.masked_fill(~mask.to(q.device), -INF).amax(dim=-1) if s.numel() else right
    for sentence, wrong in {
        "log(l_i) is subtracted: lse = m_i + log(l_i)": 2 * largest - right,
        "this is the LSE in base 2: it is a natural logarithm": right / math.log(2),
    }.items():
        seen = right.isfinite() & (largest != right)
        if seen.any() and close(lse[seen], wrong[seen]) and not close(lse[seen], right[seen]):
            reject(f"lse: {sentence}")
    for dtype in (torch.float16, BF16):
        short = torch.equal(lse.to(dtype).float(), lse)
        if short and close(lse, right, 0.01) and not close(lse, right, 1e-5):
            reject(f"lse is rounded to {dtype}: the backward pass needs it in fp32")


def _require_large_values_and_nan(attention):
    """Large values stay finite, as o is their mean, and a NaN among them is seen by whoever sees its key."""
    q, _, v = make_qkv(1, 1, 64, 16)
    zero, large = torch.zeros_like(q), torch.full_like(v, 2000.0)
    if (attention(zero, zero, large)[0] != 2000).any():
        reject("o is wrong where values are large: acc is larger than o by l_i. Divide in fp32, and round then")
    large[0, 0, 2, 3] = float("nan")
    if not attention(zero, zero, large)[0][0, 0, 2:, 3].isnan().all():
        reject("a NaN in v does not reach o: it must, or nobody learns of it. Are the empty rows told apart by l_i?")


def _require_row_sums(o, q, k, v, mask):
    """Reject acc / l_i without [:, None], which divides column d by l_i[d] where the tile is square."""
    n = min(q.shape[2:])
    mask = mask.to(q.device)
    s = (q.double() @ k.double().mT / math.sqrt(q.shape[3])).masked_fill(~mask, -INF)
    m = s.amax(dim=-1, keepdim=True) if s.numel() else s.sum(dim=-1, keepdim=True)
    p = torch.exp(s - torch.where(m == -INF, 0.0, m))
    sums = p.sum(dim=-1)
    sums = torch.where(sums == 0, 1.0, sums)
    acc, o = (p @ v.double())[:, :, :n, :n], o[:, :, :n, :n]
    if close(o, acc / sums[:, :, None, :n], 0.01) and not close(o, acc / sums[:, :, :n, None], 0.01):
        reject("o: column d is divided by the sum of row d: l_i[:, None] is a column, one sum for each row")
