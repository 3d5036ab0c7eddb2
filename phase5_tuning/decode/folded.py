"""The Hopper kernel for some hundred queries with many keys: parts of the keys become the batch.

Keys (1, heads, seq, head_dim), seen with other strides, are (parts, heads, seq / parts, head_dim). Queries are seen as
often as there are parts, with a stride of 0, and the heads of a group one after the other, so that it reads keys once.
So the kernel of hopper/forward.py splits without knowing of it. What the parts leave over at the end, keys that do not
divide or the triangle of a causal mask, is a part of its own by split_kv's kernel, and split_kv's merge makes one of
all. A batch has other strides than a sequence, so there must be one sequence only.

Builds on: `hopper.forward` and this folder's `split_kv`.
"""

from dataclasses import dataclass

from phase5_tuning.decode import split_kv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch.plans import Launch, cdiv

import torch

ROWS = 128  # of a program: two consumers
MOST = 16  # parts


def parts(q: torch.Tensor, k: torch.Tensor, is_causal: bool, offset: int) -> int:
    """In how many parts to cut the keys that all queries see; 0 where other kernels are faster.

    Programs take turns in rounds of one for each multiprocessor, and a round is the longer, the fewer parts there are.
    Another part costs its merge, about a 64th of the whole. Measured on an H100: faster than split_kv's tiles from an
    eighth of the multiprocessors on, with 1024 keys in a part, and not at head_dim 64.
    """
    (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    keys, rows = offset + 1 if is_causal else k.shape[2], heads_q // heads_kv * seq_q
    if batch > 1 or rows <= ROWS // 2 or hopper_forward.columns_of(head_dim) < ROWS:
        return 0
    tiles, most = heads_kv * cdiv(rows, ROWS), split_kv.at_once(q)
    cost = {n: cdiv(tiles * n, most) / n + n / 64 for n in range(1, MOST + 1)}
    n = min(cost, key=cost.get)
    return n if most // 8 <= tiles <= 2 * most and keys >= 1024 * n else 0


@dataclass(frozen=True)
class FoldedLaunch:
    """`launch(q, k, v, o, lse)` writes o and lse, for all calls of one kind.

    views: size and strides with which the kernel sees q, k, v and o. first: the first key that no part has. rest: the
    launch for the keys from there on, None if there are none. parts: the shape of the LSE of all parts and the rest.
    """

    views: tuple
    attend: Launch
    first: int
    rest: Launch | None
    merge: Launch
    parts: tuple[int, ...]

    def __call__(self, q, k, v, o, lse):
        o_parts, lse_parts = split_kv.room(self.parts, q, q.dtype)
        taken = torch.zeros(1, dtype=torch.int32, device=q.device)
        tensors = q.contiguous(), k, v, o_parts
        self.attend(*(t.as_strided(*view) for t, view in zip(tensors, self.views, strict=True)), lse_parts, taken)
        if self.rest:
            ends = k[:, :, self.first :], v[:, :, self.first :]
            self.rest(*ends, q, o, lse, o_parts[-1:], lse_parts[-1:])
        self.merge(o_parts, lse_parts, o, lse)


def plan(q, k, v, o, lse, is_causal: bool, offset: int, scale: float, n: int) -> FoldedLaunch:
    """The launches in n parts for tensors like these, which the Hopper kernel takes; scale > 0.

    is_causal: query i sees keys 0 ... i + offset.
    """
    (_, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    share = (offset + 1 if is_causal else k.shape[2]) // n
    first = n * share
    rows = heads_q // heads_kv * seq_q
    of_rows = n, heads_kv, rows, head_dim
    of_q, of_o = ((of_rows, (step, rows * head_dim, head_dim, 1)) for step in (0, heads_q * seq_q * head_dim))
    of_k, of_v = (((n, heads_kv, share, head_dim), (share * t.stride(2), *t.stride()[1:])) for t in (k, v))
    views = [t.as_strided(*view) for t, view in ((q.contiguous(), of_q), (k, of_k), (v, of_v))]
    rest = split_kv.keys_seen(q, k, is_causal, offset) > first
    shape = n + rest, *lse.shape
    o_parts, lse_parts = split_kv.room(shape, q, q.dtype)
    of_rest = None
    if rest:
        ends, tried = (k[:, :, first:], v[:, :, first:]), split_kv.tiles(rows, head_dim, q.itemsize)
        into = o_parts[-1:], lse_parts[-1:]
        of_rest = split_kv.attending(q, *ends, o, lse, into, is_causal, offset - first, scale, tried)
    attend = hopper_forward.plan(*views, False, scale, 1).launch
    return FoldedLaunch(
        (of_q, of_k, of_v, of_o), attend, first, of_rest, split_kv.merging(o_parts, lse_parts, o, lse), shape
    )
