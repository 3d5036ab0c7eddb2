"""Differentiate the softmax, and prove it with finite differences.

Take one row of logits s and its weights p = softmax(s). Entry (j, k) of the Jacobian J says how p_j answers to s_k:

    J_jk = dp_j / ds_k = p_j ([j = k] - p_k)

A loss that has the gradient dp with respect to p has, with respect to s,

    ds_k = sum_j dp_j J_jk.

Write three pieces:

    softmax_jacobian(p)    (..., n) -> (..., n, n), J of every row
    Softmax.backward       ds of every row from dp, (..., n), with the J of that row
    is_right(softmax)      whether `torch.autograd.gradcheck` accepts the gradient of a function of one tensor: True or
                           False, and no error. gradcheck takes finite differences, which only fp64 makes precise enough

Building J is dear: n^2 numbers for a row of n. How to get ds without it is what the chapter looks at next.

Notebook: phase4_backward/backward.ipynb, section 2.4, "Through the softmax".
"""

from collections.abc import Callable

import torch


def softmax_jacobian(p: torch.Tensor) -> torch.Tensor:
    """dp_j / ds_k of every row, (..., n, n)."""
    # your code: p on the diagonal, less all products
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    # end of your code


class Softmax(torch.autograd.Function):
    """`Softmax.apply(s)`: softmax over the last axis; its gradient is yours."""

    @staticmethod
    def forward(ctx, s):
        p = torch.softmax(s, dim=-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, dp):
        (p,) = ctx.saved_tensors
        # your code: ds, (..., n), from dp and the Jacobian
        return (dp[..., None, :] @ softmax_jacobian(p))[..., 0, :]
        # end of your code


def is_right(softmax: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether gradcheck accepts the gradient of `softmax`, on rows of random logits."""
    # your code: logits that gradcheck can work with, and its verdict
    s = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(softmax, (s,), raise_exception=False)
    # end of your code
