"""Judge an attention function of your own: `python -m common.verify module:function`, or file.py:function.

The function takes q, k, v and returns o, or o and the LSE (batch, heads, seq) in fp32. --layout says how it wants its
tensors: bhsd is (batch, heads, seq, head_dim), bshd (batch, seq, heads, head_dim), hsd (batch * heads, seq, head_dim).
Of is_causal, scale and enable_gqa it gets those that it has parameters for; `causal`, `sm_scale` and `softmax_scale`
are known too. Cases that it has no parameter for are left out. The `apply` of an autograd function has the parameters
of its `forward`. A function of any other form is called by one that you write:

    def attention(q, k, v, is_causal, scale):
        return mine(q, k, v, None, "causal" if is_causal else "full", scale).output

On the CPU each case runs in a process of its own: a kernel that kills it costs one row. The exit code is 0 if all cases
passed, 1 if one did not, 2 if there is nothing to judge.
"""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from common import runtime
from common.arguments import arguments, listed, refuse, size
from common.verify import Report, suite, verify_results
from common.verify.inputs import LAYOUTS, make_qkv, make_tensor
from common.verify.isolated import Died, isolated, own_line
from common.verify.suite import Case, Stopped

import torch
import torch.nn.functional as F
from triton.runtime import KernelInterface

SHAPES = "1x2x64x64,2x3x100x64,1x2x130x70x32,1x2x70x130x80,1x2x65x128,1x2x1x77x16,2x4:2x77x130x40,1x4:1x33x64"
MEANING = {name: name for name in ("is_causal", "scale", "enable_gqa")}
MEANING |= dict(causal="is_causal", sm_scale="scale", softmax_scale="scale")
LEFT_OUT = dict(is_causal="causal masks", scale="other scales")
COLUMNS = ("case", "z per tensor (limit 6)", "SDPA's z", "s", "verdict")
SCALE = 0.3  # of the case that is not 1 / sqrt(head_dim)


@dataclass(frozen=True)
class Shape:
    """q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim)."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int

    @property
    def grouped(self) -> bool:
        return self.heads_q != self.heads_kv

    def __str__(self):
        heads = f"{self.heads_q}:{self.heads_kv}" if self.grouped else f"{self.heads_q}"
        seq = f"{self.seq_q}x{self.seq_k}" if self.seq_q != self.seq_k else f"{self.seq_q}"
        return f"{self.batch}x{heads}x{seq}x{self.head_dim}"


def shape(text: str) -> Shape:
    """What stands for batch x heads_q[:heads_kv] x seq_q[xseq_k] x head_dim. Raises argparse's error."""
    parts = text.split("x")
    if len(parts) not in (4, 5):
        wanted = "batch x heads[:key heads] x queries[x keys] x head_dim, such as 1x4:2x100x130x64"
        raise ArgumentTypeError(f"{text!r}: expected {wanted}")
    batch, heads, *seq, head_dim = parts
    heads_q, _, heads_kv = heads.partition(":")
    made = Shape(*map(size, (batch, heads_q, heads_kv or heads_q, seq[0], seq[-1], head_dim)))
    if made.heads_q % made.heads_kv:
        raise ArgumentTypeError(f"{text!r}: expected a number of key heads that divides {made.heads_q}")
    return made


def function_of(spec: str) -> Callable:
    """What module:function or file.py:function names. Ends the program where there is no function."""
    module, _, name = spec.rpartition(":")
    if not module:
        refuse(f"{spec!r}: expected module:function or file.py:function")
    try:
        fn = attrgetter(name)(_module(module))
    except (Exception, SystemExit) as error:
        refuse(f"{spec!r}: {type(error).__name__}: {error}")
    if isinstance(fn, KernelInterface):
        refuse(f"{spec!r}: expected the function that launches this kernel")
    if not callable(fn):
        refuse(f"{spec!r}: expected a function, got {type(fn).__name__}")
    return fn


def _module(name: str):
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


