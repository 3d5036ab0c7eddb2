"""Phase 1's merge of two sets of keys, on whole tensors."""

import torch


def merge_(o: torch.Tensor, lse: torch.Tensor, o_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """Phase 1's merge, in place: o, lse (fp32) become those of both sets of keys together."""
    neither = (lse == float("-inf")) & (lse_part == float("-inf"))
    gap = (lse_part - lse).masked_fill(neither, 0.0)
    # The weights, from the difference: at a large LSE exp(lse - both) would round away its last digits.
    o.mul_(torch.sigmoid(-gap)[..., None]).addcmul_(o_part, torch.sigmoid(gap)[..., None])
    lse.copy_(torch.logaddexp(lse, lse_part))
