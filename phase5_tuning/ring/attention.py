"""Attention over several GPUs: each rank holds a part of the sequence, and keys and values travel.

Rank r of W holds the queries, keys and values of two chunks of the sequence, r and 2W - 1 - r of 2W. Its queries must
meet all keys. They meet them a shard at a time:

    (o, lse) of the shard that is here        phase 5's forward pass, as on one GPU
    merge into the result so far              phase 1's merge: o and LSE of disjoint sets of keys
    meanwhile: keys and values move on by a rank

After W steps every shard has been everywhere. The backward pass goes round once more; dK and dV
travel with their keys and collect a term from every other rank, in fp32 and in the order of the
ring, so that every run gives the same bits. One's own terms stay at home: those of half of the heads
are computed while the first keys travel, the others while the sums come home.

Two other ways stand beside the ring, to compare with: `all_gather_attention` brings all keys at once,
`ulysses_attention` gives each rank all rows of some heads. `mesh_attention` does the latter within a host
and runs the ring between hosts.

Builds on: `attention_forward` and `attention_backward` of this phase, ranks.py (who holds which
rows, and whether the ranks agree), and torch.distributed.
Source: Liu, Zaharia, Abbeel, arXiv 2310.01889 (ring); Llama 3, arXiv 2407.21783, section 3.3.2 (two
chunks a rank); Jacobs et al., arXiv 2309.14509 (Ulysses).
"""

import functools
import math
from collections.abc import Iterator, Sequence

from common import validate
from phase5_tuning.attention import flash_attention
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.ring.merge import merge_
from phase5_tuning.ring.ranks import agreed, chunk_lengths, heard_by_all, joined, meeting, shard_of, side_group

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

# --- whole and sharded ------------------------------------------------------------------------------------------------


