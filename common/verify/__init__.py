"""Is this what a correct kernel may return? The harness, its truth, its inputs, and wrong kernels to prove it."""

from common.verify.harness import Report, TensorResult, VerificationError, verify_results, verify_softmax

__all__ = ["Report", "TensorResult", "VerificationError", "verify_results", "verify_softmax"]
