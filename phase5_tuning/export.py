"""`course export FILE`: the shipped operator as one file, without the course around it.

    python -m phase5_tuning.export FILE [--force]

From the public functions on, every name is followed to the statement that defines it, through all
modules of the course. What was reached is written down, module by module, in the order in which they
build on each other; imports are merged. A name that two modules use for different things gets its
module's name in front. The text is the modules' own, comments included.
"""

import ast
import builtins
import keyword
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from common.arguments import arguments
from common.learn.exercises import write
from common.phases import PHASES, ROOT

ROOTS = (
    ("phase5_tuning.attention", "flash_attention"),
    ("phase5_tuning.attention", "FlashAttention"),
    ("phase5_tuning.passes.forward", "attention_forward"),
    ("phase5_tuning.passes.backward", "attention_backward"),
    ("phase5_tuning.fp8.attention", "flash_attention_fp8"),
)
HOUSE = "common", *(phase.folder for phase in PHASES)
FIRST = "common.runtime"  # chooses how Triton runs, so it stands before Triton is imported

# What is said otherwise where there is no course.
INSTEAD = {
    "flash_attention_course::tuned_": "flash_attention_export::",
    "flash_attention_course::fp8_": "flash_attention_export::fp8_",
    "the course could choose": "this file could choose",
    "common.runtime (or a phase)": "this file",
    "; exercise 4.9 has a kernel for it": "",
    "  # True while common.measure.offline notes launches down instead of making them": "",
}
HEADER = '''"""FlashAttention in one file: forward and backward pass in Triton, and in Gluon for Hopper GPUs.

Made by `course export` of flash-attention-course {version}, commit {commit}.
The course derives this code, proves it and measures it; comments that name a phase mean its chapters.

    from {stem} import flash_attention
    o = flash_attention(q, k, v, is_causal=True)  # differentiable once

    {signature}
        takes the place of torch.nn.functional.scaled_dot_product_attention.
    FlashAttention.apply(q, k, v, is_causal=False, scale=None, enable_gqa=True) -> (o, lse)
        the same with the rows' logsumexp, both differentiable.
    attention_forward, attention_backward
        the two passes, without autograd.
    flash_attention_fp8(q, k, v, is_causal=False, scale=None, enable_gqa=False, *, rotate=True, line=False) -> o
        the forward pass with both products in e4m3 (8 bits); head_dim up to 128, no gradients.

q is (batch, heads_q, seq_q, head_dim), k and v are (batch, heads_kv, seq_k, head_dim): fp16, bf16 or
fp32, any strides, head_dim up to 256. heads_q is heads_kv, or with enable_gqa a multiple of it.
attn_mask may be torch.nn.attention.bias's causal_lower_right or causal_upper_left; there is no dropout.

It needs PyTorch and Triton, on Linux. On an NVIDIA GPU of compute capability 8.0 or later kernels are
compiled; without one they are interpreted on the CPU, which is slow. On an H100 or H200 the Gluon
kernels run where they take the call. FLASH_ATTENTION_HOPPER=0 turns them off;
FLASH_ATTENTION_ANY_ORDER=1 lets their backward pass add in any order.

{license}
"""

# ruff: noqa: E402
'''


class Target(NamedTuple):
    """What a name stands for: a name of a module. Of another package: name "" is the module itself, and bound is what
    it is called here."""

    module: str
    name: str
    bound: str = ""


@dataclass(eq=False)
class Part:
    """A statement of a module, with the lines before it that belong to no other; `names` are what it gives a meaning
    to, and `hidden` names mean something else in a scope inside.
    """

    module: "Module"
    node: ast.stmt
    first: int
    names: list[str]
    hidden: set[str]

    @cached_property
    def uses(self) -> list[tuple[ast.AST, Target]]:
        """(place, what it names) of every mention of a module's global names."""
        whole = {node.value: node for node in ast.walk(self.node) if isinstance(node, ast.Attribute)}
        found = [node for node in ast.walk(self.node) if isinstance(node, ast.Name) and node.id not in self.hidden]
        found.sort(key=lambda node: (node.lineno, node.col_offset))
        made = (self.module.use(whole.get(node, node)) for node in found)
        return [(node, target) for node, target in made if target]

    @property
    def works(self) -> bool:
        """True if it does something instead of naming something."""
        return self.names in ([], ["_"])