class Adapted:
    """A function as verify_results calls one: (q, k, v, is_causal=, scale=, enable_gqa=), all (batch, heads, seq, ...).

    takes: those of the three that the function has parameters for. Ends the program where it asks for other ones.
    """

    def __init__(self, fn: Callable, layout: str):
        self.fn, self.layout = fn, layout
        owner = getattr(fn, "__self__", None)
        self.is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        try:
            parameters = list(inspect.signature(owner.forward if self.is_apply else fn).parameters.values())
            parameters = parameters[4 if self.is_apply else 3 :]  # after q, k, v; forward has ctx before them
        except ValueError:  # a function in C, such as SDPA
            parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in MEANING.values()][:3]
        self.options = {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self.takes = {MEANING[name] for name in self.options if name in MEANING}
        for name, default in self.options.items():
            if name not in MEANING and default is inspect.Parameter.empty:
                refuse(f"its parameter {name!r} has no default: name a function of q, k, v that sets it")

    def __call__(self, q, k, v, **known):
        if known["scale"] is None:
            known["scale"] = 1 / math.sqrt(q.shape[-1])
        options = {name: known.get(MEANING.get(name), default) for name, default in self.options.items()}
        given = [self._arranged(t) for t in (q, k, v)]
        out = self.fn(*given, *options.values()) if self.is_apply else self.fn(*given, **options)
        return tuple(self._back(t, q) for t in out) if isinstance(out, tuple) else self._back(out, q)

    def _arranged(self, t):
        if self.layout == "bhsd":
            return t
        return t.transpose(1, 2) if self.layout == "bshd" else t.flatten(0, 1)

    def _back(self, t, q):
        """A result as q lies. What has another shape than it should stays, for verify_results to tell."""
        if not isinstance(t, torch.Tensor):
            return t
        if self.layout == "bshd" and t.dim() == 4:
            return t.transpose(1, 2)
        if self.layout == "hsd" and t.shape[:1] == (q.shape[0] * q.shape[1],):
            return t.unflatten(0, q.shape[:2])
        return t


def cases(fn: Adapted, shapes: list[Shape], *, gradients: bool) -> Iterator[Case]:
    """All shapes in all dtypes and masks; then one of them with other memory layouts, and with another scale."""
    memory = "bshd" if fn.layout == "bshd" else "bhsd"  # in which the function's tensors are contiguous

    def case(shape, dtype, special="", *, is_causal=False, scale=None, **layouts):
        inputs = dict(layout=memory) | layouts | dict(seq_k=shape.seq_k, heads_kv=shape.heads_kv, dtype=dtype)
        options = dict(is_causal=is_causal, scale=scale, enable_gqa=shape.grouped)

        def report():
            q, k, v = make_qkv(shape.batch, shape.heads_q, shape.seq_q, shape.head_dim, **inputs)
            seeded = torch.Generator().manual_seed(1)
            do = make_tensor(q.shape, dtype=dtype, layout=memory, generator=seeded) if gradients else None
            return verify_results(fn, q, k, v, do=do, **options)

        what = (str(shape), str(dtype).removeprefix("torch."), "causal" * is_causal, special)
        return Case(", ".join(filter(None, what)), lambda: _outcome(report, dtype))

    for each in shapes:
        for dtype in runtime.DTYPES:
            for is_causal in (False, True) if "is_causal" in fn.takes else (False,):
                yield case(each, dtype, is_causal=is_causal)
    one = max(shapes, key=lambda s: (not s.grouped, s.batch * s.heads_q))
    if fn.layout == "hsd":
        one = replace(one, batch=1)  # other layouts have no stride for batch and heads in one
    for layout in LAYOUTS:
        if layout != memory:
            yield case(one, torch.float16, layout, layout=layout)
    yield case(one, torch.float16, "v transposed", layout_v="transposed")
    if "scale" in fn.takes:
        yield case(one, torch.float16, f"scale {SCALE}", scale=SCALE)


def _outcome(report: Callable[[], Report], dtype: torch.dtype) -> Report | Stopped:
    def judged():
        try:
            return report()
        except (Exception, SystemExit) as error:
            return _stopped(error, dtype)

    try:
        return isolated(judged) if runtime.DEVICE == "cpu" else judged()
    except Died as died:
        hint = f"\n  hint: {died.hint}" if died.hint else ""
        return Stopped(f"died: {died.signal}", f"{died}{hint}")


def _stopped(error: BaseException, dtype: torch.dtype) -> Stopped:
    """The error that led to all others, and the line of the function's author that is nearest to it."""
    chain = [error]
    while chain[0].__cause__:
        chain.insert(0, chain[0].__cause__)
    frames = (frame for e in chain for frame in reversed(traceback.extract_tb(e.__traceback__)))
    where = own_line((frame.filename, frame.lineno, frame.name) for frame in frames)
    text = "".join(traceback.format_exception_only(chain[0])).strip()
    refused = dtype == torch.bfloat16 and isinstance(chain[0], TypeError) and "bf16" in text
    verdict = f"{'cannot run' if refused else 'error'}: {text}"
    short = verdict.splitlines()[0]
    short = short if len(short) <= 40 else f"{short[:39]}…"
    return Stopped(short, verdict + (f"\n  at {where}" if where else ""), passed=refused)


def main(argv=None) -> int:
    typed = arguments(
        "function", argv=argv, gradients="dq, dk and dv too, by the function's own backward pass or autograd's",
        shapes=dict(
            type=listed(shape), default=SHAPES, help="batch x heads[:key heads] x queries[x keys] x head_dim, of each"
        ),
        layout=dict(choices=("bhsd", "bshd", "hsd"), default="bhsd", help="the axes of the function's tensors"),
    )  # fmt: skip
    if runtime.CANNOT_RUN:
        refuse(runtime.CANNOT_RUN)
    fn = Adapted(function_of(typed.function), typed.layout)
    shapes, left_out = typed.shapes, []
    if "enable_gqa" not in fn.takes and shapes == listed(shape)(SHAPES):
        shapes = [s for s in shapes if not s.grouped]
        left_out.append("grouped heads (no parameter enable_gqa; --shapes 1x4:2x77x64 tries them all the same)")
    left_out += [f"{what} (no parameter {x})" for x, what in LEFT_OUT.items() if x not in fn.takes]
    # A first call imports much, and would in each process. Without gradients: autograd's threads do not survive a fork.
    verify_results(F.scaled_dot_product_attention, *make_qkv(1, 1, 1, 16))
    caption = f"left out: {', '.join(left_out)}" if left_out else None
    return suite.as_table(typed.function, list(cases(fn, shapes, gradients=typed.gradients)), COLUMNS, caption)


if __name__ == "__main__":
    raise SystemExit(main())
