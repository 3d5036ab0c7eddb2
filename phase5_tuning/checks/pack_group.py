"""Checks where each row comes from and goes to, parts without keys, the bytes that are read, and the products."""

from common import make_qkv
from common.learn.check.require import (
    close,
    counted,
    guarded,
    misread,
    reject,
    require,
    require_none,
    require_tensor_cores,
    require_verified,
)
from phase5_tuning.checks import BF16, FP16, FP32, INF

import torch


def check(answer):
    attend, in_parts = guarded(answer.attend_parts), guarded(answer.attend_parts, _of_parts)
    for heads_q, heads_kv, seq_q in ((6, 3, 1), (6, 2, 2), (6, 2, 3)):
        _check_rows(attend, heads_q, heads_kv, seq_q)
    for parts in (2, 5):
        _check_parts(in_parts, parts)
    for heads_q, heads_kv, seq_q, dtype, memory in (
        (4, 4, 1, FP16, dict(layout="transposed")),
        (12, 1, 5, BF16, dict(layout="bshd", layout_v="bhsd", poison=True)),
        (4, 2, 3, FP16, dict(layout="sliced")),
    ):
        inputs = make_qkv(2, heads_q, seq_q, 24, heads_kv=heads_kv, seq_k=75, dtype=dtype, **memory)
        what = f"{heads_q} heads on {heads_kv}, {seq_q} queries, 75 keys, {dtype}"

        def whole(q, k, v, scale, **_):
            o, lse = attend(q, k, v, 1, scale)
            return o[0].to(q.dtype), lse[0]

        require_verified(what, whole, *inputs, enable_gqa=True)
    loaded = _check_traffic(attend)
    q, k, v = make_qkv(1, 4, 1, 16, heads_kv=2, seq_k=64, dtype=FP16)
    require_tensor_cores(answer, lambda: attend(q, k, v), products=4)
    return f"each row in its place, parts without keys, three dtypes, any strides; {loaded}"


def _of_parts(unwritten, outside):
    """What is asked where rows are missing that one part alone has stored."""
    return "has each part rows of its own in o and lse: does `part` count in their number?"


def _whole(q, k, v, rows=None):
    """(o, lse) in fp64. rows(h, m): the query head and the query that row m of head h takes instead of its own."""
    q, k, v = (t.double() for t in (q, k, v))
    if rows:
        q = torch.stack([torch.stack([q[:, *rows(h, m)] for m in range(q.shape[2])], 1) for h in range(q.shape[1])], 1)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    s = q @ k.mT / q.shape[3] ** 0.5
    return s.softmax(-1) @ v, s.logsumexp(-1)


