"""What an error of an answer says to who wrote it: the line of the answer, the error, and what may help."""

import ast
import bdb
import re
import traceback
from pathlib import Path

from common import phases


def root_of(error: BaseException, path: Path | None = None) -> BaseException:
    """The error that all others in its chain came from; path: the learner's file."""
    return _chain(error, path)[-1]


def _chain(error: BaseException, path: Path | None = None) -> list[BaseException]:
    """An error, and each that led to the one before; `raise e from e` leads to itself.

    What a line of the learner's file raises in an `except` is a mistake of its own: what was being handled there did
    not lead to it.
    """
    chain = []
    while error and not any(error is known for known in chain):
        chain.append(error)
        handled = None if path and _raised_in(error, path) else error.__context__
        error = error.__cause__ or handled
    return chain


def _raised_in(error: BaseException, path: Path) -> bool:
    return any(Path(frame.filename) == path for frame in traceback.extract_tb(error.__traceback__)[-1:])


def is_stub(error: BaseException) -> bool:
    """True for the `raise NotImplementedError` of a file as shipped; PyTorch's own say what is not implemented."""
    return isinstance(error, NotImplementedError) and not str(error)


def described(error: BaseException, path: Path) -> str:
    """What was raised, and the innermost line of the learner's file that led there.

    The interpreter wraps an error inside a function of Triton in one for each call that led there: the innermost line
    of the file is in the traceback nearest to the root that has one.
    """
    root = root_of(error, path)
    own = next((own for e in reversed(_chain(error, path)) if (own := _own_frames(e, path))), None)
    if is_stub(root):
        so_far = "".join(getattr(root, "__notes__", ()))
        at = own and f"line {own[-1].lineno} still raises NotImplementedError (in {own[-1].name})"
        return so_far + (at or "there is still something to write")
    if own and isinstance(root, bdb.BdbQuit):
        return f"line {own[-1].lineno}: no debugger under check, where nobody can type: take breakpoint() out, or print"
    if isinstance(root, SyntaxError):
        return "".join(traceback.format_exception_only(root)).strip().replace(str(path), path.name)
    what = "".join(traceback.format_exception_only(root)).strip()
    what = what.replace("module 'answer'", path.name)[:4000]
    line = own[-1].line or "" if own else ""
    for words, code, advice in _ADVICE:
        if re.search(words, what) and re.search(code, line):
            what = f"{what[:500]}\n{advice}"
            break
    if own and isinstance(root, ImportError):
        what += _moved(path, own[-1].lineno)
    if own:
        return f"{path.name}, line {own[-1].lineno}, in {own[-1].name}: {line}\n{what}"
    return what


def _moved(path: Path, line: int) -> str:
    """Where the course has what an import in this line of the learner's file asks it for; "" for other imports."""
    imports = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ImportFrom)]
    import_ = next((node for node in imports if node.lineno == line and node.module), None)
    package = import_.module.split(".")[0] if import_ else ""
    if package not in ("common", *(phase.folder for phase in phases.PHASES)):
        return ""
    places = {}
    for alias in import_.names:
        for name in filter(None, (alias.name, alias.asname)):  # a module that was called otherwise may be given by now
            if (place := _place(package, name)) not in ("", import_.module):
                places.setdefault(place, []).append(name)
                break
    now = "; ".join(f"from {place} import {', '.join(names)}" for place, names in places.items())
    return f"\nThe course has moved this: {now}" if now else ""


def _place(package: str, name: str) -> str:
    """The module of a package that defines a name; before all others the one that gives names to exercises."""
    root = phases.ROOT / package
    given = root / "given.py"
    for file in [given] * given.exists() + sorted(root.rglob("*.py")):
        names = set()
        for node in ast.parse(file.read_bytes()).body:
            targets = [getattr(target, "id", "") for target in getattr(node, "targets", ())]
            names.update([getattr(node, "name", ""), *targets])
            if file == given and isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
        if name in names and file.parent.name not in ("exercises", "checks", "solutions"):
            return ".".join(file.relative_to(phases.ROOT).with_suffix("").parts)
    return ""


