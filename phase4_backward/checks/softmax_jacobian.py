"""Checks the Jacobian, the gradient of several rows at once, and what `is_right` says of functions that are right and
wrong.
"""

import warnings

from common.learn.check.require import reject, require, require_none

import torch
from torch.autograd.gradcheck import GradcheckError

CLOSE = dict(rtol=1e-10, atol=1e-12)


def check(answer):
    generator = torch.Generator().manual_seed(0)
    for shape in ((5,), (3, 5), (2, 3, 4)):
        s, dp = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        _check_jacobian(answer.softmax_jacobian, torch.softmax(s, dim=-1))
        _check_backward(answer.Softmax, s, dp)
    _check_is_right(answer.is_right)
    return "the Jacobian and the gradient of one row and of many, and what gradcheck says of right and wrong ones"


def _check_jacobian(jacobian, p):
    diagonal, products = torch.diag_embed(p), p[..., :, None] * p[..., None, :]
    mistakes = {
        "the products are missing: raising s_k lowers every other weight, by p_j p_k": diagonal,
        "the products are added; they are subtracted: other weights fall": diagonal + products,
        "the diagonal is missing: p_j rises with its own logit": -products,
        "the sign is the other way round": products - diagonal,
        "only the diagonal is there: a logit moves the other weights as well": diagonal * (1 - products),
        "only the diagonal is there: p_j answers to every logit, not to s_j alone": torch.diag_embed(p - p * p),
        "there are ones on the diagonal: it is p_j (1 - p_j)": torch.eye(p.shape[-1]).double() - products,
    }
    what = f"softmax_jacobian of p with shape {tuple(p.shape)}"
    try:
        actual = jacobian(p)
    except (RuntimeError, IndexError) as error:
        if p.dim() == 1:
            raise
        reject(f"{what}: it raises {error}. Rows may be many: count axes from the end, torch.diag_embed")
    require(what, actual, diagonal - products, mistakes=mistakes, **CLOSE)


def _check_backward(function, s, dp):
    leaf = s.clone().requires_grad_()
    what = f"Softmax.backward, s with shape {tuple(s.shape)}"
    try:
        (actual,) = torch.autograd.grad(function.apply(leaf), leaf, dp)
    except RuntimeError as error:
        if s.dim() == 1 or "NotImplemented" in repr(error):
            raise
        reject(f"{what}: it raises {error}. Rows may be many: a row times its own matrix, dp[..., None, :] @ J")
    p = torch.softmax(s, dim=-1)
    right = p * (dp - (p * dp).sum(-1, keepdim=True))
    mistakes = {
        "this is p * dp, the diagonal alone: every weight depends on every logit": p * dp,
        "this is p (1 - p) dp: every weight depends on every logit, so there is a sum over j": p * (1 - p) * dp,
        "dp comes back as it came: multiply it by the Jacobian": dp,
        "dp is not in it: this is the gradient of the sum of all weights, which is always 1": torch.zeros_like(p),
        "the sum over j is taken with dp_k outside: it belongs inside, sum_j dp_j J_jk": dp * (p - p * p.sum(-1, True)),
        "rows are mixed: each row has a Jacobian of its own": right.sum(0).expand_as(right),
    }
    require(what, actual, right, mistakes=mistakes, **CLOSE)


class _Softmax(torch.autograd.Function):
    """A softmax with another gradient: gradient(p, dp)."""

    @staticmethod
    def forward(ctx, s, gradient):
        p = torch.softmax(s, dim=-1)
        ctx.save_for_backward(p)
        ctx.gradient = gradient
        return p

    @staticmethod
    def backward(ctx, dp):
        return ctx.gradient(*ctx.saved_tensors, dp), None


def _check_is_right(is_right):
    for right, gradient, said in (
        (True, lambda p, dp: p * (dp - (p * dp).sum(dim=-1, keepdim=True)), "right"),
        (False, lambda p, dp: p * dp, "p * dp, which is wrong"),
        # It is right where all logits of a row are equal.
        (
            False,
            lambda p, dp: p * (dp - dp.mean(dim=-1, keepdim=True)),
            "p * (dp - dp.mean()) in every row, which is wrong",
        ),
    ):
        said = f"is_right of a softmax whose gradient is {said}"
        seen = []

        def watched(s, gradient=gradient, seen=seen):
            seen.append((s.dtype, torch.allclose(s, s[..., :1].expand_as(s), atol=1e-4)))
            return _Softmax.apply(s, gradient)

        raised = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradcheck's, of anything below fp64
            try:
                verdict = is_right(watched)
            except GradcheckError:
                raised = True
            except ValueError as error:
                reject(f"{said}: gradcheck says {error}: does the input require a gradient?")
        dtype, equal = seen[0] if seen else (None, None)
        signs = {
            "it never calls the function: give it to torch.autograd.gradcheck": not seen,
            f"its logits are {dtype}, whose rounding hides the small steps that gradcheck "
            "takes: finite differences need torch.float64": dtype != torch.float64,
            "gradcheck finds it wrong, and raises an error. With its own eps, atol and rtol it accepts it": (
                raised and right
            ),
            "gradcheck finds the mistake, and reports it by an error, which is_right lets through. "
            "is_right must return False here: give gradcheck raise_exception=False, or catch its error": raised,
        }
        require_none(signs, said)
        if verdict is not right:
            why = ""
            if verdict is None:
                why = ": return what gradcheck says"
            elif verdict is True and equal:
                why = ". Equal logits hide it: the weights are equal too. Take random ones"
            reject(f"{said}: expected {right}, got {verdict!r}{why}")
