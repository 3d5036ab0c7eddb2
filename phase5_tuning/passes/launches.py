"""The chapter's kernels as an H200 would launch them, compiled on any machine and run on none."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

from common import runtime
from common.edited import replaced
from common.measure import offline
from phase5_tuning.hopper import backward, forward
from phase5_tuning.ladder import forward as forward_ladder
from phase5_tuning.launch import configs
from phase5_tuning.passes.forward import attention_forward

import torch

SMS = 132  # multiprocessors of an H100 or H200


def plain_launch(head_dim: int, **tile) -> offline.RecordedLaunch:
    """The last rung's launch on an H200, under a full mask. tile: another `Config` than the tuned one."""
    q = torch.empty(1, 4, 1024, head_dim, dtype=torch.float16, device=runtime.DEVICE)
    config = configs.TABLE["forward", head_dim, True].full
    if tile:
        config = configs.Config(**tile)
    last = dict(kernel=forward_ladder._attn_fwd_descriptors_kernel, config=config)
    with mock.patch.object(configs, "capability", return_value=(9, 0)):
        return offline.record_launches(lambda: attention_forward(q, q, q, **last))[-1]


def hopper_launch(
    head_dim: int, is_causal: bool = False, seq: int = 1024, heads: int = 4, **changes
) -> tuple[offline.RecordedLaunch, dict]:
    """(launch, its arguments by name) of the forward kernel on an H200."""
    q = torch.empty(1, heads, seq, head_dim, dtype=torch.float16, device=runtime.DEVICE)
    made = []

    def call():
        made.append(forward.plan(q, q, q, is_causal, head_dim**-0.5, 1, **changes).launch)
        made[0](q, q, q, q, torch.empty(1, heads, seq), torch.zeros(1, dtype=torch.int32))

    with mock.patch.object(configs, "multiprocessors", return_value=SMS):
        (launch,) = offline.record_launches(call)
    names = made[0].kernel.arg_names
    return launch, dict(zip(names[-len(made[0].rest) :], made[0].rest, strict=True))


def hopper_backward_launch(head_dim: int, seq: int = 2048, heads: int = 4) -> offline.RecordedLaunch:
    """The launch of the backward kernel on an H200, full mask, fp16."""
    q = torch.empty(1, heads, seq, head_dim, dtype=torch.float16, device=runtime.DEVICE)
    saved = q, q, q, q, torch.empty(1, heads, seq), q, None
    with mock.patch.object(configs, "multiprocessors", return_value=SMS):
        launches = offline.record_launches(lambda: backward.plan(*saved, False, head_dim**-0.5, 1)(*saved))
    return next(launch for launch in launches if launch.name == "_attn_bwd_hopper_kernel")


def with_line(
    launch: offline.RecordedLaunch, module: ModuleType, inside: str, old: str, new: str
) -> offline.RecordedLaunch:
    """The same launch of a kernel whose module has `new` where, in the function `inside`, `old` stood."""
    text = Path(module.__file__).read_text()
    return replace(launch, source=replaced(text, old, new, inside=inside, of=module.__name__))


def compiled(launches: Mapping[object, offline.RecordedLaunch]) -> dict[object, offline.Compiled]:
    """What the compiler makes of launches for an H200, by their keys."""
    found = offline.compile_launches(launches.values(), ["sm_90"], sass=True, processes=2)
    return dict(zip(launches, found, strict=True))
