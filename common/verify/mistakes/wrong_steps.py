"""Wrong steps of a kernel, for the table and for hypotheses: what each of them computes in place of the right one."""

import math

import torch


def not_rescaled(alpha, last):
    return torch.ones_like(alpha)


def not_rescaled_last(alpha, last):
    return torch.where(last, 1.0, alpha)


def divided(acc, l, last, dtype):
    """In every turn of the loop but the last, after which it is right."""
    return torch.where(last, acc, acc / l)


def inverse_rescale(alpha, last):
    return torch.where(alpha > 0, 1 / alpha, 0.0)


def late_acc(p, m, alpha):
    return alpha, torch.ones_like(alpha)


def late_sum(p, m, alpha):
    return torch.ones_like(alpha), alpha


def late_both(p, m, alpha):
    return alpha, alpha


def by_maxima(p, m, alpha):
    """The result of every tile, divided by its own sum, weighs exp of its maximum."""
    total = p.sum(dim=-1)
    weight = torch.where(total == 0, 0.0, p.amax(dim=-1) / total)
    return weight, weight


def by_number(p, m, alpha):
    """The result of every tile, divided by its own sum, weighs as much as another."""
    total = p.sum(dim=-1)
    weight = torch.where(total == 0, 0.0, torch.exp(-m) / total)
    return weight, weight


def last_of_group(t, heads_kv):
    return t.unflatten(1, (heads_kv, -1))[:, :, -1]


def summed_modulo(t, heads_kv):
    return t.unflatten(1, (-1, heads_kv)).sum(dim=1)


def with_strides(t, strides):
    """What a program reads that counts with these strides. Raises IndexError where they lead out of t's memory."""
    end = t.storage_offset() + sum((length - 1) * stride for length, stride in zip(t.shape, strides, strict=True))
    if t.numel() and end >= t.untyped_storage().nbytes() // t.itemsize:
        raise IndexError(f"strides {strides} lead out of the memory of a tensor of shape {tuple(t.shape)}")
    return t.as_strided(t.shape, strides, t.storage_offset())


def contiguous_strides(t):
    return torch.empty(t.shape, device="meta").stride()


def strides_by_head(t):
    """Those of (batch * heads + head) * the head's stride."""
    return t.shape[1] * t.stride(1), *t.stride()[1:]


def strides_without(t, axis):
    return tuple(0 if n == axis else stride for n, stride in enumerate(t.stride()))


def as_contiguous(t):
    return with_strides(t, contiguous_strides(t))


def by_head(t):
    return with_strides(t, strides_by_head(t))


