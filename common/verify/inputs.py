"""Inputs that find mistakes: shapes, layouts and numbers that have broken real attention kernels (see tests/)."""

from common import runtime

import torch

_FROM_NORMAL = {
    "normal": lambda x: x,
    "positive": torch.abs,
    "peaked": lambda x: 3 * x,
    "flat": lambda x: 1 + x / 1000,
    "large": lambda x: 30 * x,
    "low": lambda x: -30 + x / 8,
}
KINDS = tuple(_FROM_NORMAL)
LAYOUTS = ("bhsd", "bshd", "transposed", "sliced", "expanded")


def make_tensor(
    shape, *, dtype=torch.float16, kind="normal", layout="bhsd", poison=False, generator=None, device=None
) -> torch.Tensor:
    """A (batch, heads, seq, head_dim) tensor of random numbers in a chosen memory layout.

    kind    "normal"    N(0, 1)
            "positive"  |N(0, 1)|: errors add up instead of cancelling
            "peaked"    3 N(0, 1): a few keys take almost all the weight
            "flat"      1 + N(0, 1) / 1000: near-constant rows
            "large"     30 N(0, 1): logits in the hundreds
            "low"       -30 + N(0, 1) / 8: with a `positive` partner all logits lie far below zero
    layout  "bhsd"        contiguous
            "bshd"        stored (batch, seq, heads, head_dim), as most models produce it
            "transposed"  stored (batch, heads, head_dim, seq): the last stride is not 1
            "sliced"      every other row of a larger tensor, at an odd storage offset, all strides larger than needed
            "expanded"    heads share one memory (stride 0)
    poison  surround every sequence and every row with NaN: a load outside the tensor's own head becomes visible.
            Works with "bhsd" and "bshd".
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a dtype such as torch.float16, got {dtype!r}")
    batch, heads, seq, head_dim = shape
    x = torch.randn(batch, heads, seq, head_dim, generator=generator, dtype=torch.float32)
    x = _FROM_NORMAL[kind](x).to(device=device or runtime.DEVICE, dtype=dtype)
    if poison:
        if layout == "bshd":
            big = x.new_full((batch, seq + 6, heads, head_dim + 8), float("nan"))
            view = big[:, 3 : seq + 3, :, 4 : head_dim + 4].transpose(1, 2)
        elif layout == "bhsd":
            big = x.new_full((batch, heads, seq + 6, head_dim + 8), float("nan"))
            view = big[:, :, 3 : seq + 3, 4 : head_dim + 4]
        else:
            raise ValueError(f'poison: expected layout "bhsd" or "bshd", got {layout!r}')
        return view.copy_(x)
    if layout == "bhsd":
        return x
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "sliced":
        big = x.new_zeros(batch, heads + 1, 2 * seq + 3, 2 * head_dim + 5)
        return big[:, 1:, 1 : 2 * seq + 1 : 2, 3 : 3 + head_dim].copy_(x)
    if layout == "expanded":
        return x[:, :1].expand(batch, heads, seq, head_dim)
    raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


def make_qkv(
    batch=1, heads_q=2, seq_q=64, head_dim=64, *, heads_kv=None, seq_k=None, dtype=torch.float16, kind="normal",
    layout="bhsd", layout_v=None, poison=False, seed=0, device=None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Random q (batch, heads_q, seq_q, head_dim) and k, v (batch, heads_kv, seq_k, head_dim), the same for a seed on
    every machine. heads_kv defaults to heads_q, seq_k to seq_q; kind, layout, poison as in `make_tensor`. layout_v:
    another layout for v, so that its strides are not k's.

    kind="low" makes q positive and k low, so that every logit is far below zero.
    """
    heads_kv = heads_q if heads_kv is None else heads_kv
    seq_k = seq_q if seq_k is None else seq_k
    sizes = dict(batch=batch, heads_q=heads_q, seq_q=seq_q, head_dim=head_dim, heads_kv=heads_kv, seq_k=seq_k)
    for name, size in sizes.items():
        if type(size) is not int or size < 0:  # not True
            raise ValueError(f"{name}: expected a whole number from 0 upwards, got {size!r}")
    generator = torch.Generator().manual_seed(seed)

    of_all = dict(dtype=dtype, poison=poison, generator=generator, device=device)

    def make(heads, seq, kind, layout=layout):
        return make_tensor((batch, heads, seq, head_dim), kind=kind, layout=layout, **of_all)

    kinds = ("positive", "low", "normal") if kind == "low" else (kind, kind, kind)
    # Peaked and large logits come from q and k; v stays of ordinary size.
    kind_v = "normal" if kind in ("peaked", "large") else kinds[2]
    q, k = make(heads_q, seq_q, kinds[0]), make(heads_kv, seq_k, kinds[1])
    return q, k, make(heads_kv, seq_k, kind_v, layout_v or layout)
