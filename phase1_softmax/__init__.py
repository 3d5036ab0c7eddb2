"""Phase 1: softmax while the row streams by."""

from phase1_softmax.online_softmax import (
    logsumexp,
    merge_states,
    online_softmax_step,
    softmax,
    softmax_fused,
    softmax_online,
)

__all__ = ["logsumexp", "merge_states", "online_softmax_step", "softmax", "softmax_fused", "softmax_online"]
