"""`python -m phase3_forward.bench`: the forward pass beside PyTorch's SDPA backends, fp16."""

import itertools

from common import runtime
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase3_forward import forward as ours

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = (ours._attn_fwd_kernel,)
TOKENS, WIDTH = 16384, 2048  # batch * seq and heads * head_dim, the same for every case
CASES = [*itertools.product((64, 128), (False, True), (1024, 4096, 16384))]  # head_dim, is_causal, seq


def sdpa(backend, q, k, v, is_causal):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def case(head_dim: int, is_causal: bool, seq: int) -> list[dict]:
    """One shape: ours, SDPA's flash and cuDNN backends, and up to seq 4096 PyTorch with S in memory."""
    batch, heads = TOKENS // seq, WIDTH // head_dim
    call = *make_qkv(batch, heads, seq, head_dim, device=runtime.DEVICE), is_causal
    providers = {
        "phase 3": lambda: ours.attention_forward(*call),
        "SDPA flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, *call),
        "SDPA cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, *call),
    }
    if seq <= 4096:  # beyond, S alone would take 17 GB and more
        providers["SDPA math"] = lambda: sdpa(SDPBackend.MATH, *call)
    rows = timing.measure(providers, head_dim=head_dim, is_causal=is_causal, seq=seq)
    return timing.with_tflops(rows, timing.attention_flops(batch, heads, seq, seq, head_dim, is_causal=is_causal))


def run() -> list[dict]:
    return [row for of in CASES for row in case(*of)]


if __name__ == "__main__":
    raise SystemExit(records.main("phase3_forward", KERNELS, run))