class Module:
    """A module's statements, and what its imports bring."""

    def __init__(self, name: str):
        self.name, self.parts, self.imports = name, [], {}
        text = path_of(name).read_text()
        self.lines = text.encode().splitlines(keepends=True)
        end = 0
        for node in ast.parse(text).body:
            first, end = end, node.end_lineno
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    source = getattr(node, "module", None) or alias.name
                    attribute = alias.name if isinstance(node, ast.ImportFrom) else ""
                    bound = alias.asname or alias.name.split(".")[0]
                    self.imports[bound] = Target(source, attribute, bound)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                names = [name for name, inside in _bound(node) if not inside]
                hidden = {name for name, inside in _bound(node) if inside}
                hidden -= {name for of in ast.walk(node) if isinstance(of, ast.Global) for name in of.names}
                self.parts.append(Part(self, node, first, names, hidden))

    def defines(self, name: str) -> Part | None:
        return next((part for part in self.parts if name in part.names), None)

    def resolve(self, name: str) -> Target | None:
        """What a global name of this module stands for; None for Python's own."""
        if self.defines(name):
            return Target(self.name, name)
        if name not in self.imports:
            assert hasattr(builtins, name), f"{self.name}: {name} is not defined"
            return None
        target = self.imports[name]
        if target.module.split(".")[0] not in HOUSE:
            return target
        inner = f"{target.module}.{target.name}"
        return Target(inner, "") if path_of(inner) else loaded(target.module).resolve(target.name)

    def use(self, node: ast.Name | ast.Attribute) -> tuple[ast.AST, Target | None]:
        """(place, what it names) of a name, or of an attribute of one."""
        whole = isinstance(node, ast.Attribute)
        target = self.resolve(node.value.id if whole else node.id)
        if target and target.module.split(".")[0] in HOUSE and not target.name:
            assert whole, f"{self.name}, line {node.lineno}: a module of the course as a value"
            return node, loaded(target.module).resolve(node.attr)
        return node.value if whole else node, target


@cache
def loaded(name: str) -> Module:
    return Module(name)


def path_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.exists() else None


SCOPES = ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _bound(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(name, inside) of each name to which a statement gives a meaning; inside: in a scope of its own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, inside
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
        yield node.name, inside
    elif isinstance(node, ast.arg):
        yield node.arg, inside
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.split(".")[0], inside
    for child in ast.iter_child_nodes(node):
        of_child = _bound(child, inside or isinstance(node, SCOPES))
        if isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef):
            next(of_child)  # a method's name hides no global one
        yield from of_child


def reached() -> tuple[dict[str, list[Part]], list[Target]]:
    """(statements by module, everything that they name, the public functions first)."""
    parts, targets, todo = {}, [], [Target(*root) for root in ROOTS]

    def take(module, part):
        parts.setdefault(module.name, []).append(part)
        todo.extend(target for _, target in part.uses)

    while todo:
        target = todo.pop(0)
        if target not in targets:
            targets.append(target)
            if target.module.split(".")[0] in HOUSE:
                module = loaded(target.module)
                part = module.defines(target.name)
                if part not in parts.get(module.name, []):
                    take(module, part)
        if not todo:  # what is done, and not named, belongs to what it is done to
            for module in map(loaded, list(parts)):
                for part in (p for p in module.parts if p.works and p not in parts[module.name]):
                    own = (target for _, target in part.uses if target.module == module.name)
                    if module.name == FIRST or any(target in targets for target in own):
                        take(module, part)
    return parts, targets


def called(targets: list[Target]) -> dict[Target, str]:
    """What each target is called in the file: as in its module, unless two are called the same."""
    names, same = {}, {}
    for target in targets:
        same.setdefault(target.bound or target.name, []).append(target)
    for name, group in same.items():
        keeps = group[0][:2] in ROOTS or group[0].bound
        for target in group:
            keep = len(group) == 1 or (keeps and target == group[0])
            names[target] = name if keep else _qualified(target.module, name)
    assert len(set(names.values())) == len(names), "two names are still the same"
    return names


def _qualified(module: str, name: str) -> str:
    """A name with its module's before it, or its phase's, in the name's own style."""
    room, *place = module.split(".")
    prefix = room.split("_")[0] if room in HOUSE[1:-1] else "_".join(place)
    if name.isupper():
        return f"{prefix}_{name}".upper()
    if name.lstrip("_")[0].isupper():
        return prefix.title().replace("_", "") + name
    return f"_{prefix}{name}" if name.startswith("_") else f"{prefix}_{name}"