def head_first(t):
    """Batch and head taken from the number of a program the wrong way round."""
    batch, heads = t.shape[:2]
    number = torch.arange(batch * heads, device=t.device)
    return t[number % batch, number // batch].unflatten(0, (batch, heads))


def doubled_start(tile):
    """Rows read at twice their tile's start: every other tile, and zeros past the end."""
    return other_step(2 * tile, tile)


def first_tile(tile):
    """Rows that are those of the first tile in every turn of the loop."""
    return lambda t: t[:, :, torch.arange(t.shape[2], device=t.device) % tile]


def other_step(step, tile):
    """Rows of tiles that begin `step` apart: zeros past the end."""

    def read(t):
        row = torch.arange(t.shape[2], device=t.device)
        row = row // tile * step + row % tile
        return t[:, :, row.clamp(max=t.shape[2] - 1)].masked_fill((row >= t.shape[2])[:, None], 0.0)

    return read


def as_if_bshd(t):
    """Stored as (batch, seq, heads, ...) into the memory of (batch, heads, seq, ...)."""
    return t.transpose(1, 2).contiguous().view(t.shape)


def bshd_as_bhsd(t):
    """Stored as (batch, heads, seq, ...) into the memory of (batch, seq, heads, ...)."""
    batch, heads, seq = t.shape[:3]
    return t.contiguous().view(batch, seq, heads, *t.shape[3:]).transpose(1, 2)


def as_if_transposed(t):
    """Stored as (batch, heads, head_dim, seq) into the memory of (batch, heads, seq, head_dim)."""
    return t.mT.contiguous().view(t.shape)


def stored_by_strides_of(other):
    """A store by the strides of another tensor of that shape; None where they are contiguous ones, or leave gaps."""
    end = 1 + sum((length - 1) * stride for length, stride in zip(other.shape, other.stride(), strict=True))
    if other.is_contiguous() or end != other.numel() or len(set(other.stride())) < 4:
        return None

    def store(t):
        memory = torch.zeros(t.numel(), dtype=t.dtype, device=t.device)
        memory.as_strided(t.shape, other.stride()).copy_(t)
        return memory.view(t.shape)

    return store


def twice_at_diagonal(block_m, block_n):
    """The loop before the diagonal's takes whole tiles of keys, and the diagonal's begins in the last of them."""

    def visits(i, j, m, n):
        start = i // block_m * block_m
        return 1.0 + ((j >= start) & (j < up_to(start, block_n)) & (j <= i))

    return visits


def run_into_diagonal(block_m, block_n):
    """The keys that are visible where the loop before the diagonal's does so and has no mask."""
    return lambda i, j, m, n: (j <= i) | (j < up_to(i // block_m * block_m, block_n))


def left_out_at_diagonal(block_m, block_n):
    """The loop before the diagonal's ends with its last whole tile, and the diagonal's begins where its queries do."""

    def visible(i, j, m, n):
        start = i // block_m * block_m
        return (j <= i) & ((j < start // block_n * block_n) | (j >= start))

    return visible


def end_rounded_down(block_m, block_n):
    """The loop over keys takes the whole tiles before the end of its queries."""
    return lambda i, j, m, n: (j <= i) & (j < (i // block_m + 1) * block_m // block_n * block_n)


def start_rounded_up(block_m, block_n):
    """The loop over queries begins with the tile after the one in which its keys begin."""
    return lambda i, j, m, n: (j <= i) & (i >= (j // block_n * block_n // block_m + 1) * block_m)


def tail_twice(tile):
    return lambda i, j, m, n: 1.0 + (j >= n // tile * tile)


def one_tile_short(tile):
    return lambda n: up_to(n, tile) - tile


def up_to(start, tile):
    return (start + tile - 1) // tile * tile


def tiles_unmasked(tile):
    """A causal mask of whole tiles: those on the diagonal are visible."""
    return lambda i, j, m, n: j // tile <= i // tile


def tiles_skipped(tile):
    """A causal mask of whole tiles: those on the diagonal are hidden."""
    return lambda i, j, m, n: j // tile < i // tile


def flipped(own, tile):
    """A causal mask that shows the future, and the own key or not; tile: of queries, where the loop ends with it."""
    return lambda i, j, m, n: (j > i - int(own)) & (True if tile is None else j // tile <= i // tile)


def whole_tiles(tile):
    """Where a loop ends that leaves the ragged tile out."""
    return lambda n: n // tile * tile


def tf32(x):
    """Keep 10 of the mantissa's 23 bits, rounded."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def exp_cubic(x):
    """exp with 2^fraction from a cubic polynomial: relative error 1e-4."""
    t = (x / math.log(2)).clamp(min=-126.0)
    f = t - t.floor()
    return torch.ldexp(1 + f * (0.695146 + f * (0.227564 + f * 0.077119)), t.floor())


def rounded_s(factor=1.0, to=None):
    """S = scale * Q K^T, rounded (to the input dtype, unless another is given) while it is multiplied by `factor`."""
    return lambda q, k, scale, product, dtype: (factor * scale * product(q, k.mT)).to(to or dtype).float() / factor


def rounded_q(factor=1.0, to=None):
    return lambda q, k, scale, product, dtype: product((factor * scale * q).to(to or dtype).float(), k.mT) / factor


def rounded_k(factor=1.0, to=None):
    return lambda q, k, scale, product, dtype: product(q, (factor * scale * k).to(to or dtype).float().mT) / factor


def spill_rows(o, seq_q):
    """A tail tile stored without a mask where heads lie one after another."""
    o = o.clone()
    spill = o.shape[2] - seq_q
    o[:, 1:, :spill] = o[:, :-1, seq_q:]
    return o


def first_part(total, part):
    return total if total.any() else part


def nudge(acc, l):
    o = acc / l
    o.view(-1)[o.abs().argmax()] *= 1.02
    return o


def repeat_last_row(t, rows):
    return torch.cat([t, t[:, :, -1:].expand(-1, -1, rows, -1)], dim=2)


def tile_max(m, s, scale):
    return s.amax(dim=-1)


def unscaled_max(m, s, scale):
    return torch.maximum(m, s.amax(dim=-1) / scale)
