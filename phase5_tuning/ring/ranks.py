"""Which rows of a sequence each rank holds, which of them meet, and whether all ranks mean the same call.

Builds on: torch.distributed; the arithmetic of rows needs no process group.
Source: Llama 3, arXiv 2407.21783, section 3.3.2 (two chunks a rank).
"""

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn

from common import validate

import torch
import torch.distributed as dist

# --- who holds which rows ------------------------------------------------------------------------------------------


def chunk_lengths(seq: int, ranks: int) -> list[int]:
    """Rows of the 2 * ranks chunks of a sequence, as torch.tensor_split cuts it: the first ones may be longer by one
    row.
    """
    return [seq // (2 * ranks) + (i < seq % (2 * ranks)) for i in range(2 * ranks)]


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank: one early, one late.

    Under a causal mask the queries of chunk i see about i chunks of keys. r and 2W - 1 - r add up to the same for all
    ranks: everybody has the same work.
    """
    return rank, 2 * ranks - 1 - rank


def shard_of(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of a rank, of a whole tensor x (..., seq, head_dim). Needs no process group."""
    chunks = x.tensor_split(2 * ranks, dim=-2)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim=-2)


def joined(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor (..., seq, head_dim) of the shards of all ranks, in the order of the ranks."""
    ranks = len(shards)
    chunks, lengths = [None] * (2 * ranks), chunk_lengths(sum(x.shape[-2] for x in shards), ranks)
    for rank, x in enumerate(shards):
        early, late = chunks_of(rank, ranks)
        chunks[early], chunks[late] = x.split([lengths[early], lengths[late]], dim=-2)
    return torch.cat(chunks, dim=-2)


def meeting(rank: int, source: int, early_q: int, early_k: int, is_causal: bool):
    """(rows of q, rows of k, is_causal) of the work that a rank has with the keys of rank `source`.

    early_q, early_k: rows of the first chunk, of the rank's queries and of these keys. Different chunks see each other
    whole or not at all, so only a rank's own keys need a mask.
    """
    everything = slice(None)
    if not is_causal or source == rank:
        return everything, everything, is_causal
    if source < rank:  # their late chunk is after both of ours
        return everything, slice(0, early_k), False
    return slice(early_q, None), everything, False  # our early chunk is before both of theirs


# --- the ranks agree -----------------------------------------------------------------------------------------------

_SIDE_GROUPS = weakref.WeakKeyDictionary()  # a side group ends with its group


def side_group(group):
    """A group of the same ranks over gloo, which carries Python objects without a GPU."""
    group = group or dist.group.WORLD
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _SIDE_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _SIDE_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _SIDE_GROUPS[group]


def agreed(name: str, q, k, v, is_causal, scale, enable_gqa, group) -> tuple:
    """(scale, rows of q, rows of k by rank), after all ranks have called with the same arguments.

    Every rank tells all others the number of its rows and a digest of what it was called with. Where
    digests differ, it tells what it was called with, or what is wrong with it. So all of them raise,
    and none waits for one that has raised.
    """
    wrong, facts, rows = None, {}, (0, 0)
    try:
        scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa) + 0.0  # -0.0 becomes 0.0
        for what, t in dict(q=q, k=k, v=v).items():
            facts[f"{what}'s batch, heads and head_dim"] = *t.shape[:2], t.shape[3]
            facts[f"{what}.dtype"], facts[f"{what}.device"] = str(t.dtype), t.device.type
        facts |= dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, function=name)
        needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in (q, k, v))
        facts["q, k and v require gradients"], rows = needs, (q.shape[2], k.shape[2])
    except Exception as error:  # whatever it is, the others must hear of it
        wrong = error
    mine = torch.tensor([0 if wrong else _digest(facts), *rows])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=side_group(group))
    digests, *all_rows = torch.stack(everybody).T.tolist()
    if len(set(digests)) > 1 or 0 in digests:
        _raise_what_differs(wrong, facts, group)
    return scale, *_checked_rows(*all_rows, is_causal)


@contextlib.contextmanager
def heard_by_all(name: str, group) -> Iterator[None]:
    """What the block raises on a rank of the group, all others raise as a ValueError that names it by its number.

    name: what a rank of the group is, as in "host 1 raised".
    """
    wrong = None
    try:
        yield
    except Exception as error:
        wrong = error
    errors = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, wrong and f"{type(wrong).__name__}: {wrong}", group=side_group(group))
    if wrong:
        raise wrong
    for number, error in enumerate(errors):
        if error:
            raise ValueError(f"{name} {number} raised {error}")


def _digest(facts: dict) -> int:
    """A number above 0 and below 2^63, the same in every process, that other facts have by a chance of 2^-63."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1


def _raise_what_differs(wrong: Exception | None, facts: dict, group) -> NoReturn:
    said = [None] * dist.get_world_size(group)
    mine = f"{type(wrong).__name__}: {wrong}" if wrong else None, facts
    dist.all_gather_object(said, mine, group=side_group(group))
    if wrong:
        raise wrong
    errors, everybody = zip(*said, strict=True)
    for rank, error in enumerate(errors):
        if error:
            raise ValueError(f"rank {rank} raised {error}")
    what = next(of for of in facts if len({one[of] for one in everybody}) > 1)
    by_rank = ", ".join(f"rank {rank}: {one[what]}" for rank, one in enumerate(everybody))
    raise ValueError(f"{what}: the ranks disagree: {by_rank}")


def _checked_rows(rows_q: list[int], rows_k: list[int], is_causal: bool) -> tuple:
    """The rows of q and of k by rank, if they are those of shards."""
    for name, lengths in dict(q=rows_q, k=rows_k).items():
        ranks = len(lengths)
        chunks = chunk_lengths(sum(lengths), ranks)
        expected = [sum(chunks[i] for i in chunks_of(rank, ranks)) for rank in range(ranks)]
        if lengths != expected:
            raise ValueError(f"{name}: the ranks hold {lengths} rows of {sum(lengths)}; shard() gives them {expected}")
    if is_causal and rows_q != rows_k:
        got = f"{sum(rows_q)} and {sum(rows_k)}"
        raise ValueError(f"is_causal: seq_q and seq_k must be equal, got {got}")
    return rows_q, rows_k
