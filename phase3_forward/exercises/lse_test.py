"""Build the test of LSE: sigma, z and a verdict.

What may a correct kernel return, and does this one return it?

Section 6.3 adds up what five roundings cost an element of O. Do the same for lse = m + log(l) of a row, l the sum of
exp(s_j - m). A correct kernel takes exponentials and adds them up in fp32, rounds P to the input dtype only for the
product with V, and stores lse in fp32. Which roundings reach lse, and what does each cost it, squared?

sigma_of_lse   the square root of their sum, for every row. A small relative error e of l is an error e of log(l).
               rho_ij is the relative error of exp(s_ij - m). A sum of n positive fp32 numbers has a relative error of
               U32 * max(2, sqrt(n) / 2). Storing x in fp32 costs U32 * |x|. Errors are independent.
verdict        the largest z, the root mean square of z, and whether the result passes (the limit is Z_MAX). Where lse
               equals the truth, -inf included, z is 0. Elsewhere, if lse or the truth is not finite, z is inf.

    s        (seq_q, seq_k), fp64: the logits; -inf where a key is hidden. A row may see no key; seq_k is at least 1
    rho      (seq_q, seq_k), fp64, finite
    lse      (seq_q,), fp32: what a kernel returned
    truth    (seq_q,), fp64: finite, or -inf in a row that sees no key
    sigma    (seq_q,), fp64: positive where truth is finite, anything else elsewhere

The limit decides on the largest z only. The harness allows LSE more than this exercise does. Instead of the sum's and
the store's terms it has (2 U32 (4 + max|s| + |lse|))^2, since kernels scale and round m in different ways. And its
exponentials cost more, as their errors may be alike: a scale that is rounded moves all logits of a row. Here they are
independent, and n is the number of keys that a row sees, where the harness takes all keys for n.

Notebook: phase3_forward/forward.ipynb, sections 6.2 to 6.4.
"""

import torch

U32 = 2.0**-24
Z_MAX = 6.0


def sigma_of_lse(s: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """The error of lse (seq_q,) that the roundings of a correct kernel add up to, fp64."""
    # your code: the variances add up; what is a row's n?
    raise NotImplementedError


def verdict(
    lse: torch.Tensor, truth: torch.Tensor, sigma: torch.Tensor
) -> tuple[float, float, bool]:
    """(largest z, rms of z, passed)."""
    # your code: what is z where lse or truth is not finite?
    raise NotImplementedError
