"""Attention over several GPUs: each rank holds a part of the sequence, and keys and values travel.

Rank r of W holds the queries, keys and values of two chunks of the sequence, r and 2W - 1 - r of 2W.
Its queries must meet all keys. They meet them a rank's share at a time:

    (o, lse) of the share that is here        phase 5's forward pass, as on one GPU
    merge into the result so far              phase 1's merge: o and LSE of disjoint sets of keys
    meanwhile: keys and values move on by a rank

After W steps every share has been everywhere. The backward pass goes round once more; dK and dV
travel with their keys and collect a term from every rank, in fp32 and in the order of the ring, so
that every run gives the same bits.

Builds on: `attention_forward` and `attention_backward` of this phase, and torch.distributed.
Source: Liu, Zaharia, Abbeel, arXiv 2310.01889 (ring); Brandon et al., arXiv 2311.09431 (two chunks
a rank).
"""

from collections.abc import Sequence

from common import validate
from phase5_tuning.attention import flash_attention
from phase5_tuning.backward import attention_backward
from phase5_tuning.forward import attention_forward

import torch
import torch.distributed as dist

# --- who holds which rows ------------------------------------------------------------------------------------------


def chunk_lengths(seq: int, ranks: int) -> list[int]:
    """Rows of the 2 * ranks chunks of a sequence, as torch.tensor_split cuts it: the first ones may
    be longer by one row.
    """
    return [seq // (2 * ranks) + (i < seq % (2 * ranks)) for i in range(2 * ranks)]


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank: one early, one late.

    Under a causal mask the queries of chunk i see about i chunks of keys. r and 2W - 1 - r add up to
    the same for all ranks: everybody has the same work.
    """
    return rank, 2 * ranks - 1 - rank


def shard(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's rows of x (..., seq, head_dim), which every rank of the group has whole."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.tensor_split(2 * ranks, dim=-2)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim=-2)


def unshard(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The whole of a tensor (..., seq, head_dim) of which each rank holds its `shard`: on every rank,
    without a gradient.
    """
    ranks = dist.get_world_size(group)
    lengths = _lengths(x.shape[-2], group, x.device)
    return _in_order(_gathered(x.detach(), lengths, group), sum(lengths), ranks)


def _in_order(shards: Sequence[torch.Tensor], seq: int, ranks: int) -> torch.Tensor:
    """The shards of all ranks as one sequence."""
    chunks, lengths = [None] * (2 * ranks), chunk_lengths(seq, ranks)
    for rank, x in enumerate(shards):
        early, late = chunks_of(rank, ranks)
        chunks[early], chunks[late] = x.split([lengths[early], lengths[late]], dim=-2)
    return torch.cat(chunks, dim=-2)


def _lengths(rows: int, group, device) -> list[int]:
    """The rows that each rank holds."""
    mine = torch.tensor([rows], device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return torch.cat(everybody).tolist()


def _gathered(x: torch.Tensor, lengths: Sequence[int], group) -> list[torch.Tensor]:
    """The shards of all ranks; `all_gather` wants them of one shape, so each is padded."""
    longest = max(lengths)
    padded = x.new_zeros(*x.shape[:-2], longest, x.shape[-1])
    padded[..., : x.shape[-2], :] = x
    everybody = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everybody, padded, group=group)
    return [one[..., :length, :] for one, length in zip(everybody, lengths, strict=True)]


# --- the ring ------------------------------------------------------------------------------------------------------


class Ring:
    """Neighbors in a circle: `pass_on` sends to the next rank and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        of = group or dist.group.WORLD
        self._next = dist.get_global_rank(of, (self.rank + 1) % self.ranks)
        self._before = dist.get_global_rank(of, (self.rank - 1) % self.ranks)

    def source(self, step: int) -> int:
        """Whose keys and values are here in a step: one's own in step 0, then those of the rank before."""
        return (self.rank - step) % self.ranks

    def pass_on(self, x: torch.Tensor, rows: int) -> tuple[torch.Tensor, list]:
        """Send x (..., seq, head_dim), contiguous, and receive its like with other rows.

        Returns what comes, which is there when all of the list's works have been waited for.
        """
        coming = x.new_empty(*x.shape[:-2], rows, x.shape[-1])
        transfers = []
        if x.numel():
            transfers.append(dist.P2POp(dist.isend, x, self._next, self.group))
        if coming.numel():
            transfers.append(dist.P2POp(dist.irecv, coming, self._before, self.group))
        return coming, dist.batch_isend_irecv(transfers) if transfers else []


def _wait(transfer: tuple[torch.Tensor, list]) -> torch.Tensor:
    coming, works = transfer
    for work in works:
        work.wait()
    return coming


def _meeting(ring: Ring, source: int, early_q: int, early_k: int, is_causal: bool):
    """(rows of q, rows of k, is_causal) of what must be computed when a rank's keys are here.

    early_q, early_k: rows of the first chunk, of one's own queries and of the keys. Chunks that
    differ see each other whole or not at all, so that only one's own keys need a mask.
    """
    everything = slice(None)
    if not is_causal or source == ring.rank:
        return everything, everything, is_causal
    if source < ring.rank:  # their late chunk is after both of ours
        return everything, slice(0, early_k), False
    return slice(early_q, None), everything, False  # our early chunk is before both of theirs


def merge_(
    o: torch.Tensor, lse: torch.Tensor, o_part: torch.Tensor, lse_part: torch.Tensor
) -> None:
    """Phase 1's merge, in place: o, lse (fp32) become those of both sets of keys together."""
    both = torch.logaddexp(lse, lse_part)
    shift = both.masked_fill(both == float("-inf"), 0.0)
    o.mul_((lse - shift).exp()[..., None]).add_(o_part * (lse_part - shift).exp()[..., None])
    lse.copy_(both)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, lengths_q, lengths_k, group):
        ring = Ring(group)
        early_q, early_k = [
            chunk_lengths(sum(n), ring.ranks)[: ring.ranks] for n in (lengths_q, lengths_k)
        ]
        kv = torch.stack((k, v))
        for step in range(ring.ranks):
            source = ring.source(step)
            if step + 1 < ring.ranks:
                coming = ring.pass_on(kv, lengths_k[ring.source(step + 1)])
            rows, cols, masked = _meeting(
                ring, source, early_q[ring.rank], early_k[source], is_causal
            )
            part = attention_forward(
                q[:, :, rows], *kv[:, :, :, cols], masked, scale, enable_gqa=True
            )
            if step == 0:
                o, lse = part[0].float(), part[1]
            else:
                merge_(o[:, :, rows], lse[:, :, rows], *part)
            if step + 1 < ring.ranks:
                kv = _wait(coming)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, lengths_k, early_q, early_k, ring
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        is_causal, scale, lengths_k, early_q, early_k, ring = ctx.options
        kv, dq = torch.stack((k, v)), torch.zeros_like(q, dtype=torch.float32)
        dkv = sums = torch.zeros_like(kv, dtype=torch.float32)
        for step in range(ring.ranks):
            source, following = ring.source(step), ring.source(step + 1)
            if step + 1 < ring.ranks:
                coming = ring.pass_on(kv, lengths_k[following])
            rows, cols, masked = _meeting(
                ring, source, early_q[ring.rank], early_k[source], is_causal
            )
            near = o[:, :, rows], lse[:, :, rows].contiguous(), do[:, :, rows]
            dq_part, *dkv_part = attention_backward(
                q[:, :, rows], *kv[:, :, :, cols], *near, None, masked, scale
            )
            dq[:, :, rows] += dq_part
            if step:  # the sums so far, from the rank that had these keys before
                dkv = _wait(sums)
            dkv[:, :, :, cols] += torch.stack(dkv_part)
            sums = ring.pass_on(dkv, lengths_k[following])
            if step + 1 < ring.ranks:
                kv = _wait(coming)
        dk, dv = _wait(sums).to(k.dtype)
        return dq.to(q.dtype), dk, dv, *(None,) * 5


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of a sequence of which each rank of the group holds a shard; differentiable once.

    q (batch, heads_q, seq_q of this rank, head_dim), k and v (batch, heads_kv, seq_k of this rank,
    head_dim), as `shard` gives them; dtypes, scale and enable_gqa as in `flash_attention`. With
    is_causal, seq_q and seq_k must be equal. Returns this rank's shard of o, as q. All ranks must
    call it in the same order.

    Raises what `flash_attention` raises, and ValueError, on all ranks, if the shards are not those
    that `shard` gives.
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return flash_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    lengths_q, lengths_k = (_lengths(t.shape[2], group, t.device) for t in (q, k))
    for name, lengths in dict(q=lengths_q, k=lengths_k).items():
        chunks = chunk_lengths(sum(lengths), ranks)
        expected = [sum(chunks[i] for i in chunks_of(rank, ranks)) for rank in range(ranks)]
        if lengths != expected:
            raise ValueError(
                f"{name}: the ranks hold {lengths} rows of {sum(lengths)}; shard() gives them {expected}"
            )
    if is_causal and lengths_q != lengths_k:
        raise ValueError(
            f"is_causal: seq_q and seq_k must be equal, got {sum(lengths_q)} and {sum(lengths_k)}"
        )
    return _RingAttention.apply(q, k, v, is_causal, scale, lengths_q, lengths_k, group)
