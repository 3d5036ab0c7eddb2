"""Phase 5's operator for the tests of flash-attention 2: a file that stands beside them. They need a GPU and einops.

    cp tests/flash_attn_adapters.py FLASH_ATTENTION/tests/conftest.py
    cd FLASH_ATTENTION && PYTHONPATH=COURSE python -m pytest tests/test_flash_attn.py

What is asked for by a test's parameters and has no kernel here (dropout, windows, ALiBi, softcap, a cache of keys) is
deselected. Skipped is a causal mask where seq_q != seq_k: flash-attention aligns it at the bottom right, SDPA at the
top left. Nothing of flash-attention needs to be compiled: the package is the checkout's, without its interface.

Of 2.8.3's 508,772 tests 17,588 remain. 1,441 of them, drawn at random, were run on an H100 on 2026-11-25 (driver
580.159.04, torch 2.11.0, Triton 3.6.0, commit 92d382d): 829 passed, 612 were skipped, none failed.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  chooses how Triton runs, before PyTorch is imported
from phase5_tuning.attention import FlashAttention

import pytest
import torch

NOT_HERE = "dropout_p", "local", "alibi", "softcap", "paged_kv_block_size"


def pytest_collection_modifyitems(config, items):
    def has_a_kernel(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return "kvcache" not in item.name and not any(params.get(name) for name in NOT_HERE)

    config.hook.pytest_deselected(items=[item for item in items if not has_a_kernel(item)])
    items[:] = filter(has_a_kernel, items)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False, **options):
    """O of tensors (batch, seq, heads, head_dim); with return_attn_probs also the LSE, and None for P."""
    if causal and q.shape[1] != k.shape[1]:
        pytest.skip("a causal mask for seq_q != seq_k is aligned at the top left here")
    o, lse = FlashAttention.apply(*(t.transpose(1, 2) for t in (q, k, v)), causal, softmax_scale)
    return (o.transpose(1, 2), lse, None) if return_attn_probs else o.transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, return_attn_probs=False, **options
):
    """O of sequences one after another, (tokens, heads, head_dim), each attended to by a call of its own."""
    of_q, of_k = (list(pairwise(ends.tolist())) for ends in (cu_seqlens_q, cu_seqlens_k))
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *args, **options)[0]
        for (a, b), (c, d) in zip(of_q, of_k, strict=True)
    ]
    return (torch.cat(parts), None, None) if return_attn_probs else torch.cat(parts)


def flash_attn_kvpacked_func(q, kv, *args, **options):
    return flash_attn_func(q, *kv.unbind(-3), *args, **options)


def flash_attn_qkvpacked_func(qkv, *args, **options):
    return flash_attn_func(*qkv.unbind(-3), *args, **options)


def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    return flash_attn_varlen_func(q, *kv.unbind(-3), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **options):
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(-3), *ends, *args, **options)


FUNCTIONS = {name: value for name, value in vars().items() if name.startswith("flash_attn_")}
package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
package.__path__ = [str(Path(__file__).resolve().parents[1] / "flash_attn")]
vars(package).update(FUNCTIONS, flash_attn_with_kvcache=None)
vars(interface).update(FUNCTIONS, _get_block_size_n=None)  # only tests of dropout call it
sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