def shard(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's rows of x (..., seq, head_dim), which every rank of the group has whole."""
    return shard_of(x, dist.get_rank(group), dist.get_world_size(group))


def unshard(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The whole of a tensor (..., seq, head_dim) of which each rank holds its `shard`: on every rank, without a
    gradient.
    """
    lengths = [0] * dist.get_world_size(group)
    dist.all_gather_object(lengths, x.shape[-2], group=side_group(group))
    return joined(_gathered(x.detach(), lengths, group))


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

    def source(self, step: int) -> int:
        """Whose keys and values are here in a step: one's own in step 0, then those of the rank before."""
        return (self.rank - step) % self.ranks

    def pass_on(self, x: torch.Tensor, rows: int) -> list:
        """Send x (..., seq, head_dim), contiguous, and receive its like with other rows.

        Returns a transfer, for `_wait`. It is one all-to-all in which each rank has something for the next one only:
        over NCCL a send and a receive, and one call of the host.
        """
        coming = x.new_empty(*x.shape[:-2], rows, x.shape[-1])
        sizes_in, sizes_out = [0] * self.ranks, [0] * self.ranks
        sizes_in[(self.rank - 1) % self.ranks] = coming.numel()
        sizes_out[(self.rank + 1) % self.ranks] = x.numel()
        ends = coming.view(-1), x.view(-1), sizes_in, sizes_out
        return [coming, dist.all_to_all_single(*ends, group=self.group, async_op=True)]


def _wait(transfer: list) -> torch.Tensor:
    """What a transfer brings, when it is there. A transfer holds what it sends until then."""
    transfer.pop().wait()
    return transfer.pop()


def _around(ring: Ring, kv: torch.Tensor, lengths: Sequence[int]) -> Iterator:
    """(whose, keys and values) of every rank, one's own first; the next are on their way meanwhile."""
    for step in range(ring.ranks):
        last = step + 1 == ring.ranks
        if not last:
            coming = ring.pass_on(kv, lengths[ring.source(step + 1)])
        yield ring.source(step), kv
        if not last:
            kv = _wait(coming)


def _at_once(ring: Ring, kv: torch.Tensor, lengths: Sequence[int]) -> Iterator:
    """As `_around`, after one all-gather: every rank holds all keys and values."""
    shards = _gathered(kv, lengths, ring.group)
    for step in range(ring.ranks):
        yield ring.source(step), shards[ring.source(step)]


class _Travelling:
    """Sums of dK and dV that go round with their keys: each rank adds its terms and passes them on."""

    def __init__(self, ring: Ring, lengths: Sequence[int]):
        self.ring, self.lengths, self.transfer = ring, lengths, None

    def add(self, source: int, kv: torch.Tensor, where, terms) -> None:
        """Add the terms (dk, dv) at `where` in the shard kv of rank `source`."""
        if self.transfer is None:
            sums = _begun(kv, where, terms)
        else:
            sums = _wait(self.transfer)
            for total, term in zip(sums, terms, strict=True):
                total[where] += term
        self.transfer = self.ring.pass_on(sums, self.lengths[(source - 1) % self.ring.ranks])

    def home(self) -> torch.Tensor:
        """dK and dV of this rank's shard, in fp32, as all other ranks have computed them."""
        return _wait(self.transfer)


class _Kept:
    """As `_Travelling`, but a rank keeps its terms of each shard to the end, and then sends all home."""

    def __init__(self, ring: Ring, lengths: Sequence[int]):
        self.ring, self.rows, self.sums = ring, lengths[ring.rank], {}

    def add(self, source: int, kv: torch.Tensor, where, terms) -> None:
        self.sums[source] = _begun(kv, where, terms)

    def home(self) -> torch.Tensor:
        some = next(iter(self.sums.values()))
        shape = *some.shape[:-2], self.rows, some.shape[-1]
        self.sums[self.ring.rank] = some.new_empty(0)  # one's own terms stay
        ranks, mine = range(self.ring.ranks), self.ring.rank
        outgoing = [self.sums[rank].flatten() for rank in ranks]
        sizes = [math.prod(shape) * (rank != mine) for rank in ranks]
        coming = _exchanged(outgoing, sizes, self.ring.group)
        parts = [coming[rank].view(shape) for rank in ranks if rank != mine]
        return functools.reduce(torch.Tensor.add_, parts)


def _begun(kv: torch.Tensor, where, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The terms at `where`, in zeros like kv, in fp32."""
    sums = kv.new_zeros(kv.shape, dtype=torch.float32)
    for total, term in zip(sums, terms, strict=True):
        total[where] = term
    return sums


class _Sharded(torch.autograd.Function):
    """Attention over the shards that `shards` yields; a `collector` brings dK and dV home."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, lengths_q, lengths_k, group, shards, collector):
        ring, o = Ring(group), None
        early_q, early_k = (chunk_lengths(sum(n), ring.ranks) for n in (lengths_q, lengths_k))
        for source, kv in shards(ring, torch.stack((k, v)).contiguous(), lengths_k):
            here = meeting(ring.rank, source, early_q[ring.rank], early_k[source], is_causal)
            rows, cols, masked = here
            near, far = q[:, :, rows], kv[:, :, :, cols]
            part = attention_forward(near, *far, masked, scale, enable_gqa=True)
            if o is None:  # one's own keys come first
                o, lse = part[0].float(), part[1]
            else:
                merge_(o[:, :, rows], lse[:, :, rows], *part)
            del kv, far  # else it would live until the next but one is on its way
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, lengths_k, early_q, early_k, ring, shards, collector
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        is_causal, scale, lengths_k, early_q, early_k, ring, shards, collector = ctx.options
        heads, half, per_kv = k.shape[1], k.shape[1] // 2, q.shape[1] // max(k.shape[1], 1)
        dq, own = torch.zeros_like(q, dtype=torch.float32), []
        collected = collector(ring, lengths_k)

        def terms(source, far_k, far_v, first, end):
            """(where, (dk, dv)) of the heads first to end of a rank's shard; dQ's term is added."""
            here = meeting(ring.rank, source, early_q[ring.rank], early_k[source], is_causal)
            rows, cols, masked = here
            near = slice(None), slice(first * per_kv, end * per_kv), rows
            far = slice(None), slice(first, end), cols
            saved = o[near], lse[near].contiguous(), do[near]
            part = attention_backward(q[near], far_k[far], far_v[far], *saved, None, masked, scale)
            dq[near] += part[0]
            return far, part[1:]

        for source, kv in shards(ring, torch.stack((k, v)).contiguous(), lengths_k):
            if source != ring.rank:
                collected.add(source, kv, *terms(source, *kv, 0, heads))
            elif half:  # half of its own heads, while the first keys travel
                own.append(terms(source, k, v, 0, half))
            del kv
        own.append(terms(ring.rank, k, v, half, heads))  # while dK and dV come home
        dkv = collected.home()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for where, part in own:
            for grad, total, term in zip((dk, dv), dkv, part, strict=True):
                torch.add(total[where], term, out=grad[where])
        return dq.to(q.dtype), dk, dv, *(None,) * 7


def _exchanged(outgoing: list, sizes: list[int], group) -> list[torch.Tensor]:
    """All-to-all: the i-th flat tensor goes to rank i; what comes from rank i has sizes[i] elements."""
    coming = outgoing[0].new_empty(sum(sizes))
    splits = dict(output_split_sizes=sizes, input_split_sizes=[x.numel() for x in outgoing])
    dist.all_to_all_single(coming, torch.cat(outgoing), **splits, group=group)
    return list(coming.split(sizes))


# --- Ulysses: all rows of some heads, instead of all heads of some rows --------------------------------------------


def _to_heads(x: torch.Tensor, lengths: Sequence[int], group) -> torch.Tensor:
    """(batch, heads, rows of this rank, head_dim) -> (batch, heads / ranks, seq, head_dim)."""
    parts = x.chunk(len(lengths), dim=1)
    batch, heads, _, head_dim = parts[0].shape
    sizes = [batch * heads * rows * head_dim for rows in lengths]
    coming = _exchanged([part.flatten() for part in parts], sizes, group)
    shards = zip(coming, lengths, strict=True)
    return joined([part.view(batch, heads, rows, head_dim) for part, rows in shards])


def _to_rows(x: torch.Tensor, lengths: Sequence[int], group) -> torch.Tensor:
    """What undoes `_to_heads`."""
    ranks, (batch, heads, _, head_dim) = len(lengths), x.shape
    shape = batch, heads, lengths[dist.get_rank(group)], head_dim
    outgoing = [shard_of(x, rank, ranks).flatten() for rank in range(ranks)]
    coming = _exchanged(outgoing, [math.prod(shape)] * ranks, group)
    return torch.cat([part.view(shape) for part in coming], dim=1)


class _Turned(torch.autograd.Function):
    """turn(x), whose gradient is `back`."""

    @staticmethod
    def forward(ctx, x, turn, back, lengths, group):
        ctx.options = back, lengths, group
        return turn(x, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        back, *options = ctx.options
        return back(dx, *options), *(None,) * 4


# --- the three ways ------------------------------------------------------------------------------------------------


def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, group: dist.ProcessGroup | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of a sequence of which each rank of the group holds a shard; differentiable once.

    q (batch, heads_q, seq_q of this rank, head_dim), k and v (batch, heads_kv, seq_k of this rank, head_dim), as
    `shard` gives them; dtypes, scale and enable_gqa as in `flash_attention`. With is_causal, seq_q and seq_k must be
    equal. Returns this rank's shard of o, as q: the parts over each shard of keys are rounded to q's dtype and then
    merged in fp32, so where they cancel the error exceeds `flash_attention`'s. All ranks must call it in the same
    order, and its backward pass too. In a CUDA graph they agree while it is captured, and must replay it together.

    Raises on a rank what `flash_attention` raises there, and ValueError on all others; ValueError on all ranks if they
    disagree or if the shards are not those that `shard` gives. If a rank never calls, the others fail with the process
    group's own error or timeout.
    """
    way = _around, _Travelling
    return _attend("context_parallel_attention", way, q, k, v, is_causal, scale, enable_gqa, group)


def all_gather_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False, group=None):
    """As `context_parallel_attention`, with one all-gather of K and V instead of the ring: the simple version, which
    needs memory for the keys and values of the whole sequence.
    """
    way = _at_once, _Kept
    return _attend("all_gather_attention", way, q, k, v, is_causal, scale, enable_gqa, group)


def _attend(name, way, q, k, v, is_causal, scale, enable_gqa, group):
    q, k, v = validate.cast_like_sdpa(q, k, v)
    scale, *lengths = agreed(name, q, k, v, is_causal, scale, enable_gqa, group)
    if len(lengths[0]) == 1:
        return flash_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return _Sharded.apply(q, k, v, is_causal, scale, *lengths, group, *way)


def ulysses_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False, group=None):
    """As `context_parallel_attention`, by an all-to-all: a rank gets all rows of its part of the heads, attends as one
    GPU does, and sends the rows back.

    Raises ValueError too if heads_q or heads_kv cannot be divided by the number of ranks.
    Source: Jacobs et al., arXiv 2309.14509.
    """
    name = "ulysses_attention"
    q, k, v = validate.cast_like_sdpa(q, k, v)
    scale, *lengths = _agreed_on_heads(name, q, k, v, is_causal, scale, enable_gqa, group)
    attend = functools.partial(flash_attention, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return _over_heads(attend, q, k, v, *lengths, group)


def _agreed_on_heads(name, q, k, v, is_causal, scale, enable_gqa, group) -> tuple:
    """As `agreed`, if the ranks of the group can also divide the heads."""
    scale, rows_q, rows_k = agreed(name, q, k, v, is_causal, scale, enable_gqa, group)
    for what, heads in dict(heads_q=q.shape[1], heads_kv=k.shape[1]).items():
        if heads % len(rows_q):
            raise ValueError(f"{what}: {heads} heads cannot be shared by {len(rows_q)} ranks")
    return scale, rows_q, rows_k


def _over_heads(attend, q, k, v, rows_q, rows_k, group) -> torch.Tensor:
    """attend(q, k, v) with all rows of the group and this rank's heads; its result in this rank's rows."""
    q, k, v = (
        _Turned.apply(t, _to_heads, _to_rows, rows, group) for t, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
    )
    return _Turned.apply(attend(q, k, v), _to_rows, _to_heads, rows_q, group)


# --- both: heads within a host, the ring between hosts ----------------------------------------------------------------


def mesh_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False, *, mesh: DeviceMesh) -> torch.Tensor:
    """As `context_parallel_attention`, on a mesh (hosts, GPUs of a host): the GPUs of a host exchange rows for heads,
    as in `ulysses_attention`, and keys and values of these heads go round a ring of hosts.

    q, k and v are shards as `mesh_shard` gives them, and so is o. All ranks of the mesh must call it. Raises TypeError
    if mesh is no DeviceMesh, and ValueError if it has not two dimensions; ValueError on all ranks if the GPUs of a host
    cannot divide heads_q or heads_kv.
    Source: Fang and Zhao, arXiv 2405.07719.
    """
    between, within = _levels(mesh)
    q, k, v = validate.cast_like_sdpa(q, k, v)
    with heard_by_all("host", between):
        options = is_causal, scale, enable_gqa
        scale, *lengths = _agreed_on_heads("mesh_attention", q, k, v, *options, within)
    options = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, group=between)
    return _over_heads(functools.partial(context_parallel_attention, **options), q, k, v, *lengths, within)


def mesh_shard(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of x (..., seq, head_dim): the shard of its host, and of that the shard of its GPU."""
    between, within = _levels(mesh)
    return shard(shard(x, between), within)


def mesh_unshard(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What undoes `mesh_shard`: the whole tensor, on every rank, without a gradient."""
    between, within = _levels(mesh)
    return unshard(unshard(x, within), between)


def _levels(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of this rank: one rank of each host, and the ranks of its host."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 2:
        raise ValueError(f"mesh: expected two dimensions (hosts, GPUs of a host), got {mesh.ndim}")
    return mesh.get_all_groups()
