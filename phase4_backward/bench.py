"""`python -m phase4_backward.bench`: the backward pass alone beside PyTorch's SDPA backends, fp16."""

from common import runtime
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase3_forward.bench import CASES, TOKENS, WIDTH, sdpa
from phase4_backward import backward as ours

import torch
from torch.nn.attention import SDPBackend

KERNELS = (ours._delta_kernel, ours._attn_bwd_dkdv_kernel, ours._attn_bwd_dq_kernel)
# Five products to the forward pass's two; what a kernel recomputes is not counted.
BACKWARD_FLOPS = 2.5


def case(head_dim: int, is_causal: bool, seq: int) -> list[dict]:
    """One shape: the gradients of q, k and v from a forward pass that has already run."""
    batch, heads = TOKENS // seq, WIDTH // head_dim
    q, k, v = (t.requires_grad_() for t in make_qkv(batch, heads, seq, head_dim, device=runtime.DEVICE))
    do = torch.randn_like(q)

    def gradients(o):
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    providers = {
        "phase 4": gradients(ours.flash_attention(q, k, v, is_causal)),
        "SDPA flash": gradients(sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal)),
        "SDPA cuDNN": gradients(sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal)),
    }
    rows = timing.measure(providers, head_dim=head_dim, is_causal=is_causal, seq=seq)
    flops = BACKWARD_FLOPS * timing.attention_flops(batch, heads, seq, seq, head_dim, is_causal=is_causal)
    return timing.with_tflops(rows, flops)


def run() -> list[dict]:
    return [row for of in CASES for row in case(*of)]


if __name__ == "__main__":
    raise SystemExit(records.main("phase4_backward", KERNELS, run))
