"""The model of common/speak: it writes numbers in words, or is trained anew.

python -m phase4_backward.speak 417 4170        these numbers in words
python -m phase4_backward.speak --train NAME    train it, in minutes on one core of a CPU: weights and record are
                                                phase4_backward/results/cpu/NAME.safetensors and NAME.json; those of
                                                common/speak are such weights, and their record is speak.json
"""

import hashlib
import time

from common.arguments import arguments, refuse, size
from common.measure import records
from common.speak import gpt, text, trained
from phase4_backward import train

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

RECIPE = dict(seed=0, batch=32, rate=3e-3, whole_lines=True, **trained.SIZES)
STEPS = 4000


def recipe() -> str:
    """Hash of what makes the weights: those of a record with another one are made otherwise."""
    return records.fingerprint(train.train, gpt.Block, gpt.GPT, text.lines, text.encode, RECIPE)


def record(name: str, steps: int) -> None:
    """Train the model, keep its weights in fp16, and write its record, of one row.

    The row has about a hundred of the losses, and for each number of digits how many numbers the model writes right, of
    how many, with the weights as they are kept.
    """
    start = time.perf_counter()
    losses, model = train.train(F.scaled_dot_product_attention, steps, **RECIPE)
    seconds = time.perf_counter() - start
    weights = train.ON_CPU / f"{name}.safetensors"
    save_file({key: weight.half() for key, weight in model.state_dict().items()}, weights)
    right = trained.examine(trained.load(weights=weights))
    row = RECIPE | dict(steps=steps, seconds=round(seconds), digits=list(right))
    row |= dict(right=list(map(sum, right.values())), of=list(map(len, right.values())))
    row |= dict(losses=[round(loss, 4) for loss in losses[:: max(1, steps // 100)]])
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
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
        print("\n".join(gpt.complete(trained.load(), [f"{number} " for number in typed.numbers])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
