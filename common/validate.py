"""One check of q, k, v for every phase. Each error names the argument, what it is, and what was expected; nothing has
been allocated or launched when it is raised."""

import math
import numbers
import warnings

from common import runtime

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor
from torch.autograd import forward_ad

MAX_HEAD_DIM = 256
HOURS = 500_000  # steps on tiles; the interpreter takes 5 to 15 ms for one
MAX_SCALE = torch.finfo(torch.float32).max / 2  # kernels multiply it by log2 e, in fp32


def _describe(t: torch.Tensor) -> str:
    return f"shape {tuple(t.shape)}, {t.dtype}, {t.device}"


def cast_like_sdpa(q, k, v) -> list:
    """q, k, v cast as autocast casts SDPA's, if it is on; and as three tensors where one was given twice.

    (torch.compile refuses an autograd.Function that gets the same tensor twice.) What no kernel takes is left as it is,
    for validation to name.
    """
    off = not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
    if off and not (q is k or k is v or v is q):  # as nearly always, and within a microsecond
        return [q, k, v]
    made = []
    for t in (q, k, v):
        if isinstance(t, torch.Tensor):
            device = t.device.type
            if t.dtype in runtime.DTYPES and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
                t = t.to(torch.get_autocast_dtype(device))
            if t.layout == torch.strided and not t.is_nested and any(t is other for other in made):
                t = t.view_as(t)
        made.append(t)
    return made


def check_tensor(name: str, t) -> None:
    """`t` is a dense tensor of a floating-point type and on a device that kernels can use here."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.layout != torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{name}: expected a dense (strided) tensor, got {kind}")
    if t.dtype not in runtime.DTYPES:
        wanted = ", ".join(str(d) for d in runtime.DTYPES)
        raise TypeError(f"{name}: expected one of {wanted}, got {_describe(t)}")
    if t.device.type not in (("cpu", "cuda") if runtime.INTERPRETED else ("cuda",)):
        where = "interpreted here (CPU or CUDA tensors)" if runtime.INTERPRETED else "compiled here (CUDA tensors)"
        why = f". {runtime.CANNOT_RUN}" if runtime.CANNOT_RUN else ""
        raise ValueError(f"{name}: kernels are {where}, got {_describe(t)}{why}")


def check_out_dtype(dtype) -> None:
    """`dtype` is None or one that kernels can write."""
    if dtype is not None and dtype not in runtime.DTYPES:
        raise TypeError(f"out_dtype: expected one of {', '.join(map(str, runtime.DTYPES))}, got {dtype}")


def check_count(name: str, value, least: int, most: int) -> int:
    """`value`, an int within these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: expected an int from {least} to {most}, got {value!r}")
    return value


def check_flag(name: str, value) -> None:
    """`value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def check_scale(scale, head_dim: int) -> float:
    """`scale` as a float; None becomes 1/sqrt(head_dim), with the true head_dim and not the padded one."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: expected a real number or None, got {type(scale).__name__}")
    try:
        number = float(scale)
    except OverflowError:  # of an int
        number = math.inf
    if not abs(number) <= MAX_SCALE:  # NaN too
        raise ValueError(f"scale: expected a finite number of at most {MAX_SCALE:.1e}, got {scale}")
    return number


def check_qkv(q, k, v, scale=None, is_causal=False, enable_gqa=False, *, rank=4, names=("q", "k", "v")) -> float:
    """Raise unless q, k, v are inputs that attention accepts, and return the scale to use.

    rank 4: q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim); heads_q must equal
    heads_kv, or with enable_gqa be a multiple of it. rank 2: one head, (seq_q, head_dim) and (seq_k, head_dim). names:
    what messages call them.

    Raises TypeError (not a tensor, dtype, flag) or ValueError (shape, device, scale).
    """
    axes = ("batch", "heads", "seq", "head_dim")[4 - rank :]
    for name, t in zip(names, (q, k, v), strict=True):
        check_tensor(name, t)
        if t.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions ({', '.join(axes)}), got {_describe(t)}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} like {names[0]}, got {_describe(t)}")
        if t.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} like {names[0]}, got {_describe(t)}")
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    _check_shapes(q, k, v, names)
    if rank == 4:
        check_heads(q, k, enable_gqa, names)
    scale = check_scale(scale, q.shape[-1])
    _warn_of_hours(q, k)
    return scale


