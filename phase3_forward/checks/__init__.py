"""What several checks of phase 3's exercises need; each check is a module beside this one (see common.learn.check)."""

import traceback

from common import make_qkv, verify_results
from common.learn.check.errors import is_stub, root_of
from common.learn.check.require import reject

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


def in_pieces(answer, *pieces):
    """Run the checks of an exercise that is written in several places; pieces: (name, check).

    Where some are right and others not begun, says so. Where none is begun, raises what they raise.
    """
    done, left, first = [], [], None
    for name, check in pieces:
        try:
            check(answer)
            done.append(name)
        except Exception as error:
            root = root_of(error)
            if not is_stub(root):
                raise
            own = [f.lineno for f in traceback.extract_tb(root.__traceback__) if f.filename == answer.__file__]
            left.append(f"{name} is still to be written" + (f" (line {own[-1]})" if own else ""))
            first = first or error
    if done and left:
        reject(f"{' and '.join(done)} is right; {', '.join(left)}")
    if first:
        raise first


def indices(seq_q, seq_k):
    return torch.arange(seq_q)[:, None], torch.arange(seq_k)[None, :]


def bottom_right(i, j, seq_q, seq_k):
    return (j <= i + seq_k - seq_q) & (j < seq_k)


def require_nothing_added(attention):
    """Reject acc / (l_i + a small number), by one query on one key: there l_i is 1, and o is v."""
    q, k, v = make_qkv(1, 1, 1, 16, seq_k=1, dtype=FP32)
    added = (v.double() / attention(q, k, v)[0].double() - 1).flatten()
    why = "Every row with a key becomes too small: tell the rows without one apart by l_i"
    if 1.5e-7 < added.mean() < 0.1 and (added - added.mean()).abs().max() < 1.5e-7:
        about = f"one query on one key has l_i = 1, and its o is divided by about 1 + {added.mean().item():.0e}"
        reject(f"o: {about}. Is something added to l? {why}")


def verify_masked(fn, q, k, v, mask, *, scale=None, what="") -> float:
    """Hold every row of (o, lse) = fn(q, k, v) against verify_results, as a problem of its own: one query, and the keys
    that mask (seq_q, seq_k), bool, shows it. Returns the largest z, rejects a row that fails, with `what` in front of
    the message."""
    o, lse = fn(q, k, v)
    if o.shape != q.shape or lse.shape != q.shape[:3]:
        reject(f"expected o {tuple(q.shape)} and lse {tuple(q.shape[:3])}, got {tuple(o.shape)} and {tuple(lse.shape)}")
    worst = 0.0
    for i, keys in enumerate(mask.to(q.device)):
        row = slice(i, i + 1)
        part = o[:, :, row], lse[:, :, row]
        report = verify_results(
            lambda *_, part=part, **__: part, q[:, :, row], k[:, :, keys], v[:, :, keys],
            scale=scale, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False,
        )  # fmt: skip
        if not report.passed:
            reject(
                f"{what}query {i}, which sees {int(keys.sum())} keys: {report.verdict}\n"
                f"row {i} taken alone, so that its index below is 0: {report}\n  hint: {report.hint}"
            )
        worst = max(worst, report.z)
    return worst
