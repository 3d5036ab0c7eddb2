"""Checks the sum for lengths of every kind, and that nothing beside the vectors is read or written."""

import contextlib
from unittest import mock

from common import runtime
from common.learn.check.require import NoCalls, guarded, require, require_none

import torch

ADD = "add iadd radd mul imul rmul multiply sub lerp"


def check(answer):
    lengths = (1, 127, 128, 129, 1000)
    for n in lengths:
        # Inputs and output lie inside larger memory, so that a stray access does no harm and leaves a trace.
        memory = torch.arange(3.0 * (n + 512), device=runtime.DEVICE).view(3, n + 512) / 8
        x, y, out = (row[256 : 256 + n] for row in memory)
        before, right, first = (memory.clone(), 2 * x + y, torch.arange(n, device=runtime.DEVICE) < answer.BLOCK)
        out.fill_(float("nan"))
        with _reads(memory) as read:
            answer._masked_add_kernel[(-(-n // answer.BLOCK),)](x, y, out, n, BLOCK=answer.BLOCK)
        mistakes = {
            "this is x + y; wanted is 2 x + y": x + y,
            "this is x + 2 y; wanted is 2 x + y": x + 2 * y,
            "this is x: the kernel adds, not the launcher": x,
            "this is y: the kernel adds, not the launcher": y,
            "this is 2 x: the kernel adds, not the launcher": 2 * x,
            "only the first block is there: do the offsets start at program_id * BLOCK?": right.where(first, out),
            "nothing was stored": torch.full_like(out, float("nan")),
        }
        require(f"out, n = {n}", out, right, mistakes=mistakes)
        out.copy_(before[2, 256 : 256 + n])
        changed = (memory != before).nonzero().tolist()
        beside = read - {256 + i + row * (n + 512) for row in (0, 1) for i in range(n)}
        signs = {
            "element n is written, which does not exist: inside is offsets < n, not <= n": changed == [[2, 256 + n]],
            "something was written outside of out: does the store have a mask?": changed,
            f"{len(beside)} numbers beside x and y were read: do both loads have the mask?": beside,
        }
        require_none(signs, f"n = {n}")
    ones = torch.ones(300, device=runtime.DEVICE)
    with NoCalls({ADD: "masked_add: PyTorch's {name} is called in the launcher: the kernel adds"}):
        result = guarded(answer.masked_add, names=["the sum"])(ones, ones)
    require("masked_add(x, y)", result, 3 * ones)
    return f"lengths {', '.join(map(str, lengths))}; nothing read or written outside"


@contextlib.contextmanager
def _reads(memory):
    """The set of elements of memory that interpreted loads read; empty where kernels are compiled."""
    read = set()
    if not runtime.INTERPRETED:
        yield read
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    load = builder.create_masked_load

    def noted(ptrs, mask, *args, **kwargs):
        addresses = ptrs.data[mask.data].astype("int64")
        read.update(((addresses - memory.data_ptr()) // memory.itemsize).tolist())
        return load(ptrs, mask, *args, **kwargs)

    with mock.patch.object(builder, "create_masked_load", noted):
        yield read
