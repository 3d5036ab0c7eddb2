"""Source text with lines replaced, and a module's kernels made of it: before a feature was added, or with a mistake.

no_mask = Stage(forward, ("_attn_fwd_kernel", "the module's line", "what stands there instead"))
show_diff(no_mask["_attn_fwd_kernel"], forward._attn_fwd_kernel)
with no_mask:
    verify_results(attention_forward, q, k, v)
"""

import ast
import contextlib
import functools
import linecache
import warnings
from types import ModuleType
from unittest import mock

from common.source import source


def replaced(text: str, old: str, new: str, *, of: str, inside: str = "") -> str:
    """`text` with `new` for `old`, which must stand in it exactly once; `of` names the text in messages.

    inside: a function, or Class.method, in which `old` stands once, however often it stands elsewhere. Raises
    ValueError.
    """
    start, end = _span(text, inside, of) if inside else (0, len(text))
    found = text.count(old, start, end)
    if found != 1:
        place = f"{inside} of {of}" if inside else of
        raise ValueError(f"{old!r} stands {found} times in {place}, not once")
    at = text.index(old, start, end)
    return text[:at] + new + text[at + len(old) :]


@functools.cache
def _span(text: str, name: str, of: str) -> tuple[int, int]:
    """Where a function or a Class.method begins and ends in a module's text."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            raise ValueError(f"{of} has no {name}")
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


class Stage:
    """The jitted functions that `module` defines or imports, some of them edited; `stage[name]` is one of them.

    edits: (name, old, new); `old` must stand exactly once in the source of the function `name`. All functions are made
    anew, so that a kernel calls the edited form of a function that it uses. Inside `with stage:` the module's launchers
    launch these kernels.
    """

    def __init__(self, module: ModuleType, *edits: tuple[str, str, str]):
        jitted = {n: f.fn for n, f in vars(module).items() if hasattr(f, "fn")}
        texts = {name: source(function) for name, function in jitted.items()}
        for name, old, new in edits:
            if name not in texts:
                raise ValueError(f"{name!r} is none of {module.__name__}'s kernels: {list(texts)}")
            texts[name] = replaced(texts[name], old, new, of=name)
        text, file = "\n\n".join(texts.values()), f"<{module.__name__}, edited: {edits}>"
        # Triton asks Python for a kernel's source; this is where Python looks.
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        scope = {}
        for function in jitted.values():
            scope |= function.__globals__
        scope |= vars(module)
        exec(compile(text, file, "exec"), scope)
        self._module, self._functions = module, {name: scope[name] for name in texts}
        self._active = contextlib.ExitStack()

    def __getitem__(self, name: str):
        return self._functions[name]

    def __enter__(self) -> "Stage":
        self._active.enter_context(mock.patch.multiple(self._module, **self._functions))
        self._active.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # NumPy's, where an edit makes infinities
        return self

    def __exit__(self, *exception) -> None:
        self._active.close()
