"""The house stands in one direction, common <- phase1 <- phase2 <- phase3, and no phase copies an earlier kernel."""

import ast
import itertools
import re
import subprocess
import sys

from common.phases import PHASES, ROOT, RUNGS
from common.source import diff_texts

import pytest

# What a phase's module takes from an earlier one: the primitives and functions named in its docstring, nothing else.
TILES = {f"phase2_tiling.tiling.{name}" for name in ("load_tile", "store_tile", "head_base")}
GRADIENTS = {f"phase4_backward.backward._attn_bwd_{name}_kernel" for name in ("dkdv", "dq")}
ALLOWED = {
    "phase2_tiling.tiling": {
        "phase1_softmax.online_softmax.online_softmax_step",
        "phase1_softmax.online_softmax.softmax",
    },
    "phase3_forward.forward": TILES | {"phase2_tiling.tiling.attention_tile_step"},
    "phase4_backward.backward": TILES | {"phase3_forward.forward.attention_forward"},
    "phase5_tuning.ladder.forward": TILES,
    "phase5_tuning.ladder.dkdv": TILES,
    "phase5_tuning.ladder.dq": TILES,
    "phase5_tuning.passes.backward": {"phase4_backward.backward._attn_bwd_dkdv_kernel"},
    "phase5_tuning.passes.rungs": GRADIENTS | {"phase3_forward.forward._attn_fwd_kernel"},
}
STEP = 12  # lines of code that a rung may add to the one before it


def imports(path):
    """Every name that a file imports, as module.name; also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def kernels(path):
    """(name, body) of every jitted function of a file; the body without docstring, as normalized source."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            body = node.body[1:] if isinstance(node.body[0], ast.Expr) else node.body
            yield node.name, [ast.unparse(statement) for statement in body]


def modules():
    """Every module of a phase, with its folder."""
    return [(phase.folder, phase.path(module)) for phase in PHASES for module in phase.modules]


@pytest.mark.parametrize("path", sorted((ROOT / "common").rglob("*.py")), ids=lambda p: p.name)
def test_common_knows_no_phase(path):
    assert not [name for name in imports(path) if name.startswith("phase")]


@pytest.mark.parametrize("path", sorted((ROOT / "common").rglob("*.py")), ids=lambda p: p.name)
def test_common_holds_no_attention_kernel(path):
    assert [name for name, _ in kernels(path)] == (["_double_kernel"] if path.name == "canary.py" else [])


@pytest.mark.parametrize(("folder", "path"), modules(), ids=lambda x: getattr(x, "name", x))
def test_a_module_imports_only_the_primitives_it_names(folder, path):
    taken = {name for name in imports(path) if name.startswith("phase") and not name.startswith(folder)}
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert taken == ALLOWED.get(module, set())
    builds_on = ast.get_docstring(ast.parse(path.read_text())).partition("Builds on:")[2]
    assert all(name.rsplit(".", 1)[1] in builds_on for name in taken)


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.folder)
def test_no_phase_reaches_forward(phase):
    for path in (ROOT / phase.folder).rglob("*.py"):
        reached = {name.split(".")[0] for name in imports(path) if name.startswith("phase")}
        assert all(int(name[5]) <= phase.number for name in reached), path


# A subject of phase 5 imports from those before it.
SUBJECTS = ["launch", "ladder", "hopper", "decode", "passes", "attention", "fp8", "ring", "bench", "lesson"]
AT_THE_ROOT = {"__init__", "__main__", "attention", "cases", "export", "given"}
FREE = {"exercises", "checks", "solutions", "results"}  # folders of many files of one kind
MOST_MODULES, MOST_LINES, MOST_IN_A_FUNCTION = 9, 600, 60
LONG_FUNCTIONS = {
    "phase5_tuning.hopper.backward._add_queries"  # one turn of the fused kernel: its order is what it is about
}


