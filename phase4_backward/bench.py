"""`python -m phase4_backward.bench`: the backward pass alone beside PyTorch's SDPA backends, fp16."""

import itertools

from common import runtime
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase4_backward import backward as ours

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = (ours._delta_kernel, ours._attn_bwd_dkdv_kernel, ours._attn_bwd_dq_kernel)
TOKENS, WIDTH = 16384, 2048  # batch * seq and heads * head_dim, the same for every case
# Five products to the forward pass's two; what a kernel recomputes is not counted.
BACKWARD_FLOPS = 2.5


def case(head_dim: int, is_causal: bool, seq: int) -> list[dict]:
    """One shape: the gradients of q, k and v from a forward pass that has already run."""
    batch, heads = TOKENS // seq, WIDTH // head_dim
    q, k, v = (t.requires_grad_() for t in make_qkv(batch, heads, seq, head_dim, device=runtime.DEVICE))
    do = torch.randn_like(q)

    def gradients(attention):
        o = attention()
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def sdpa(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    providers = {
        "phase 4": gradients(lambda: ours.flash_attention(q, k, v, is_causal)),
        "SDPA flash": gradients(lambda: sdpa(SDPBackend.FLASH_ATTENTION)),
        "SDPA cuDNN": gradients(lambda: sdpa(SDPBackend.CUDNN_ATTENTION)),
    }
    rows = timing.measure(providers, head_dim=head_dim, is_causal=is_causal, seq=seq)
    flops = BACKWARD_FLOPS * timing.attention_flops(batch, heads, seq, seq, head_dim, is_causal=is_causal)
    return timing.with_tflops(rows, flops)


def run() -> list[dict]:
    cases = itertools.product((64, 128), (False, True), (1024, 4096, 16384))
    return [row for head_dim, is_causal, seq in cases for row in case(head_dim, is_causal, seq)]


if __name__ == "__main__":
    raise SystemExit(records.main("phase4_backward", KERNELS, run))
