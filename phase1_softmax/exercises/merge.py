"""Merge two partial results of attention.

Two programs have attended with the same queries to two different sets of keys. Each returns its normalized output o
and lse, the logarithm of the sum of exp(s) over its keys. Combine them into what one program would have returned for
all the keys. Section 6.1 merges outputs by m and l; here you have only lse = m + log(l).

Logits go into the hundreds, so exp(lse_a) and exp(lse_b) may overflow. A set in which a query saw no key has o = 0 and
lse = -inf there. If one of the two sets is such a set, the result is the pair of the other one. If both are, the result
is o = 0 and lse = -inf again. A NaN in lse or o makes that row NaN.

    o_a, o_b       (..., head_dim), fp32 or fp64; left as they are
    lse_a, lse_b   (...), the same dtype
    returns        o and lse, of these shapes and of this dtype

The same formula merges the parts of a long context in phase 3, and keys on several GPUs in phase 5.

Notebook: phase1_softmax/softmax.ipynb, section 6.2, "One number to keep".
"""

import math

import torch


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair (o, lse) of two disjoint sets of keys together; o (..., head_dim), lse (...)."""
    # your code: return o and lse
    raise NotImplementedError
