"""`course export`: the file works where there is no course, as the operator that it was made from."""

import itertools
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from unittest import mock

from common import runtime
from common.measure import offline
from common.phases import ROOT
from phase5_tuning import attention_backward, attention_forward, export, flash_attention, flash_attention_fp8
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch import configs
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import interpreted_only

# Of (batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, causal, scale): ragged, grouped, strided.
CASES = [(2, 4, 2, 67, 83, 40, torch.float16, True, None), (1, 6, 2, 45, 131, 72, torch.float32, False, -0.2)]
RUN = """
import sys, torch
from attention_alone import flash_attention
assert not [m for m in sys.modules if m.split(".")[0] in ("common", "course") or m.startswith("phase")]
for path in sys.argv[1:]:
    given = torch.load(path)
    qkv = [t.requires_grad_() for t in given["qkv"]]
    o = flash_attention(*qkv, is_causal=given["is_causal"], scale=given["scale"], enable_gqa=True)
    torch.save([o.detach(), *torch.autograd.grad(o, qkv, given["do"])], path + ".out")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The file, in a folder of its own, as the command writes it."""
    file = tmp_path_factory.mktemp("alone") / "attention_alone.py"
    done = course("export", file)
    assert done.returncode == 0, done.stderr
    return file


def course(*arguments, **kwargs):
    command = [sys.executable, "-m", "common.learn.cli", *map(str, arguments)]
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    return subprocess.run(command, capture_output=True, text=True, env=env, **kwargs)


def inputs(batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, is_causal, scale):
    """Strided: heads beside each other in memory, as a projection leaves them."""
    shapes = (seq_q, heads_q), (seq_k, heads_kv), (seq_k, heads_kv)
    made = torch.Generator().manual_seed(seq_q)
    q, k, v = (
        torch.randn(batch, s, h, head_dim, generator=made).to(runtime.DEVICE, dtype).transpose(1, 2) for s, h in shapes
    )
    do = torch.randn(q.shape, generator=made).to(q)
    return dict(qkv=[q / max(1, scale or 0), k, v], do=do, is_causal=is_causal, scale=scale)


def test_the_file_computes_the_same_bits_where_there_is_no_course(exported):
    paths = []
    for number, case in enumerate(CASES):
        paths.append(str(exported.parent / f"{number}.pt"))
        torch.save(inputs(*case), paths[-1])
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    run = [sys.executable, "-c", RUN, *paths]
    done = subprocess.run(run, cwd=exported.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in paths:
        given = torch.load(path)
        qkv = [t.requires_grad_() for t in given["qkv"]]
        o = flash_attention(*qkv, is_causal=given["is_causal"], scale=given["scale"], enable_gqa=True)
        wanted = [o.detach(), *torch.autograd.grad(o, qkv, given["do"])]
        for got, want in zip(torch.load(path + ".out"), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def beside(exported):
    """The file, imported into a process that has the course."""
    spec = spec_from_file_location("attention_alone", exported)
    module = module_from_spec(spec)
    sys.modules["attention_alone"] = module
    sys.path.insert(0, str(exported.parent))
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(exported.parent))
    del sys.modules["attention_alone"]


def test_the_file_and_the_course_live_in_one_process(beside):
    given = inputs(*CASES[0])
    o = beside.flash_attention(*given["qkv"], is_causal=True, enable_gqa=True)
    assert torch.equal(o, flash_attention(*given["qkv"], is_causal=True, enable_gqa=True))
    operator = torch.ops.flash_attention_export.forward(*given["qkv"], True, None, False)[0]
    assert torch.equal(o, operator)
    options = dict(is_causal=True, enable_gqa=True)
    assert torch.equal(
        beside.flash_attention_fp8(*given["qkv"], **options), flash_attention_fp8(*given["qkv"], **options)
    )


def launches(forward, backward, plan_forward, plan_backward, head_dim):
    """Of the plain kernels and of Hopper's, forward and backward."""
    q, k = (torch.empty(1, heads, 512, head_dim, dtype=torch.float16) for heads in (4, 2))
    saved = q, k, k, q, torch.empty(1, 4, 512), q, None

    def calls():
        forward(q, k, k, True, 0.1, True)
        backward(*saved, True, 0.1)
        plan_forward(q, k, k, True, 0.1, 1)(q, k, k)
        plan_backward(*saved, True, 0.1, 1)(*saved)

    return offline.record_launches(calls)


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_file_compiles_to_the_same_machine_code(beside, head_dim):
    passes = beside.attention_forward, beside.attention_backward
    alone = *passes, beside.hopper_forward_plan, beside.hopper_backward_plan
    shipped = attention_forward, attention_backward, hopper_forward.plan, hopper_backward.plan
    with ExitStack() as stack:
        for owner in (beside, configs):
            stack.enter_context(mock.patch.object(owner, "multiprocessors", return_value=132))
        stack.enter_context(mock.patch.object(beside, "recording", True))
        both = [launches(*functions, head_dim) for functions in (alone, shipped)]
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}:{os.path.dirname(beside.__file__)}"):
        made = offline.compile_launches(itertools.chain(*both), ["sm_90"], sass=True)
    half = len(made) // 2
    assert [launch.module for launch in both[0]] == half * ["attention_alone"]
    assert sum(c.instructions["setmaxnreg"] > 0 for c in made) == 4  # Hopper's, forward and backward
    for ours, wanted in zip(made[:half], made[half:], strict=True):
        assert ours.error is None
        assert ours.kernel == wanted.kernel
        assert ours.sass == wanted.sass, ours.kernel


