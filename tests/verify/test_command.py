"""`python -m common.verify`: a function in any of the usual forms, judged in a table."""

import re
import sys

from common.phases import ROOT
from common.verify import __main__ as command
from common.verify import verify_results
from common.verify.inputs import make_qkv

import pytest
from helpers import interpreted_only

FORMS = """
import ctypes
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention as sdpa

def right(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    return sdpa(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

def other_names(q, k, v, causal, sm_scale, window=None):
    return sdpa(q, k, v, is_causal=causal, scale=sm_scale)

def plain(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)

def lse(q, k, causal):
    s = q.float() @ k.float().mT / 4
    return torch.logsumexp(s.masked_fill(torch.ones_like(s).triu(1) > 0, float("-inf")) if causal else s, -1)

def bshd(q, k, v, causal):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return sdpa(q, k, v, is_causal=causal).transpose(1, 2), lse(q, k, causal)

def hsd(q, k, v, causal=False):
    assert q.dim() == 3
    return sdpa(q, k, v, is_causal=causal), lse(q, k, causal)

def unscaled(q, k, v, is_causal=False):
    return sdpa(q, k, v, is_causal=is_causal, scale=1.0)

def dies(q, k, v):
    return ctypes.string_at(0) if q.shape[-2] == 33 else sdpa(q, k, v)

def raises(q, k, v):
    if q.dtype == torch.bfloat16:
        raise TypeError("bf16 is garbage here")
    if q.shape[-2] == 33:
        raise ValueError("[no] ragged length")
    return sdpa(q, k, v)

def ends(q, k, v):
    raise SystemExit(0)

def needs(q, k, v, window):
    pass

@triton.jit
def kernel(q):
    pass

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, window=None):
        ctx.save_for_backward(q, k, v)
        ctx.options = dict(is_causal=causal, scale=sm_scale)
        return sdpa(q, k, v, **ctx.options)

    @staticmethod
    def backward(ctx, do):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return *torch.autograd.grad(sdpa(*leaves, **ctx.options), leaves, do), None, None, None

attention = Function.apply
"""


@pytest.fixture
def judged(tmp_path, monkeypatch, capfd):
    """A function that judges one of FORMS; returns the exit code, {case: verdict}, and what was printed."""
    monkeypatch.setenv("COLUMNS", "140")
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "forms", raising=False)

    def judge(name, *options, shapes="1x3x32x16,1x3x33x16"):
        try:
            code = command.main([f"{path}:{name}", *options, *(["--shapes", shapes] if shapes else [])])
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
        return code, {cells[0].strip(): cells[-1].strip() for cells in rows}, out + err

    return judge


def test_a_right_function_passes_in_every_case(judged):
    code, rows, text = judged("right", shapes="1x2x32x16,2x4:2x17x33x16")
    assert code == 0, text
    assert set(rows.values()) == {"PASS"}
    of_each = [f"{dtype}{mask}" for dtype in ("float16", "bfloat16", "float32") for mask in ("", ", causal")]
    of_one = ("bshd", "transposed", "sliced", "expanded", "v transposed", "scale 0.3")
    wanted = [f"{shape}, {case}" for shape in ("1x2x32x16", "2x4:2x17x33x16") for case in of_each]
    assert list(rows) == [*wanted, *(f"1x2x32x16, float16, {case}" for case in of_one)]
    assert text.endswith("18 of 18 cases passed\n")
    assert "left out" not in text


def test_parameters_have_other_names_too_and_defaults(judged):
    code, rows, text = judged("other_names", shapes="1x2x32x16")
    assert code == 0, text
    assert {"1x2x32x16, float32, causal", "1x2x32x16, float16, scale 0.3"} <= rows.keys()


def test_what_a_function_has_no_parameter_for_is_left_out_and_said(judged, monkeypatch):
    monkeypatch.setattr(command, "SHAPES", "1x2x32x16,1x4:2x33x16")
    code, rows, text = judged("plain", shapes="")
    assert code == 0, text
    assert not [case for case in rows if "causal" in case or "scale" in case or ":" in case]
    (said,) = re.findall(r"^left out: .*", text, re.MULTILINE)
    assert "no parameter enable_gqa" in said
    assert "causal masks" in text
    assert "other scales" in text
    code, rows, text = judged("plain", shapes="1x4:2x33x16")  # as it was asked for
    assert code == 0, text
    assert "1x4:2x33x16, float16" in rows


@pytest.mark.parametrize("layout", ["bshd", "hsd"])
def test_tensors_are_arranged_as_the_function_wants_them(layout, judged):
    code, rows, text = judged(layout, "--layout", layout, shapes="2x3x17x33x16")
    assert code == 0, text
    memory = "bhsd" if layout == "bshd" else "bshd"
    batch = 1 if layout == "hsd" else 2
    assert f"{batch}x3x17x33x16, float16, {memory}" in rows
    code, *_ = judged(layout, shapes="2x3x17x33x16")
    assert code == 1


