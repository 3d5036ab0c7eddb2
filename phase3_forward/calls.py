"""The seven calls that a model makes, by name, on which the chapter tries its kernels.

outcomes(attention_forward)             {call: "right", "wrong" or "refuses"}
with stage("heads"): outcomes(...)      of a kernel that is still growing
"""

from collections.abc import Callable, Iterable

from common import make_qkv, runtime, verify_results
from common.verify import guard

import torch


def packed(batch: int, seq: int, heads: int, head_dim: int):
    """q, k and v (batch, heads, seq, head_dim), fp16, as a layer makes them: views of what one linear layer returns."""
    torch.manual_seed(0)
    projected = torch.randn(batch, seq, 3 * heads * head_dim).to(runtime.DEVICE, torch.float16)
    return projected.view(batch, seq, 3, heads, head_dim).permute(2, 0, 3, 1, 4)


# What verify_results is given; tensors: how many results count, o alone or the LSE as well.
CALLS = {
    "one head, lengths 100 and 130": dict(qkv=make_qkv(1, 1, 100, 64, seq_k=130)),
    "2 batches of 3 heads": dict(qkv=make_qkv(2, 3, 40, 64)),
    "views of one projection": dict(qkv=packed(2, 40, 3, 32)),
    "4 query heads on 2 key heads": dict(qkv=make_qkv(1, 4, 40, 64, heads_kv=2), enable_gqa=True),
    "head_dim 80": dict(qkv=make_qkv(1, 1, 70, 80)),
    "causal mask": dict(qkv=make_qkv(1, 1, 70, 64), is_causal=True),
    "LSE, for the backward pass": dict(qkv=make_qkv(1, 1, 70, 64), tensors=2),
}


def outcomes(attention: Callable, some: Iterable[str] = tuple(CALLS)) -> dict[str, str]:
    """How each call ends: "right", "wrong", or "refuses" with an error."""
    return {name: _outcome(attention, **CALLS[name]) for name in some}


def _outcome(attention, qkv, tensors=1, **options):
    def run(*args, **kwargs):
        with guard.watched():  # results start as NaN: what nobody stores is not right by accident
            results = attention(*args, **kwargs)
        return results if tensors == 2 else results[0]

    try:
        report = verify_results(run, *qkv, compare_sdpa=False, **options)
    except Exception:  # whatever it is, the call got no answer
        return "refuses"
    return "right" if report.passed else "wrong"
