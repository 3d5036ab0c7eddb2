"""Checks o and the gradients of each packed sequence taken alone, and that neighbors do not meet."""

import itertools
import warnings
from unittest import mock

from common import make_tensor, runtime, verify_results
from common.learn.check.require import reject, require_stored
from common.verify import Report, guard
from phase4_backward.checks import Given, reject_report, small_tiles, stages, with_gradients

import torch
import triton
import triton.language as tl

STAGES = {"_forward_kernel": ("o",), "_dkdv_kernel": ("dk", "dv"), "_dq_kernel": ("dq",)}


def check(answer):
    _check_first_in_64_bits(answer.sequence)
    with mock.patch.object(runtime, "tile_sizes", small_tiles), stages(answer, STAGES, first="sequence") as names:
        full, causal = dict(names=names), dict(names=names, is_causal=True)
        check_varlen(answer, (20, 0, 40, 1, 17), (33, 9, 20, 0, 17), 2, 24, torch.float16, **full)
        check_varlen(answer, (5, 33, 18), (18, 40, 5), 2, 16, torch.float32, **causal)
        lengths, causal["neighbors"] = ((9, 21, 40), (9, 21, 3)), float("nan")
        check_varlen(answer, *lengths, 1, 16, torch.float16, **causal)
    return "o, dq, dk, dv of each sequence, full and causal, empty ones too; NaN in the neighbors stays there"


def _check_first_in_64_bits(sequence):
    cu, _ = cumulative_lengths((2**30, 7))
    at = torch.zeros(1, dtype=torch.int64, device=cu.device)
    with runtime.on_device_of(cu), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy, about the overflow
        _first_kernel[(1,)](cu, at, SEQUENCE=sequence)
    if at.item() in (0, 4 * 7):
        convert = "convert it to int64 before it is multiplied by heads * head_dim"
        reject(f"sequence: with a first token of 2^30, first * 4 overflows: {convert}")


@triton.jit
def _first_kernel(cu_ptr, at_ptr, SEQUENCE: tl.constexpr):
    first, _ = SEQUENCE(cu_ptr, 1)
    tl.store(at_ptr, first * 4)


def check_varlen(
    answer, lengths_q, lengths_k, heads, head_dim, dtype,
    *, is_causal=False, scale=None, neighbors=None, names=("o", "dq", "dk", "dv"),
):  # fmt: skip
    """One packed run, then each sequence through verify_results. neighbors: fills every sequence but the second. names:
    of the results that are asked for.
    """
    (cu_q, ends_q), (cu_k, ends_k) = (cumulative_lengths(n) for n in (lengths_q, lengths_k))
    generator = torch.Generator().manual_seed(0)

    def packed(ends, guard=64):
        shape = (1, 1, ends[-1] + 2 * guard, heads * head_dim)
        x = make_tensor(shape, dtype=dtype, generator=generator).view(-1, heads, head_dim)
        x[:guard], x[-guard:] = float("nan"), float("nan")
        x = x[guard:-guard]
        if neighbors is not None:
            x[: ends[1]], x[ends[2] :] = neighbors, neighbors
        return x

    inputs = q, do, k, v = [packed(ends) for ends in (ends_q, ends_q, ends_k, ends_k)]
    results, lse = _packed_results(answer, q, k, v, do, cu_q, cu_k, is_causal, scale)
    sequences = range(len(lengths_q)) if neighbors is None else (1,)
    for wanted, b in itertools.product(({"o"} & {*names}, names), sequences):  # first o of every sequence
        where = f"sequence {b} of lengths_q = {lengths_q}, lengths_k = {lengths_k}{', causal' if is_causal else ''}"
        of_q, of_k = (slice(*ends[b : b + 2]) for ends in (ends_q, ends_k))
        o, dq, dk, dv, q, do, k, v = (
            t[rows].transpose(0, 1)[None]
            for t, rows in zip((*results, *inputs), (of_q, of_q, of_k, of_k) * 2, strict=True)
        )
        named = dict(o=o, dq=dq, dk=dk, dv=dv)
        asked = {name: named[name] for name in named if name in wanted}
        _reject_unwritten(where, asked, lengths_q[b], lengths_k[b])
        alone, options = dict(q=q, k=k, v=v, do=do), dict(is_causal=is_causal, scale=scale)
        report = _report(named, alone, **options)
        wrong = next((r.name for r in report.results if r.name in wanted and not r.passed), None)
        if "o" in wanted and wrong != "o":
            _require_lse(where, lse[:, of_q], alone, **options)
        if wrong is None:
            continue
        if neighbors is None:
            _name_pointer(where, b, wrong, named, inputs, ends_q, ends_k, **options)
        _reject_wrong(where, b, wrong, report, named, alone, neighbors, **options)