def test_a_function_of_axes_exchanged_gets_contiguous_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "isolated", lambda call: call())

    def attention(q, k, v):
        seen.append(q.is_contiguous())
        return q

    for layout in ("bhsd", "bshd", "hsd"):
        next(command.cases(command.Adapted(attention, layout), [command.shape("2x3x8x16")], gradients=False)).run()
    assert seen == [True] * 6  # each is called twice


def test_an_apply_is_given_what_its_forward_asks_for(judged):
    code, rows, text = judged("attention", "--gradients", shapes="1x2x17x33x16")
    assert code == 0, text
    assert "dq " in text
    assert "dv " in text
    assert {"1x2x17x33x16, float32, causal", "1x2x17x33x16, float16, scale 0.3"} <= rows.keys()


def test_a_wrong_function_fails_with_the_hint_of_each_case(judged):
    code, rows, text = judged("unscaled", shapes="1x2x32x16")
    assert code == 1
    assert set(rows.values()) == {"FAIL"}
    assert "q (1, 2, 32, 16), k (1, 2, 32, 16), float32, causal\n  o   FAIL  z = " in text
    assert "  hint: the scale is missing" in text
    assert text.endswith(f"0 of {len(rows)} cases passed\n")


@interpreted_only
def test_a_function_that_kills_its_process_costs_its_rows(judged):
    code, rows, text = judged("dies")
    assert code == 1
    assert rows["1x3x32x16, float16"] == "PASS"
    assert rows["1x3x33x16, float16"] == rows["1x3x33x16, float32"] == "died: SIGSEGV"
    assert "Python was ended by SIGSEGV, at forms.py, line " in text
    assert "in dies: return ctypes.string_at(0)" in text
    assert "is it masked" in text


def test_an_error_is_a_failure_and_a_refusal_of_bf16_is_none(judged):
    code, rows, text = judged("raises")
    assert code == 1
    assert rows["1x3x33x16, float32"] == "error: ValueError: [no] ragged length"
    assert rows["1x3x32x16, bfloat16"] == "cannot run: TypeError: bf16 is garbage …"
    assert len(re.findall(r"^error: ValueError: \[no\] ragged length\n  at forms\.py, line ", text, re.MULTILINE)) == 1
    code, rows, text = judged("raises", shapes="1x3x32x16")
    assert code == 0
    assert text.endswith("7 of 8 cases passed, 1 cannot run here\n")


def test_a_function_that_ends_python_has_not_passed(judged):
    code, rows, _ = judged("ends", shapes="1x1x8x16")
    assert code == 1
    assert set(rows.values()) == {"error: SystemExit: 0"}


@pytest.mark.parametrize(
    ("name", "shapes", "said"),
    [
        ("absent", "1x1x8x16", "AttributeError: module 'forms' has no attribute 'absent'"),
        ("FORMS.x", "1x1x8x16", "AttributeError"),
        ("torch", "1x1x8x16", "expected a function, got module"),
        ("kernel", "1x1x8x16", "expected the function that launches this kernel"),
        ("needs", "1x1x8x16", "its parameter 'window' has no default"),
        ("right", "1x1x8", "'1x1x8': expected batch x heads"),
        ("right", "1x3:2x8x16", "expected a number of key heads that divides 3"),
        ("right", "1x1x0x16", "'0': expected a positive integer"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_a_line(name, shapes, said, judged):
    code, rows, text = judged(name, shapes=shapes)
    assert (code, rows) == (2, {})
    assert said in text.splitlines()[-1]
    assert "Traceback" not in text


def test_a_module_is_found_where_python_finds_it(tmp_path, monkeypatch, capsys):
    for spec, said in (("right", "expected module:function"), ("no_such:right", "No module named 'no_such'")):
        with pytest.raises(SystemExit):
            command.function_of(spec)
        assert said in capsys.readouterr().err
    (tmp_path / "forms_to_import.py").write_text(FORMS)
    monkeypatch.syspath_prepend(tmp_path)
    assert command.function_of("forms_to_import:right").__name__ == "right"


def test_the_adapters_of_the_readme_are_right():
    page = (ROOT / "common" / "verify" / "README.md").read_text()
    block = re.search("```python\n(.*?)```", page, re.DOTALL)[1]
    forms, adapters = {}, {}
    exec(FORMS, forms)
    adapters["F"] = forms["Function"]
    q, k, v = make_qkv(2, 3, 17, 16, seq_k=33)
    for name in ("bshd", "hsd", "apply"):
        adapters["mine"] = lambda *given, name=name: forms[name](*given)[0]
        exec(re.search(rf"^{name} = .*", block, re.MULTILINE)[0], adapters)
        verify_results(adapters[name], q, k, v, is_causal=True).check()
