"""The calls that run under compute-sanitizer, without it."""

import subprocess
import sys
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.measure import offline
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import interpreter

import pytest
import sanitize
import torch
from helpers import interpreted_only


@pytest.mark.parametrize("hopper_too", [False, True])
def test_all_phases_are_called(capsys, hopper_too):
    sanitize.call_all(hopper_too)
    names = capsys.readouterr().out.splitlines()
    assert {name.split(",")[0].strip() for name in names} == {f"phase {n}" for n in range(1, 6)}
    assert sum("with Hopper" in name for name in names) == 5 * hopper_too
    assert len(names) == 12 + 5 * hopper_too


@pytest.mark.skipif(runtime.DEVICE == "cuda", reason="it may be there")
def test_a_missing_tool_is_no_success(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert not sanitize.verdict("memcheck")
    assert "compute-sanitizer" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_one_line():
    command = [sys.executable, "-m", "tests.sanitize", "memcheck"]
    done = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "There is no GPU here: nothing to run under sanitizers.\n"


@interpreted_only
@pytest.mark.parametrize(
    ("which", "kernel"),
    [
        ("forward", "_attn_fwd_hopper_kernel"),
        ("backward", "_attn_bwd_hopper_kernel"),
        ("parts", "_attn_fwd_hopper_kernel"),
    ],
)
def test_a_hopper_kernel_is_called_as_it_can_be(monkeypatch, which, kernel):
    monkeypatch.setattr("torch.Tensor.cuda", lambda t: t)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("phase5_tuning.launch.configs.multiprocessors", lambda index: 132)
    launches = offline.record_launches(lambda: sanitize.call_hopper(which, 64, "as it is"))
    assert kernel in [launch.name for launch in launches]


NOTHING, NO_GPU = (0, ""), (1, "no CUDA-capable device")
TRAP, ASSERTED = (1, "an illegal instruction was encountered"), (1, "Assertion `Buffer being accessed` failed")


@pytest.mark.parametrize(
    ("right", "mistaken", "verdict"),
    [
        (NOTHING, TRAP, True),
        (NOTHING, ASSERTED, True),
        (NOTHING, NOTHING, False),
        (ASSERTED, TRAP, False),
        (NO_GPU, NO_GPU, False),
    ],
)
def test_consan_wants_nothing_in_the_kernels_and_the_mistake_in_the_copy(monkeypatch, right, mistaken, verdict):
    def started(command, **kwargs):
        code, said = mistaken if command[-1] == "without a wait" else right
        return mock.Mock(poll=lambda: code, communicate=lambda timeout: ("", said))

    monkeypatch.setattr(sanitize.subprocess, "Popen", started)
    assert sanitize.consan() == verdict


@interpreted_only
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_backward_kernel_that_meets_at_an_mbarrier_is_right(head_dim):
    module = interpreter.changed(hopper_backward, sanitize.MEETINGS)
    q, k, v = make_qkv(1, 4, 320, head_dim, heads_kv=2)
    fn = interpreter.attention(backward=module)
    verify_results(fn, q, k, v, do=make_tensor(q.shape), is_causal=True, enable_gqa=True).check()