def _packed_results(answer, q, k, v, do, cu_q, cu_k, is_causal, scale):
    """o, dq, dk, dv, packed as q and k are; and lse, (heads, total_q)."""
    with guard.watched() as allocated:
        found = with_gradients(lambda *qkv: answer.varlen_attention(*qkv, cu_q, cu_k, is_causal, scale), q, k, v, do)
    require_stored({}, allocated, lambda *_: "how long is a sequence, and where does it begin?")
    shape = q.shape[1], q.shape[0]
    return found.values(), next(t.tensor for t in allocated if t.tensor.shape == shape)


def _require_lse(where, lse, inputs, **options):
    right = _attention(**{name: t.double() for name, t in inputs.items()}, **options)["lse"][0]
    if not torch.allclose(lse.double(), right, rtol=0, atol=1e-3):
        reject(f"{where}: o is right, and lse is not: lse_ptr of _forward_kernel is h * total_q + first_q further on")


def _name_pointer(where, b, name, got, packed, ends_q, ends_k, **options):
    """Reject if the result of sequence b, which is wrong, is the one with one pointer moved to another place."""
    lengths_q, lengths_k = ([right - left for left, right in itertools.pairwise(ends)] for ends in (ends_q, ends_k))
    lengths = list(zip(lengths_q, lengths_k, strict=True))
    if 0 in lengths[b]:
        return
    packed = dict(zip(("q", "do", "k", "v"), packed, strict=True))
    sequences = [_of_rows(packed, *ends, *seqs) for *ends, seqs in zip(ends_q[:-1], ends_k[:-1], lengths, strict=True)]
    all_right = [_attention(**rows, **options) for rows in sequences]
    alone = sequences[b] | {n: all_right[b][n] for n in ("lse", "delta")}
    firsts = dict(first_q=ends_q[b], first_k=ends_k[b], nothing=0)
    for moved in ("q", "do", "k", "v", "lse", "delta"):
        own, seq = ("first_k", lengths[b][1]) if moved in ("k", "v") else ("first_q", lengths[b][0])
        if moved in packed:
            memory, places, row = _packed_places(packed[moved].double(), firsts, own)
        else:
            memory = torch.cat([each[moved] for each in all_right], dim=2)[0]
            memory, places, row = _places_of_rows(memory, firsts, own, seq)
        for sentence, place in places.items():
            at = place[:, None].to(memory.device) + row * torch.arange(seq, device=memory.device)
            there = memory[at.clamp(max=len(memory) - 1)][None]
            there[:, at >= len(memory)] = float("nan")  # what lies behind the packed tensors
            result = _attention(**alone | {moved: there}, **options)[name]
            heads = slice(0, 1 if sentence.startswith("is moved by") else None)  # the last one reads past the end
            if _close(got[name][:, heads], result[:, heads]):
                reject(f"{where}: {name} is wrong: {moved}_ptr {sentence}, in the kernel that makes {name}")


def _packed_places(t, firsts, own):
    """Of a tensor (total, heads, head_dim): its rows in memory, where each head begins with a mistake of its pointer,
    {sentence: (heads,)}, and the distance of two rows of a head.
    """
    heads = t.shape[1]
    h = torch.arange(heads)
    places = {
        "lacks its head, h": firsts[own] * heads + 0 * h,
        f"passes {own} rows, where a token has `heads` of them: ({own} * heads + h) * HEAD_DIM": firsts[own] + h,
    }
    places |= _other_firsts(firsts, own, lambda first: first * heads + h)
    return t.reshape(-1, t.shape[2]), _wrong_ones(places, firsts[own] * heads + h), heads


