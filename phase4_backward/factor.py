"""Section 6.3's question: AdamW cancels a constant factor of a gradient, so why does dQ times 8 end higher?"""

import math
from unittest import mock

from common import runtime
from common.speak.text import encode, lines
from phase4_backward import train

import torch

FACTOR = 8


def with_factor(factor):
    """SDPA, but the gradient of q is multiplied on its way down."""

    def attention(q, k, v, is_causal):
        q.register_hook(lambda dq: factor * dq)
        return train.sdpa()(q, k, v, is_causal=is_causal)

    return attention


def short_run(attention, longest):
    """Train for 250 steps, each gradient clipped to the length `longest`.

    Returns the loss at the end, the number of steps whose gradient was longer than 1, and the model.
    """
    lengths, clip = [], torch.nn.utils.clip_grad_norm_

    def noted(weights, _):
        lengths.append(clip(weights, longest).item())

    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", noted):
        losses, model = train.train(attention, 250, heads=1, context=64, batch=8)
    return sum(losses[-20:]) / 20, sum(x > 1 for x in lengths), model


def gradients(model, attention):
    """The gradients of the weights that make Q in the last layer, and of the token table below all layers."""
    for block in model.blocks:
        block.attention = attention
    tokens = encode("".join(lines(held_out=True))[: 32 * 65]).view(32, 65)
    logits = model(tokens[:, :-1].to(runtime.DEVICE)).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten().to(runtime.DEVICE))
    qkv, table = torch.autograd.grad(loss, (model.blocks[-1].qkv.weight, model.token.weight))
    width = qkv.shape[1]
    return {"Q's weights, last layer": qkv[:width], "token table": table}


def report() -> None:
    """Print the losses of four short runs, and compare gradients in the model of the first."""
    print(f"{'':<30}loss after 250 steps   steps with a gradient longer than 1")
    trained = []
    for clipping, longest in (("with clipping", 1.0), ("without clipping", math.inf)):
        for name, factor in (("right", 1), ("dQ times 8", FACTOR)):
            loss, longer, model = short_run(with_factor(factor), longest)
            trained.append(model)
            print(f"{clipping:<18}{name:<12}{loss:>12.2f}{longer:>25}")
    print("\ngradient of               length, times the right one   cosine with the right one")
    right, wrong = (gradients(trained[0], with_factor(factor)) for factor in (1, FACTOR))
    for name, r in right.items():
        length = (wrong[name].norm() / r.norm()).item()
        cosine = torch.cosine_similarity(wrong[name].flatten(), r.flatten(), dim=0).item()
        print(f"{name:<25}{length:>8.3f}{cosine:>27.2f}")
