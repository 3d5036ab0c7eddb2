"""The Hopper kernels for some hundred queries with many keys: a group's heads become rows, parts of the keys a batch.

Queries (batch, heads_q, seq, head_dim), seen as (batch, heads_kv, group x seq, head_dim), fill tiles that a head alone
would leave half empty, and read keys once for all heads of a group. Keys (batch, heads, seq, head_dim), seen with other
strides, are (parts, batch x heads, seq / parts, head_dim), and queries are seen as often as there are parts, with a
stride of 0. So the kernels of hopper/ split, and split_kv's merge makes one of all.

What the kernels know of it: o is in fp32; the last part alone has the keys that do not divide, and the triangle of a
causal mask; a row's query is known from how many a head has. (Other parts multiply as many keys past their end by 0: an
infinite value there becomes NaN.) Where one part is enough and heads fill their tiles, the kernel takes the call as it
is.

Builds on: `hopper.forward`, `hopper.wide.forward` and this folder's `split_kv`.
"""

from dataclasses import dataclass

from phase5_tuning.decode import split_kv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.launch.plans import Launch, cdiv

import torch

MOST = 16  # parts
# Of a part, by the width of tiles: with fewer, split_kv's kernels are faster (at 192 and 256 not measured below 1,000).
LEAST_KEYS = {64: 4096, 128: 1024, 192: 512, 256: 512}
# Measured on an H100: nanoseconds of a program for a key, by the width of its tiles and its consumers;
# elements of o that are merged in a microsecond (fitted to parts of 16 bits), and the microseconds of a launch.
KEY_NS = {(64, 2): 8.3, (64, 3): 10.8, (128, 2): 12.1, (192, 2): 18.6, (256, 2): 26.4}
MERGED, MERGE_US = 0.375e6, 3.0


def tiles(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int]:
    """A tile's consumers, and how many tiles a group needs if its heads share them, and if each has its own."""
    (_, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    group = heads_q // heads_kv
    shape = hopper_forward.shape_of(hopper_forward.columns_of(head_dim), group * seq_q, seq_k, False)
    block = shape["CONSUMERS"] * hopper_forward.ROWS.value
    return shape["CONSUMERS"], cdiv(group * seq_q, block), group * cdiv(seq_q, block)


def packs(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the rows of a group fill clearly fewer tiles than those of its heads."""
    _, of_group, of_heads = tiles(q, k)
    return of_group < 0.9 * of_heads


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, offset: int) -> int:
    """In how many parts a Hopper kernel is to attend to the keys; 0 where other rules decide.

    Programs take turns in rounds of one for each multiprocessor. With more parts a round is shorter, and more is
    merged.
    """
    (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    columns = 64 * cdiv(head_dim, 64)
    if heads_q // heads_kv * seq_q <= 64 or head_dim <= hopper_forward.NARROW:  # one tile of split_kv's; narrow heads
        return 0
    keys, most = _seen(k, seq_q, is_causal, offset), split_kv.at_once(q)
    consumers, of_group, _ = tiles(q, k)
    of_all = batch * heads_kv * of_group
    if of_all > 2 * most:  # enough for any kernel
        return int(packs(q, k) and (keys >= LEAST_KEYS[columns] or not is_causal))

    def us(n):
        walks = cdiv(of_all * n, most) * keys / n * KEY_NS[columns, consumers] / 1e3
        return walks + (n > 1) * (MERGE_US + n * q.numel() / MERGED)

    # Every query sees a key of every part.
    counts = [n for n in range(1, MOST + 1) if not is_causal or (n - 1) * (keys // n) <= max(0, offset)]
    n = min(counts if all(_joined(t) for t in (k, v)) else counts[:1], key=us)
    busy = of_all * n / (cdiv(of_all * n, most) * most)
    return n if busy > 0.75 and keys >= n * LEAST_KEYS[columns] else 0


def _seen(k, seq_q: int, is_causal: bool, offset: int) -> int:
    """Keys that a query sees, on average."""
    return min(k.shape[2], offset + 1 + seq_q // 2) if is_causal else k.shape[2]


def _joined(t: torch.Tensor) -> bool:
    """Whether all heads of a batch follow one another with one stride."""
    return len(t) == 1 or t.stride(0) == t.shape[1] * t.stride(1)


@dataclass(frozen=True)
class FoldedLaunch:
    """`launch(q, k, v, o, lse)` writes o and lse, for all calls of one kind.

    views: size and strides with which the kernel sees q, k, v and o. merge: None if there is one part. parts: the shape
    of the LSE of all parts.
    """

    views: tuple
    attend: hopper_forward.HopperForwardPlan
    merge: Launch | None
    parts: tuple[int, ...]

    def __call__(self, q, k, v, o, lse):
        o_parts, lse_parts = split_kv.room(self.parts, q) if self.merge else (o, lse)
        taken = torch.zeros(1, dtype=torch.int32, device=q.device) if self.attend.queued else None
        tensors = q.contiguous(), k, v, o_parts
        views = (t.as_strided(*view) for t, view in zip(tensors, self.views, strict=True))
        self.attend.launch(*views, lse_parts, taken)
        if self.merge:
            self.merge(o_parts, lse_parts, o, lse)


def plan(q, k, v, o, lse, is_causal: bool, offset: int, scale: float, n: int) -> FoldedLaunch:
    """The launches in n parts for tensors like these, which a Hopper kernel takes; scale > 0.

    is_causal: query i sees keys 0 ... i + offset.
    """
    (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    keys = split_kv.keys_seen(q, k, is_causal, offset)
    share = keys if n == 1 else _seen(k, seq_q, is_causal, offset) // n  # so that parts take equally long
    more = keys - n * share
    rows = heads_q // heads_kv * seq_q
    outer, heads = (batch, heads_kv) if n == 1 else (n, batch * heads_kv)
    of_rows, strides = (outer, heads, rows, head_dim), (rows * head_dim, head_dim, 1)
    of_o = of_rows, (heads * rows * head_dim, *strides)
    of_q = of_o if n == 1 else (of_rows, (0, *strides))
    of_k, of_v = (
        ((outer, heads, share + more, head_dim), (t.stride(0) if n == 1 else share * t.stride(2), *t.stride()[1:]))
        for t in (k, v)
    )
    views = [t.as_strided(*view) for t, view in ((q.contiguous(), of_q), (k, of_k), (v, of_v))]
    shape = n, *lse.shape
    of_parts = split_kv.room(shape, q) if n > 1 else None
    mask = dict(offset=offset, of_head=seq_q) if is_causal else {}
    plan_of = wide_forward.plan if head_dim > 128 else hopper_forward.plan
    attend = plan_of(*views, is_causal, scale, 1, parts=n > 1, more=more, **mask)
    merge = split_kv.merging(*of_parts, o, lse) if of_parts else None
    return FoldedLaunch((of_q, of_k, of_v, of_o), attend, merge, shape)
