"""The small GPT of train.py, trained: its weights are kept beside their record, and it speaks with any attention.

    model = load()
    complete(model, ["417 ", "7 "], attention=flash_attention)

It is a model to run kernels in: a prompt under a causal mask, then a query at a time over a growing cache. It takes
seconds on a CPU. One number it does not know: "0 zero" stands in its text once.

    python -m phase4_backward.speak 417 4170        these numbers in words
    python -m phase4_backward.speak --train NAME    train it anew, in minutes on one core of a CPU: weights and record
                                                    are phase4_backward/results/cpu/NAME.safetensors and NAME.json
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from common import runtime
from common.arguments import arguments, refuse, size
from common.measure import records
from phase4_backward import train
from phase4_backward.train import GPT, complete, in_words, lines

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

RECIPE = dict(seed=0, batch=32, rate=3e-3, whole_lines=True, width=64, heads=2, layers=2, context=64)
SIZES = ("width", "heads", "layers", "context")
STEPS = 4000


def weights(name: str = "speak") -> Path:
    """The file of a trained model's weights, fp16."""
    return train.ON_CPU / f"{name}.safetensors"


def load(attention: Callable = F.scaled_dot_product_attention, name: str = "speak") -> GPT:
    """The trained model, fp32, on the device where kernels run; it calls attention(q, k, v, is_causal=...).

    q, k and v are (batch, 2, seq, 32), fp32, strided.
    """
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn for nothing
        model = GPT(attention, **{key: RECIPE[key] for key in SIZES})
    model.load_state_dict(load_file(weights(name)))
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


def recipe() -> str:
    """Hash of what makes the weights: those of a record with another one are made otherwise."""
    return records.fingerprint(train.train, train.Block, GPT, RECIPE)


def record(name: str, steps: int) -> None:
    """Train the model, keep its weights in fp16, and write its record, of one row.

    The row has about a hundred of the losses, and for each number of digits how many numbers the model writes right, of
    how many, with the weights as they are kept.
    """
    start = time.perf_counter()
    losses, model = train.train(F.scaled_dot_product_attention, steps, **RECIPE)
    seconds = time.perf_counter() - start
    save_file({key: weight.half() for key, weight in model.state_dict().items()}, weights(name))
    right = examine(load(name=name))
    row = RECIPE | dict(steps=steps, seconds=round(seconds), digits=list(right))
    row |= dict(right=list(map(sum, right.values())), of=list(map(len, right.values())))
    row |= dict(losses=[round(loss, 4) for loss in losses[:: max(1, steps // 100)]])
    digest = hashlib.sha256(weights(name).read_bytes()).hexdigest()
    command = f"python -m phase4_backward.speak --train {name}"
    train.record_on_cpu(name, command, {"phase4_backward.train.train": recipe()}, [row], weights=digest)


def main() -> int:
    typed = arguments(
        numbers=dict(nargs="*", type=int, default=[7, 417, 4170], help="from 0 to 9999"),
        train=dict(metavar="NAME", type=records.record_name, help="train it, on the CPU, and keep weights and record"),
        steps=dict(type=size, default=STEPS, help="of training"),
    )
    if not all(0 <= number < 10_000 for number in typed.numbers):
        refuse(f"numbers: expected numbers from 0 to 9999, got {' '.join(map(str, typed.numbers))}")
    torch.set_num_threads(1)
    if typed.train:
        record(typed.train, typed.steps)
    else:
        print("\n".join(complete(load(), [f"{number} " for number in typed.numbers])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