def _places_of_rows(t, firsts, own, seq_q):
    """The same of lse or delta, (heads, total_q)."""
    total_q = t.shape[1]
    h = torch.arange(len(t))
    places = {
        "lacks its head, h * total_q": firsts[own] + 0 * h,
        "takes heads for seq_q apart: they lie total_q apart": firsts[own] + h * seq_q,
        "is placed as in a packed tensor: a head has total_q of its numbers in a row": firsts[own] * len(t) + h,
    }
    places |= _other_firsts(firsts, own, lambda first: h * total_q + first)
    return t.flatten(), _wrong_ones(places, h * total_q + firsts[own]), 1


def _other_firsts(firsts, own, place):
    return {f"is moved by {by}, where {own} is right": place(firsts[by]) for by in sorted(firsts)}


def _wrong_ones(places, right):
    return {sentence: place for sentence, place in places.items() if not torch.equal(place, right)}


def _of_rows(packed, first_q, first_k, seq_q, seq_k):
    """Rows of the packed tensors, (1, heads, seq, head_dim), fp64."""
    rows = {}
    for name, t in packed.items():
        first, seq = (first_q, seq_q) if name in ("q", "do") else (first_k, seq_k)
        rows[name] = t[first : first + seq].transpose(0, 1)[None].double()
    return rows


def _attention(q, k, v, do, *, is_causal, scale, lse=None, delta=None):
    """o, lse, delta, dq, dk, dv in fp64; the gradients from another lse or delta where they are given."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    s = (scale * (q @ k.mT)).masked_fill(hidden & is_causal, float("-inf"))
    own_lse = s.logsumexp(-1)
    o = torch.exp(s - own_lse[..., None]) @ v
    own_delta = (do * o).sum(-1)
    p = torch.exp(s - (own_lse if lse is None else lse)[..., None])
    ds = p * (do @ v.mT - (own_delta if delta is None else delta)[..., None])
    gradients = dict(dq=scale * (ds @ k), dk=scale * (ds.mT @ q), dv=p.mT @ do)
    return dict(o=o, lse=own_lse, delta=own_delta) | gradients


def _close(actual, right):
    if not right.isfinite().any():
        return False
    size = right[right.isfinite()].abs().max().item()
    return torch.allclose(actual.double(), right, rtol=0, atol=0.01 * size, equal_nan=True)


def _report(results, inputs, **options):
    """The results of one sequence, (1, heads, seq, head_dim), held against the truth of its inputs."""

    def stored(q, k, v, *, is_causal, scale, enable_gqa):
        o, *gradients = results.values()
        return Given.apply(q, k, v, o, lambda do: gradients)

    return verify_results(stored, **inputs, compare_sdpa=False, **options)


def _reject_wrong(where, b, first, report, results, inputs, neighbors, **options):
    """Say where the first wrong result of sequence b leads."""
    head_0 = [{name: t[:, :1] for name, t in named.items()} for named in (results, inputs)]
    if neighbors is not None:
        where += ", all others filled with NaN (does it see its neighbors?)"
    elif results["o"].shape[1] > 1 and _report(*head_0, **options)[first].passed:
        where += f" (its head 0 of {first} is right: where does head h of each tensor begin?)"
    elif b > 0:
        where += " (those before it are right: is every pointer moved to its first token, in every kernel?)"
    elif report["o"].passed:
        where += f" (o is right: where {first} is made, are all pointers moved, lse and delta by rows of total_q?)"
    else:
        where += " (does it end where its neighbor begins: seq_q by cu_q_ptr, seq_k by cu_k_ptr?)"
    reject_report(Report(report.case, tuple(r for r in report.results if r.name == first)), where)


def _reject_unwritten(where, tensors, seq_q, seq_k):
    for name, t in tensors.items():
        unwritten = guard.never_stored(t)[0]
        missing = unwritten.any(dim=0).any(dim=-1).nonzero().flatten().tolist()
        if missing and 0 in (seq_q, seq_k):
            has, lacks = ("queries", "keys") if seq_q else ("keys", "queries")
            reject(f"{where}: it has {has} but no {lacks}: its {name} is 0, and somebody has to write it")
        if missing and not unwritten[0].any() and unwritten[1:].all():
            reject(f"{where}: only head 0 of its {name} is written: {name}_ptr lacks its head, h")
        if missing:
            rows = f"rows {missing[0]} to {missing[-1]} of its {name} are never written"
            ask = "with which length is the tile compared before `return`? It is the length of what the program writes"
            reject(f"{where}: {rows}: {ask}")


def cumulative_lengths(lengths):
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=runtime.DEVICE), ends