def of_the_course(error: BaseException) -> str:
    """What is said of an error in the course's own files, before the answer is loaded."""
    files = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    frame = [f for f in files if Path(f.filename).is_relative_to(phases.ROOT)][-1]
    what = "".join(traceback.format_exception_only(error)).strip()
    return (
        f"{Path(frame.filename).relative_to(phases.ROOT)}, line {frame.lineno}: {what}\n"
        "Your answer was not looked at: a file of the course cannot be loaded. git status shows which have been changed"
    )


# Patterns in an error and in the line of the answer that raised it, and what may help; the first that fits counts.
# fmt: off
_ADVICE = (
    ("make_shape_compatible|equal reduction dimensions|could not be broadcast|argument to have shape|"
     "cannot be block type", "",
     "The shapes of two blocks do not fit. A number for each row is a column beside a tile, [:, None]; one for each "
     "column is a row above it, [None, :]. The pointers, the mask and the values of a load or store have one shape. In "
     "a product, is one to be transposed, tl.trans?"),
    ("operands must be same dtype", "",
     "tl.dot multiplies tiles of one dtype. What was computed is fp32: convert it down to the dtype of the tile that "
     "was loaded, such as p.to(v.dtype)"),
    ("must match the size of tensor", "",
     "If one of the two holds a number for each row, x[..., None] makes it a column, with one axis more"),
    ("type pointer<", "",
     "A pointer is an address, not the number that lies there: fetch it first, tl.load(pointer, mask=...)"),
    ("Unsupported ptr type", "",
     "The first argument of tl.load and tl.store is a pointer or a block of them, such as x_ptr + offsets"),
    ("'int' object is not iterable|unsupported tensor index|only 0-dimensional arrays", r"\w\[[^\]]*\]\s*=[^=]|ptrs?\[",
     "Elements cannot be picked by [ ] in a kernel: read them by tl.load(x_ptr + offsets, mask=...), and write them "
     "by tl.store(x_ptr + offsets, values, mask=...)"),
    ("only 0-dimensional arrays", "",
     "Python's float(), int() and math take one number, and this is a block: x.to(tl.float32) converts a block, and "
     "tl.exp takes the exponential of each of its elements"),
    ("must be of type tl.constexpr", "",
     "The compiler must know this number: an argument that the kernel declares as `BLOCK: tl.constexpr`, or a "
     "literal. What a program only learns when it runs is added: start + tl.arange(0, BLOCK)"),
    ("range must be a power of 2", "",
     "A block's length is a power of two: triton.next_power_of_2(n) is the least that holds n. A mask leaves the rest "
     "out"),
    ("Shape element", "",
     "The sides of a tile are powers of two: with a head_dim that is none, a tile is padded to the next one, and its "
     "loads and stores end at head_dim"),
    ("out of bounds for shape", r"online_softmax_step\(",
     "online_softmax_step takes m_i, l_i and s, in this order, and returns m_i, l_i, alpha and p"),
    (r"out of bounds for shape|maximum\(\) got an unexpected", "",
     "tl.max(s, axis=1) reduces one block along an axis; tl.maximum(a, b) takes the larger of two, element by element"),
    ("must be Tensor, not tensor|'tensor' object has no attribute|argument 'dim'|'builtin_function_or_method'", "",
     "Inside a kernel there are blocks of Triton, not PyTorch's tensors: tl.exp, tl.where, tl.maximum(a, b), and "
     "tl.max(s, axis=1) or tl.sum(s, axis=1), with axis for PyTorch's dim"),
    ("'tuple' object has no attribute", "stride",
     "x.stride() is a tuple, a number for each axis: take one of them, such as stride_x[0]"),
    ("UnboundLocalError", "",
     "Where a loop never runs, as over a length of 0, a name that it alone sets does not exist: set it before"),
)
# fmt: on


def _own_frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
