"""The rules that a parser can check: imports run downward only, and nothing reads the device from the host."""

import ast
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("recipes", "ops", "fused", "fuser")
FILES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
SIDE_FILES = [path for folder in ("bench", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]

# Extras that a user may not have: bench and tests may import them where they are needed.
OPTIONAL = {"matplotlib", "rich", "safetensors", "transformers", "ml_dtypes"}

HOST_READS = {"item", "tolist", "cpu", "numpy", "synchronize"}
# Where else than in references (`..._ref`) the host may read the device. file: {function: reason}
MAY_READ = {
    "ops/products/paths.py": {"SplitPath.*": "it reads the split sizes by definition"},
    "ops/kernels/grouped_gemm/operands.py": {"row_slices": "for references, and for CPU tensors, where nothing waits"},
    "ops/kernels/grouped_gemm/high_precision_cpu.py": {"*_on_cpu": "CPU tensors, where nothing waits"},
    "ops/kernels/routing/all_to_all.py": {"_exchange_headers": "row counts, which all_to_all_single takes on the host"},
    "recipes/amax_reduction.py": {"_exchanged": "what ranks tell one another, once for each list of amaxes on a GPU"},
    "recipes/tensors/splits.py": {
        "Splits.tolist": "the door through which the SplitPath and references read sizes",
        "Splits.make": "sizes that lie on the host already are validated",
    },
    "recipes/tensors/values_view.py": {
        "ValuesView.numpy": "the caller reads, as of any tensor",
        "ValuesView.tolist": "the same",
    },
    "recipes/tensors/grouped_tensor.py": {"GroupedTensor.unbind": "groups of sizes that the host knows"},
    "ops/products/held_weights.py": {"hold_quantized": "a copy for an optimizer, when a model is made"},
    "recipes/cast_counts.py": {"CountedCasts.counts": "the counts are read when they are asked for"},
    "fuser/distributed/training_state.py": {
        "_whole": "what is written to a file goes to the host",
        "_mesh_before": "a mesh has its ranks on the host",
    },
    "fuser/testing.py": {"*": "it compares results, on the host"},
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(module, names taken from it, level) of each import statement under `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names), node.level


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of each outermost function under `tree`; what it defines inside belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield outer + node.name, node
        else:
            yield from functions(node, f"{outer}{node.name}." if isinstance(node, ast.ClassDef) else outer)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_are_absolute():
    relative = [name_of(path) for path in FILES + SIDE_FILES for *_, level in imports(parsed(path)) if level]
    assert not relative, f"These import relatively: {relative}"


def test_imports_run_downward():
    upward = []
    for path in FILES:
        floor = path.relative_to(ROOT).parts[0]
        above = {*FLOORS[FLOORS.index(floor) + 1 :], "bench", "tests"}
        taken = (module for module, _, _ in imports(parsed(path)))
        upward += [f"{name_of(path)} imports {module}" for module in taken if module.split(".")[0] in above]
    assert not upward, "These import what lies above them:\n" + "\n".join(upward)


def test_functions_import_nothing():
    found = []
    for path in FILES + SIDE_FILES:
        allowed = set() if path in FILES else OPTIONAL
        for function, node in functions(parsed(path)):
            inside = {module.split(".")[0] for module, _, _ in imports(node)} - allowed
            found += [f"{name_of(path)}: {function} imports {module}" for module in sorted(inside)]
    assert not found, "Imports stand at the top of a file:\n" + "\n".join(found)


def modules_taken(path: Path, modules: Collection[str]) -> set[str]:
    """Those of `modules` that a file imports anywhere, for the type checker too."""
    taken = [(module, names or ("",)) for module, names, _ in imports(parsed(path))]
    wanted = {sub if (sub := f"{module}.{n}") in modules else module for module, names in taken for n in names}
    return wanted.intersection(modules)


def test_there_is_no_import_cycle():
    """Between modules, what they import for types alone (`if TYPE_CHECKING`) counted."""
    modules = {module_name(path): path for path in FILES}
    graph = {name: modules_taken(path, modules) for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_an_import_for_types_alone_counts(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("if TYPE_CHECKING:\n    from above.two import name\nfrom above import one\nimport other\n")
    assert modules_taken(file, {"above.one", "above.two", "below"}) == {"above.one", "above.two"}


def test_init_files_only_hand_on_names():
    found = []
    for path in (path for path in FILES if path.name == "__init__.py"):
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            # The ordered tuple of built-in fusions is data and lives here (architecture, section 4).
            is_fusions = name_of(path) == "fused/__init__.py" and "FUSIONS" in ast.unparse(node)
            if not (isinstance(node, ast.Import | ast.ImportFrom) or docstring or is_all or is_fusions):
                found.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def device_reads(path: Path) -> Iterator[str]:
    """Calls in a file's functions that make the host wait for the device, references and `MAY_READ` excepted."""
    allowed = MAY_READ.get(name_of(path), {})
    for function, node in functions(parsed(path)):
        if "_ref" in function or any(fnmatch(function, place) for place in allowed):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                to_cpu = call.func.attr == "to" and "'cpu'" in map(ast.unparse, call.args)
                if to_cpu or call.func.attr in HOST_READS:
                    yield f"{name_of(path)}:{call.lineno}: {function} reads the device: {ast.unparse(call)}"


def test_only_the_split_path_and_references_read_the_device():
    found = [read for path in FILES for read in device_reads(path)]
    assert not found, "\n".join(found)


def test_every_kernel_is_launched_by_a_launch():
    """No `kernel[grid](...)` but in `Launch` itself, and no kernel without a `Launch`."""
    trees = [parsed(path) for path in FILES if name_of(path) != "recipes/triton/launch.py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    bare = [ast.unparse(c.func) for c in calls if re.match(r"\w*kernel\[", ast.unparse(c.func))]
    launched = {ast.unparse(arg) for call in calls if ast.unparse(call.func) == "Launch" for arg in call.args}
    jitted = [n for n in nodes if isinstance(n, ast.FunctionDef) and {"triton.jit", "gluon.jit"} & marks_of(n)]
    kernels = {node.name for node in jitted if node.name.endswith("_kernel")}
    assert not bare, f"These are launched without `Launch`: {bare}"
    assert len(kernels) > 20 and kernels == launched, kernels ^ launched


def marks_of(function: ast.FunctionDef) -> set[str]:
    """Its decorators, without their arguments."""
    return {ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in function.decorator_list}


def test_environment_is_read_in_one_file():
    readers = [name_of(path) for path in FILES if re.search(r"\bos\.environ|\bgetenv", path.read_text())]
    assert len(readers) <= 1, readers


def test_floors_are_found_side_by_side():
    """The names are common ones: no other package may stand in for a floor."""
    found = {floor: find_spec(floor) for floor in FLOORS}
    elsewhere = {floor: spec for floor, spec in found.items() if not spec or Path(spec.origin).parents[1] != ROOT}
    assert not elsewhere
