"""Kernels from elsewhere in Triton's interpreter: what it computes wrongly is refused, and what it cannot tune runs
with the first configuration."""

from unittest import mock

from common import runtime
from common.verify.guard import Listening

import torch

BF16 = (
    "{kernel}: gets a tensor in bf16, which Triton's interpreter computes wrongly. Give inputs in fp16 here, in bf16 "
    "on a GPU, or convert before the launch as common.runtime.to_kernel_dtype does"
)


def _rules():
    if not runtime.INTERPRETED:
        return []
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    run, tune = InterpretedFunction.run, Autotuner.run

    def checked(kernel, *args, **options):
        for value in (*args, *options.values()):
            if getattr(getattr(value, "base", value), "dtype", None) is torch.bfloat16:
                raise TypeError(BF16.format(kernel=kernel.fn.__name__))
        return run(kernel, *args, **options)

    def first(tuner, *args, **options):
        if len(tuner.configs) == 1:
            return tune(tuner, *args, **options)
        interpretable.say(f"{tuner.base_fn.__name__} is autotuned on a GPU; here it ran with its first configuration")
        with mock.patch.object(tuner, "configs", tuner.configs[:1]):
            return tune(tuner, *args, **options)

    return [mock.patch.object(InterpretedFunction, "run", checked), mock.patch.object(Autotuner, "run", first)]


# `with interpretable() as said`: inside, an interpreted launch with bf16 tensors raises TypeError, and an autotuned
# kernel takes its first configuration, of which the list tells.
interpretable = Listening(_rules)