def test_the_file_holds_what_ships_and_nothing_else(exported, beside):
    text = exported.read_text()
    for word in (
        "import phase",
        "from phase",
        "import common",
        "from common",
        "flash_attention_course::",
        "typer",
        "exercise",
    ):
        assert word not in text
    assert not [old for old in export.INSTEAD if old in text]
    shipped = {f"_attn_{name}_kernel" for name in ("fwd_descriptors", "fwd_heavy_first", "bwd_rows")}
    shipped |= {f"_attn_bwd_{name}_kernel" for name in ("dkdv_descriptors", "dkdv_transposed", "dq_descriptors")}
    rungs = {kernel.fn.__name__ for rung in LADDER for kernel in (rung.forward, rung.dkdv, rung.dq)}
    assert all(hasattr(beside, name) for name in shipped)
    also = {name for name in rungs - shipped if hasattr(beside, name)}
    assert also == {"_attn_bwd_dkdv_kernel", "_attn_bwd_dq_edges_kernel"}
    assert beside.__all__ == sorted(name for _, name in export.ROOTS)
    assert repr(beside.TABLE) == repr(configs.TABLE)
    assert "Permission is hereby granted" in beside.__doc__
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,B006,B023", exported]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_copy_of_the_course_without_git_can_be_exported(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "commit unknown" in " ".join(export.header("fast").split())


def test_an_edited_copy_says_so_and_git_is_left_alone(tmp_path, monkeypatch):
    def git(*words):
        as_nobody = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        done = subprocess.run(["git", *as_nobody, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    export.header("fast")  # which reads the operator, not in the copy
    monkeypatch.setattr(export, "ROOT", tmp_path)
    commit, index = git("rev-parse", "HEAD"), tmp_path / ".git" / "index"
    (tmp_path / "mine.py").write_text("")  # of which Git knows nothing
    before = index.read_bytes()
    for text, says in (("", commit), ("# mine\n", f"{commit}-dirty")):
        with (tmp_path / "LICENSE").open("a") as file:
            file.write(text)
        os.utime(tmp_path / "LICENSE", (1, len(text)))  # Git would note in its index that it has looked
        assert f", commit {says}.\n" in export.header("fast")
        assert index.read_bytes() == before


def test_on_a_full_disk_the_file_that_was_there_stays(tmp_path):
    (tmp_path / "mine.py").write_text("mine")
    command = [sys.executable, "-m", "phase5_tuning.export", str(tmp_path / "mine.py"), "--force"]
    done = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command], cwd=ROOT, stderr=subprocess.PIPE)
    assert b"mine.py cannot be written: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_a_folder_that_nobody_may_write_is_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(export.Path, "write_bytes", refuse)
    with pytest.raises(SystemExit, match=r"a\.py cannot be written: Permission denied$"):
        export.main([str(tmp_path / "a.py")])


def test_a_file_that_is_there_is_left_alone(exported, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("mine")
    done = course("export", "mine.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"{file} is there already; --force replaces a file\n"
    assert file.read_text() == "mine"
    assert export.main([str(file), "--force"]) == 0
    assert file.read_text() == exported.read_text().replace("attention_alone", "mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/a.py", "none is no folder"),
        ("flash-attention.py", "flash-attention.py cannot be imported: call it name.py, of letters, digits and _"),
        ("attention", "attention cannot be imported: call it name.py, of letters, digits and _"),
        ("class.py", "class.py cannot be imported: call it name.py, of letters, digits and _"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys, name, says):
    with pytest.raises(SystemExit) as refused:
        export.main([str(tmp_path / name)])
    assert str(refused.value).removeprefix(f"{tmp_path}/") == says
    assert not list(tmp_path.iterdir())