def _check_shapes(q, k, v, names) -> None:
    name_q, name_k, name_v = names
    head_dim = q.shape[-1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name_q}: expected head_dim from 1 to {MAX_HEAD_DIM}, got {_describe(q)}")
    for name, t in ((name_k, k), (name_v, v)):
        if t.shape[-1] != head_dim:
            raise ValueError(f"{name}: expected head_dim {head_dim} like {name_q}, got {_describe(t)}")
        if q.dim() == 4 and t.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch {q.shape[0]} like {name_q}, got {_describe(t)}")
    if v.shape != k.shape:
        raise ValueError(f"{name_v}: expected shape {tuple(k.shape)} like {name_k}, got {_describe(v)}")


def _warn_of_hours(q, k) -> None:
    if not runtime.INTERPRETED or runtime.recording or torch.compiler.is_compiling():
        return
    tiles = runtime.tile_sizes(q.shape[-1], q.dtype)
    of_q, of_k = -(-q.shape[-2] // tiles["BLOCK_M"]), -(-k.shape[-2] // tiles["BLOCK_N"])
    steps = q.shape[:-2].numel() * of_q * of_k
    if steps > HOURS:
        warnings.warn(
            f"kernels are interpreted on the CPU, and q of shape {tuple(q.shape)} on {k.shape[-2]} keys is "
            f"up to {steps:,} steps, a tile of queries on a tile of keys each: that takes hours",
            stacklevel=3,
        )


def check_saved(q, k, v, o, lse, do, dlse, scale, is_causal) -> float:
    """Raise unless a backward pass can work on these tensors, and return the scale to use.

    q, k, v as in `check_qkv`, where heads may be shared; o and do like q; lse (contiguous) and dlse (or None) (batch,
    heads_q, seq_q), fp32. Raises TypeError or ValueError naming the argument.
    """
    scale = check_qkv(q, k, v, scale, is_causal, enable_gqa=True)
    row_dtype = torch.promote_types(q.dtype, torch.float32)
    wanted = [("o", o, q.shape, q.dtype), ("do", do, q.shape, q.dtype), ("lse", lse, q.shape[:3], row_dtype)]
    if dlse is not None:
        wanted.append(("dlse", dlse, q.shape[:3], row_dtype))
    for name, t, shape, dtype in wanted:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {_describe(t)}")
        if t.shape != shape or t.device != q.device:
            raise ValueError(f"{name}: expected shape {tuple(shape)} on {q.device}, got {_describe(t)}")
    if not lse.is_contiguous():
        raise ValueError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")
    return scale


NO_FORWARD_MODE = "flash_attention: forward-mode derivatives are not implemented; use SDPA's math backend for them"
NO_FUNC = "flash_attention: derivatives by torch.func are not implemented; use torch.autograd's, or SDPA"


def refuse_transforms(*tensors) -> None:
    """Raise RuntimeError where a derivative is wanted that is not implemented: in forward mode, which an operator would
    drop without a word, or by torch.func.grad, vjp or jacrev.

    Whoever is inside torch.func.jvp, or another transform around it or within it, is taken to carry a forward-mode
    derivative: a transform hides those that belong to the ones around it. Ordinarily all this costs a look at one
    number and at three tensors.
    """
    if forward_ad._current_level >= 0:
        if torch.compiler.is_compiling():  # a graph shows no derivatives; the call itself does
            torch._dynamo.graph_break(msg=NO_FORWARD_MODE)
        if any(is_functorch_wrapped_tensor(t) or forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeError(NO_FORWARD_MODE)
    if not torch.compiler.is_compiling():
        for t in tensors:
            if isinstance(t, torch.Tensor) and is_functorch_wrapped_tensor(t) and _tracked_by_func(t):
                raise RuntimeError(NO_FUNC)


def _tracked_by_func(t: torch.Tensor) -> bool:
    while is_functorch_wrapped_tensor(t):
        if is_gradtrackingtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def check_heads(q, k, enable_gqa: bool, names=("q", "k", "v")) -> None:
    """Every query head has a key head: one each, or with enable_gqa a whole number of query heads per key head."""
    heads_q, heads_kv = q.shape[1], k.shape[1]
    name_q, name_k, _ = names
    if heads_q == heads_kv:
        return
    if not enable_gqa:
        raise ValueError(f"{name_k}: expected {heads_q} heads like {name_q} (or enable_gqa=True), got {_describe(k)}")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"{name_k}: expected a number of heads that divides {name_q}'s {heads_q}, got {_describe(k)}")
