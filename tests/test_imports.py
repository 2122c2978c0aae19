"""Rules about the source text: which way imports point, where jax's internals are named, how long things get.

Each rule is a function from a source tree to its violations (`file:line: what is wrong`), so that the rules are
themselves tested on small trees that break them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A package may import itself and what stands before it.
PACKAGES = ("gpu_probe", "mcir", "pallas_kernels", "aicf_jax", "experiments")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

VERSION_NAMES = frozenset({"__version__", "__version_info__"})


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Every (package, file), in an order that does not depend on the file system."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield package, path


def where(root: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(root)}:{line}"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import anywhere in the file, function bodies and import_module included."""
    package_parts = path.relative_to(root).parent.parts  # for `pkg/__init__.py` and `pkg/module.py` alike
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: max(0, len(package_parts) - (node.level - 1))] if node.level else ()
            parts = (*base, *(node.module or "").split("."))
            module = ".".join(part for part in parts if part)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}" if module else alias.name
        elif isinstance(node, ast.Call) and node.args and called_name(node) in ("import_module", "__import__"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def called_name(call: ast.Call) -> str:
    """`f` for both `f(...)` and `module.f(...)`; empty for any other callee."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def backward_imports(root: Path) -> Iterator[str]:
    for package, path in sources(root):
        allowed = PACKAGES[: PACKAGES.index(package) + 1]
        for line, module in imported_modules(root, path, parse(path)):
            top = module.split(".")[0]
            if top in PACKAGES and top not in allowed:
                yield f"{where(root, path, line)}: {package} imports {module}; it may import only {', '.join(allowed)}"


def jax_internals(root: Path) -> Iterator[str]:
    for _, path in sources(root):
        if path.name == "_compat.py":
            continue
        tree = parse(path)
        lines = {line for line, module in imported_modules(root, path, tree) if module.startswith("jax._src")}
        lines |= {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "_src" and is_jax(node.value)
        }
        for line in sorted(lines):
            yield f"{where(root, path, line)}: names jax._src; only a _compat.py may"


def is_jax(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("jax", "jaxlib")


def jax_version_reads(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions whose value is jax's version."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in VERSION_NAMES and is_jax(node.value):
            yield node
        elif isinstance(node, ast.Call) and node.args and called_name(node) == "version":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and argument.value in ("jax", "jaxlib"):
                yield node


def jax_version_checks(root: Path) -> Iterator[str]:
    """Anything but writing the version down: as a value in a dict, a keyword argument, or in an f-string."""
    version_modules = {f"{package}.{name}" for package in ("jax", "jaxlib") for name in (*VERSION_NAMES, "version")}
    for _, path in sources(root):
        if path.name == "_compat.py":
            continue
        tree = parse(path)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        lines = {
            line
            for line, module in imported_modules(root, path, tree)
            if any(module == name or module.startswith(f"{name}.") for name in version_modules)
        }
        for read in jax_version_reads(tree):
            if not isinstance(parents[read], ast.Dict | ast.keyword | ast.FormattedValue):
                lines.add(read.lineno)
        for line in sorted(lines):
            yield f"{where(root, path, line)}: depends on jax's version; only a _compat.py may"


def spare_compat_files(root: Path) -> Iterator[str]:
    first: dict[str, Path] = {}
    for package, path in sources(root):
        if path.name == "_compat.py" and first.setdefault(package, path) != path:
            yield f"{where(root, path, 1)}: {package} has {first[package].relative_to(root)} already; one is the limit"


def long_files(root: Path) -> Iterator[str]:
    for _, path in sources(root):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MAX_FILE_LINES:
            yield f"{where(root, path, MAX_FILE_LINES + 1)}: {count} lines; {MAX_FILE_LINES} is the limit"


def long_functions(root: Path) -> Iterator[str]:
    for _, path in sources(root):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                place = where(root, path, node.lineno)
                yield f"{place}: {node.name} has {count} lines; {MAX_FUNCTION_LINES} is the limit"


def check(rule: Callable[[Path], Iterator[str]]) -> None:
    violations = list(rule(ROOT))
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


def test_every_package_has_sources():
    """The rules below would pass on a tree they cannot see."""
    assert {package for package, _ in sources(ROOT)} == set(PACKAGES)


def test_imports_point_one_way():
    check(backward_imports)


def test_only_compat_names_jax_internals():
    check(jax_internals)


def test_only_compat_depends_on_the_jax_version():
    check(jax_version_checks)


def test_a_package_has_at_most_one_compat_file():
    check(spare_compat_files)


def test_files_are_short():
    check(long_files)


def test_functions_are_short():
    check(long_functions)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES

VIOLATIONS = [
    pytest.param(backward_imports, "mcir/a.py", "import json\nimport aicf_jax.graph\n", 2, id="import"),
    pytest.param(backward_imports, "mcir/a.py", "from experiments import lr_sweep\n", 1, id="from"),
    pytest.param(backward_imports, "gpu_probe/b/a.py", "def f():\n    import mcir\n", 2, id="inside a function"),
    pytest.param(backward_imports, "gpu_probe/b/a.py", "from ...mcir import ir\n", 1, id="relative"),
    pytest.param(
        backward_imports, "aicf_jax/a.py", "importlib.import_module('experiments.x')\n", 1, id="import_module"
    ),
    pytest.param(jax_internals, "mcir/a.py", "from jax._src.core import Jaxpr\n", 1, id="from jax._src"),
    pytest.param(jax_internals, "mcir/a.py", "from jax import _src\n", 1, id="from jax"),
    pytest.param(jax_internals, "mcir/a.py", "import jax\nx = jax._src.core\n", 2, id="attribute"),
    pytest.param(
        jax_version_checks, "mcir/a.py", "import jax\nif jax.__version_info__ > (0, 11): pass\n", 2, id="compare"
    ),
    pytest.param(jax_version_checks, "mcir/a.py", "import jax\nv = parse(jax.__version__)\n", 2, id="parse"),
    pytest.param(jax_version_checks, "mcir/a.py", "v = metadata.version('jaxlib').split('.')\n", 1, id="metadata"),
    pytest.param(jax_version_checks, "mcir/a.py", "from jax import __version__\n", 1, id="from jax, version"),
    pytest.param(jax_version_checks, "mcir/a.py", "from jax.version import __version__\n", 1, id="jax.version"),
    pytest.param(long_files, "mcir/a.py", "\n" * (MAX_FILE_LINES + 1), MAX_FILE_LINES + 1, id="file"),
    pytest.param(long_functions, "mcir/a.py", f"\n{LONG_FUNCTION}", 2, id="function"),
    pytest.param(long_functions, "mcir/a.py", LONG_FUNCTION.replace("def", "async def"), 1, id="async function"),
]


@pytest.mark.parametrize(("rule", "name", "text", "line"), VIOLATIONS)
def test_a_violation_is_found_at_its_line(tmp_path, rule, name, text, line):
    (violation,) = rule(write_tree(tmp_path, {name: text}))
    assert violation.startswith(f"{name}:{line}: ")


def test_a_second_compat_file_is_found(tmp_path):
    tree = write_tree(tmp_path, {"mcir/_compat.py": "", "mcir/sub/_compat.py": "", "aicf_jax/_compat.py": ""})
    (violation,) = spare_compat_files(tree)
    assert violation.startswith("mcir/sub/_compat.py:1: ")


def test_what_the_rules_allow(tmp_path):
    tree = write_tree(
        tmp_path,
        {
            "gpu_probe/a.py": "from . import b\nfrom .b import c\nimport gpu_probe.b\n",
            "experiments/sweep/a.py": "import aicf_jax, mcir\nfrom .. import bench\n",
            "experiments/record.py": "import jax\nrow = {'jax': jax.__version__}\ntext = f'jax {jax.__version__}'\n",
            "aicf_jax/_compat.py": "import jax\nfrom jax._src import core\nNEW = jax.__version_info__ >= (0, 11)\n",
            "mcir/text.py": '"""Says jax._src and jax.__version__ in words only."""\n' + "\n" * (MAX_FILE_LINES - 1),
            "mcir/f.py": "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1),
        },
    )
    rules = (backward_imports, jax_internals, jax_version_checks, spare_compat_files, long_files, long_functions)
    assert [violation for rule in rules for violation in rule(tree)] == []