def written(module: Module, part: Part, names: dict[Target, str]) -> str:
    """A statement's text with what it uses called as in the file."""
    lines = module.lines[part.first : part.node.end_lineno]
    edits = []
    for node, target in part.uses:
        old, new = ast.unparse(node), names[target]
        if old != new:
            assert new not in part.hidden, f"{module.name}, line {node.lineno}: {new} means something else here"
            edits.append((node.lineno, node.col_offset, old, new))
    if isinstance(part.node, ast.FunctionDef | ast.ClassDef) and part.names != ["_"]:
        old, new = part.node.name, names[Target(module.name, part.node.name)]
        before = "def " if isinstance(part.node, ast.FunctionDef) else "class "
        edits.append((part.node.lineno, len(before), old, new))
    for number, column, old, new in sorted(edits, reverse=True):
        line, end = lines[number - part.first - 1], column + len(old.encode())
        assert line[column:end] == old.encode(), f"{module.name}, line {number}: {old}"
        lines[number - part.first - 1] = line[:column] + new.encode() + line[end:]
    return b"".join(lines).decode()


def in_order(parts: dict) -> list[str]:
    """The modules that were reached, each after those that it builds on."""
    made = []

    def add(name):
        if name in made:
            return
        inner = (f"{t.module}.{t.name}" for t in loaded(name).imports.values())
        wanted = [*inner, *(t.module for t in loaded(name).imports.values())]
        for other in (w for w in wanted if w in parts):
            add(other)
        made.append(name)

    for name in (FIRST, *parts):
        add(name)
    return made


def import_lines(names: dict[Target, str], triton: bool) -> str:
    """The imports from other packages: Triton's and those that may import it, or the rest."""
    lines, by_module, early = [], {}, loaded(FIRST).imports.values()
    for target, name in names.items():
        package = target.module.split(".")[0]
        late = package not in sys.stdlib_module_names and target not in early
        if package in HOUSE or late != triton:
            continue
        if not target.name:
            lines.append(f"import {target.module}" + f" as {name}" * (name != package))
        else:
            alias = target.name + f" as {name}" * (name != target.name)
            by_module.setdefault(target.module, []).append(alias)
    lines += [f"from {module} import {', '.join(sorted(of))}" for module, of in by_module.items()]
    own = sys.stdlib_module_names
    return "\n".join(sorted(lines, key=lambda x: (x.split()[1].split(".")[0] not in own, x))) + "\n"


def export(stem: str) -> str:
    """The file's text; stem: the name that it is imported by."""
    parts, targets = reached()
    names = called(targets)
    text = [import_lines(names, triton=False)]
    for name in in_order(parts):
        module = loaded(name)
        of_module = sorted(parts[name], key=lambda part: part.first)
        body = "".join(written(module, part, names) for part in of_module).strip("\n")
        text.append(f"# ===== {path_of(name).relative_to(ROOT)} =====\n\n{body}\n")
        if name == FIRST:
            text.append(import_lines(names, triton=True))
    body = "\n\n".join(text)
    for old, new in INSTEAD.items():
        assert old in body, f"{old!r} is said nowhere any more"
        body = body.replace(old, new)
    public = sorted(name for _, name in ROOTS)
    return f"{header(stem)}\n{body}\n\n__all__ = {public}\n"


def _git(*words: str) -> str:
    """What Git says of this copy, where it writes nothing; "" of a copy without Git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def header(stem: str) -> str:
    """What the file says first: where it is from, how it is called, its licence."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "-dirty"
    function = loaded(ROOTS[0][0]).defines(ROOTS[0][1]).node
    arguments = re.sub(r": [\w.| ]+?(?==|,|$)", "", ast.unparse(function.args))
    return HEADER.format(
        version=tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        commit=commit or "unknown",
        stem=stem,
        signature=f"{function.name}({arguments}) -> o",
        license=(ROOT / "LICENSE").read_text().strip(),
    )


def main(argv=None) -> int:
    typed = arguments("file", argv=argv, prog="course export", force="replace the file if it is there")
    file = Path(typed.file)
    if not file.parent.is_dir():
        sys.exit(f"{file.parent} is no folder")
    if not file.stem.isidentifier() or keyword.iskeyword(file.stem) or file.suffix != ".py":
        sys.exit(f"{file.name} cannot be imported: call it name.py, of letters, digits and _")
    if file.is_dir() or (file.exists() and not typed.force):
        sys.exit(f"{file} is there already; --force replaces a file")
    text = export(file.stem)
    try:
        write(file, text.encode())
    except OSError as error:
        sys.exit(f"{file} cannot be written: {error.strerror}")
    print(f"{file}: {len(text.splitlines())} lines. from {file.stem} import flash_attention")
    return 0


if __name__ == "__main__":
    sys.exit(main())