def _wrong_rows(q, k, v):
    """{mistake: the (o, lse) that follows}, of wrong rows, heads, strides and keys."""
    (_, heads_q, seq_q, _), heads_kv = q.shape, k.shape[1]
    group = heads_q // heads_kv

    def other_order(h, m):
        r = h % group * seq_q + m
        return h // group * group + r % group, r // group

    def queries_only(h, m):
        return h // group * group + (h % group * seq_q + m) % group, m

    def mixed(h, m):
        return h, (h % group * seq_q + m) // group

    exchanged = (t.repeat(1, group, 1, 1) for t in (k, v))
    divided = (t.flatten(0, 1)[torch.arange(2 * heads_kv) // group].view(t.shape) for t in (k, v))
    batch, head, _, column = q.stride()
    as_heads = q.as_strided((2, heads_kv, group * seq_q, 16), (batch, group * head, head, column)).reshape(q.shape)
    padded = [torch.cat([t, 0 * t[:, :, :28]], dim=2) for t in (k, v)]
    second = q.as_strided(q.shape[1:], q.stride()[1:], q.storage_offset() + batch + heads_q * head)
    return {
        "q is loaded query after query, and o and lse are stored head after head (or the other way round): rows of a "
        "tile have one order": _whole(q, k, v, other_order),
        "every group takes the query heads of the first one: they begin at g * group": _whole(
            q, k, v, lambda h, m: (h % group, m)
        ),
        "the query heads of a batch entry begin at head 0: stride_q[0] has counted the batch": _whole(
            torch.stack([q[0], second]), k, v
        ),
        "all rows take the first query: there are seq_q of them for each head": _whole(q, k, v, lambda h, m: (h, 0)),
        "all rows take the first head of their group": _whole(q, k, v, lambda h, m: (h // group * group, m)),
        "heads of a group are neighbors, g * group ... g * group + group - 1; yours are heads_kv apart": _whole(
            q, k, v, lambda h, m: (h // group + h % group * heads_kv, m)
        ),
        "query head h reads key head h // group, not h % heads_kv": _whole(q, *exchanged),
        "pid_bh counts groups, which are heads of keys already: it is not divided by group": _whole(q, *divided),
        "rows are taken for heads: a head has seq_q of them": _whole(as_heads, k, v),
        "rows whose query is r % seq_q belong to head r // seq_q of the group, not r % group": _whole(
            q, k, v, queries_only
        ),
        "rows whose head is r // seq_q are the queries r % seq_q of it, not r // group": _whole(q, k, v, mixed),
        "q is read as if it were contiguous: it has four strides": _whole(
            q.as_strided(q.shape, q.contiguous().stride()), k, v
        ),
        "q has a stride between queries, which is not HEAD_DIM": _whole(
            q.as_strided(q.shape, (batch, head, 16, column)), k, v
        ),
        "q has a stride between columns, too": _whole(q.as_strided(q.shape, (*q.stride()[:3], 1)), k, v),
        "every batch entry takes the queries of the first one: has q its batch stride?": _whole(q[:1], k, v),
        "28 keys past the end count as logit 0: mask them": _whole(q, *padded),
        "scale is missing": _whole(4 * q, k, v),
    }


def _check_rows(attend, heads_q, heads_kv, seq_q):
    """fp32, a batch of two, q and k and v with strides of their own: who takes a wrong row is told which."""
    group = heads_q // heads_kv
    # Of more batches, so that a tensor read with the strides of another stays inside of memory.
    q = make_qkv(300, heads_q, seq_q, 16, seq_k=1, dtype=FP32, layout="transposed")[0][:2]
    k, v = (
        make_qkv(4, heads_kv, 1, 16, seq_k=100, dtype=FP32, layout=layout)[n][:2]
        for n, layout in ((1, "bshd"), (2, "bhsd"))
    )
    what = f"{heads_q} heads on {heads_kv}, {seq_q} {'query' if seq_q == 1 else 'queries'}"
    o, lse = (t[0] for t in attend(q, k, v))
    mistakes = _wrong_rows(q, k, v)
    mistakes |= {f"q is read with the strides of k{where}": _whole(t, k, v) for where, t in misread(q, k).items()}
    mistakes |= {f"k is read with the strides of v{where}": _whole(q, t, v) for where, t in misread(k, v).items()}
    right = _whole(q, k, v)
    s = q.double() @ k.double().repeat_interleave(group, dim=1).mT / 4
    found = {sentence: of[1] for sentence, of in mistakes.items()}
    require(f"lse, {what}", lse, right[1], mistakes=found | {"m is missing": right[1] - s.amax(-1)})
    mistakes |= {f"v is read with the strides of k{where}": _whole(q, k, t) for where, t in misread(v, k).items()}
    found = {sentence: of[0] for sentence, of in mistakes.items()}
    found["o is not divided by l"] = right[0] * (right[1] - s.amax(-1)).exp()[..., None]
    require(f"o, {what}", o, right[0], mistakes=found)


def _check_parts(attend, parts):
    """Three tiles of 64 keys, the last one ragged: of five parts two are empty."""
    q, k, v = make_qkv(1, 4, 1, 16, heads_kv=2, seq_k=150, dtype=FP16)
    o, lse = attend(q, k, v, parts)
    share = -(-3 // parts) * 64
    for part in range(parts):
        begin, end = min(150, part * share), min(150, part * share + share)
        what = f"part {part} of {parts}, keys {begin} ... {end - 1}"
        if begin == end:
            signs = {
                "o or lse is NaN: 0 / 0, l being 0?": bool((o[part].isnan() | lse[part, ..., None].isnan()).any()),
                f"lse is {lse[part].flatten()[0]:.4g}, where -inf is right": bool((lse[part] != -INF).any()),
                "o is not 0": bool((o[part] != 0).any()),
            }
            require_none(signs, f"part {part} of {parts}, which has no keys")
            continue
        spans = (0, 150), (0, share), (begin, end)
        whole, first, right = (_whole(q, k[:, :, slice(*keys)], v[:, :, slice(*keys)]) for keys in spans)
        group_by_group = lse.view(2, parts, 2).transpose(0, 1).reshape(lse.shape)
        if close(group_by_group[part], right[1]) and not close(lse[part], right[1]):
            reject("all groups of a part lie together, then the next part: yours are stored group after group")
        for taken, of in (("all 150 keys", whole), ("the keys of part 0", first)):
            if close(lse[part], of[1]) and not close(lse[part], right[1]):
                reject(f"{what}: it took {taken}: the walk is from begin_n to end_n")
        require(f"lse of {what}", lse[part], right[1])
        require(f"o of {what}", o[part], right[0], rtol=2e-3, atol=2e-3)


def _check_traffic(attend):
    """The bytes that are asked for, in one part and in three."""
    group, q_k_v = 4, make_qkv(1, 8, 2, 32, heads_kv=2, seq_k=192, dtype=FP16)
    for parts in (1, 3):
        named = dict(zip("qkv", q_k_v, strict=True))
        with counted(**named) as moved:
            o, lse = attend(*q_k_v, parts)
        if not moved:
            return "compiled, bytes are not counted"
        times = {name: moved.loaded_from[name] / t.nbytes for name, t in named.items()}
        where = f"groups of {group} heads, {parts} {'part' if parts == 1 else 'parts'}"
        signs = {
            f"{name} is read {times[name]:.3g} times: each head of a group reads it for itself. Load a tile once, and "
            "let one tl.dot take the rows of all heads": times[name] == group
            for name in "kv"
        }
        signs |= {f"{name} is read {times[name]:.3g} times, where once is enough": times[name] != 1 for name in "kv"}
        signs[f"q is read {times['q']:.3g} times: once by each part, before the walk"] = times["q"] != parts
        signs[f"{moved.stored} bytes are stored, and o and lse have {o.nbytes + lse.nbytes}"] = (
            moved.stored != o.nbytes + lse.nbytes
        )
        tiles = 2 * 192 // 64
        enough = f"{2 * tiles} are enough: two for each tile of keys, of all rows of a group"
        signs[f"{moved.products} products, where {enough}"] = moved.products > 2 * tiles
        require_none(signs, where)
    return "K and V read once for all heads of a group"