def house():
    """Every file of Python but the tests and what learners edit."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    paths = [ROOT / name for name in listed.split() if not name.startswith("tests/")]
    return [path for path in paths if path.exists() and path.parent.name != "exercises"]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_the_subjects_of_phase_5_build_on_those_before_them():
    for path in (ROOT / "phase5_tuning").rglob("*.py"):
        parts = name_of(path).split(".")
        if parts[1:] and parts[1] in SUBJECTS:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("phase5_tuning.")}
            later = used & set(SUBJECTS[SUBJECTS.index(parts[1]) + 1 :])
            assert not later, f"{name_of(path)} imports {later}"


def test_no_module_imports_itself_by_way_of_others():
    names = {name_of(path) for path in house()}
    arrows = {}
    for path in house():
        used = {name if name in names else name.rpartition(".")[0] for name in imports(path)}
        arrows[name_of(path)] = used & names - {name_of(path)}
    while leaves := {name for name, used in arrows.items() if not used & arrows.keys()}:
        arrows = {name: used for name, used in arrows.items() if name not in leaves}
    assert not arrows


def test_folders_files_and_functions_have_a_size_that_one_takes_in():
    assert {path.stem for path in (ROOT / "phase5_tuning").glob("*.py")} == AT_THE_ROOT
    folders = {path.parent for path in house() if path.parent.name not in FREE}
    for folder in folders:
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert len(modules) <= MOST_MODULES, folder
        beside = {path.name for path in folder.iterdir() if path.is_dir()}
        assert not {stem for stem in modules if stem.split("_")[0] in beside}, f"{folder}: a prefix stands for a folder"
    assert not {name_of(path) for path in house() if len(path.read_text().splitlines()) > MOST_LINES}
    functions = {
        f"{name_of(path)}.{node.name}"
        for path in house()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_IN_A_FUNCTION
    }
    assert functions == LONG_FUNCTIONS


def test_no_phase_is_named_in_common():
    named = {name_of(p) for p in (ROOT / "common").rglob("*.py") if re.search(r"\bphase[1-5]_\w+", p.read_text())}
    assert named == {"common.phases"}


# The ladders, by kind: the kernel that each of them begins with, and its rungs.
LADDERS = {
    kind: [first, *(made[kind][1] for made in RUNGS.values() if kind in made)]
    for kind, first in (
        ("forward", "_attn_fwd_kernel"),
        ("dkdv", "_attn_bwd_dkdv_kernel"),
        ("dq", "_attn_bwd_dq_kernel"),
    )
}


def test_no_kernel_is_copied_into_a_later_phase():
    """Exempt are the kernels of one ladder against each other: a rung repeats the one before it.

    The first of them is phase 3's or phase 4's. Against all others a rung is judged as any kernel.
    """
    seen = {}
    for folder, path in modules():
        for name, body in kernels(path):
            ladder = next((names for names in LADDERS.values() if name in names), [])
            for other, other_body in seen.items():
                if other.split(".")[1] not in ladder:
                    shared = sum(line in other_body for line in body)
                    assert shared < 0.9 * len(body), f"{folder}.{name} repeats {other}"
            seen[f"{folder}.{name}"] = body


def test_the_ladders_hold_every_kernel_of_phase_5_but_one():
    paths = [path for folder, path in modules() if folder == "phase5_tuning"]
    kernel_names = [name for path in paths for name, _ in kernels(path)]
    rungs = [name for names in LADDERS.values() for name in names[1:]]
    assert sorted(kernel_names) == sorted([*rungs, "_attn_bwd_rows_kernel"])


def steps():
    """(ladder file, a rung's kernel, the one before it); not the first, which begins elsewhere."""
    for kind, names in LADDERS.items():
        for old, new in itertools.pairwise(names[1:]):
            yield PHASES[-1].path(f"ladder.{kind}"), new, old


def without_signature(path, name):
    """The lines of a function in a file after its signature, without its docstring."""
    node = next(n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name)
    lines = path.read_text().splitlines()
    return "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])


@pytest.mark.parametrize(("path", "new", "old"), list(steps()), ids=lambda x: getattr(x, "stem", x))
def test_a_rung_is_one_idea_more_than_the_one_before_it(path, new, old):
    changed = diff_texts(without_signature(path, old), without_signature(path, new)).splitlines()
    added = [line for line in changed if line.startswith("+")]
    assert 0 < len(added) <= STEP, "\n".join(changed)


def test_modules_stay_readable():
    for _, path in modules():
        assert len(path.read_text().splitlines()) <= 360, path


@pytest.mark.parametrize("name", ["common.learn.cli", "common.phases"])
def test_the_command_line_imports_neither_torch_nor_a_phase(name):
    code = (
        f"import sys, {name}; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'triton') or 'phase' in m])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.strip() == ("['common.phases']")


def test_every_exported_name_exists():
    for phase in PHASES:
        package = __import__(phase.folder)
        assert package.__all__ == sorted(package.__all__)
        assert all(getattr(package, name) is not None for name in package.__all__)
        assert not set(package.__all__) & set(phase.modules), "a module shares its name with a function it exports"
