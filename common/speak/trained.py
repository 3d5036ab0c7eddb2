"""The small GPT with its trained weights.

    model = load()
    complete(model, ["417 ", "7 "], attention)

A prompt is read under a causal mask, then a query at a time over a growing cache; it takes seconds on a CPU. One number
the model does not know: "0 zero" stands in its text once.
"""

from collections.abc import Callable
from pathlib import Path

from common import runtime
from common.speak.gpt import GPT, complete
from common.speak.text import in_words, lines

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

WEIGHTS = Path(__file__).with_suffix(".safetensors")  # fp16
SIZES = dict(width=64, heads=2, layers=2, context=64)


def load(attention: Callable = F.scaled_dot_product_attention, weights: Path = WEIGHTS) -> GPT:
    """The trained model, fp32, on the device where kernels run; it calls attention(q, k, v, is_causal=...).

    q, k and v are (batch, 2, seq, 32), fp32, strided.
    """
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn for nothing
        model = GPT(attention, **SIZES)
    model.load_state_dict(load_file(weights))
    return model.to(runtime.DEVICE).requires_grad_(False)


def head_by_head(kernel: Callable) -> Callable:
    """Attention by a kernel(q, k, v) for one head, (seq, head_dim) each, that has no mask.

    A model completes with it token by token: a query alone needs none.
    """

    def attention(q, k, v, is_causal):
        if is_causal:
            raise ValueError("is_causal: expected False, as the kernel has no mask: complete(..., token_by_token=True)")
        heads = zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True)
        return torch.stack([kernel(*head) for head in heads]).view(q.shape)

    return attention


def examine(model: GPT) -> dict[int, list[bool]]:
    """Which numbers the model writes without a mistake, by their number of digits: all that are held out of training.

    None of one digit is; all ten are asked for.
    """
    wanted = [line.strip() for line in lines(held_out=True)] + [f"{n} {in_words(n)}" for n in range(10)]
    digits = [line.index(" ") for line in wanted]
    written = complete(model, [line[: n + 1] for n, line in zip(digits, wanted, strict=True)])
    right = [a == b for a, b in zip(written, wanted, strict=True)]
    return {n: [r for r, of in zip(right, digits, strict=True) if of == n] for n in sorted(set(digits))}
