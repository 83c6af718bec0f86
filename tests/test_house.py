"""How the package is built: small files, no cycles of imports, no two classes of one name."""

import ast
import graphlib
import sys
from collections import Counter, defaultdict
from pathlib import Path

import grimp
import torch
from torch import nn

from solver_plugins import convert_model
from solver_plugins.registry import DEFAULT_SOLVER
from solver_plugins.solve import SolverConfig
from solver_plugins.surgery import ConversionSpec

PACKAGE = Path(__file__).parents[1] / "solver_plugins"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_file_is_longer_than_400_lines():
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_cycle_of_imports_even_by_late_ones():
    """Imports inside of functions count, too: a late import may save time, but not hide a cycle."""
    graph = grimp.build_graph("solver_plugins", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    graphlib.TopologicalSorter(imports).prepare()


def test_every_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def _functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def test_no_function_has_more_than_ten_parameters():
    """The front door alone has: its arguments are the fields of a ConversionSpec."""
    long = set()
    for path, node in _functions():
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(set(names) - {"self", "cls"}) > 10:
            long.add((path.name, node.name))
    assert long == {("convert.py", "convert_model")}


def test_which_blocks_there_are_and_what_wraps_a_module_is_asked_in_one_place():
    blocks, wrappers = set(), set()
    for path in FILES:
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
            if any("modules()" in ast.unparse(loop.iter) for loop in loops) and _asks_for_blocks(node):
                blocks.add(name)
            if getattr(node, "attr", getattr(node, "value", None)) == "_orig_mod":
                wrappers.add(name)
    # Adapters stand around blocks, and are told by the names of those.
    assert blocks <= {"blocks/install.py", "train/adapters.py"}, "use solver_plugins.blocks.blocks_of"
    assert wrappers == {"wrappers.py"}, "use solver_plugins.wrappers.wrapper_of"


def _asks_for_blocks(loop):
    calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance")
    return any(isinstance(call.args[0], ast.Name) and ast.unparse(call.args[1]) == "SolverBlock" for call in calls)


def test_the_default_solver_is_named_once():
    named = set()
    for path, node in _functions():
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant) and default.value == DEFAULT_SOLVER:
                named.add((path.name, node.name))
    assert not named, "use solver_plugins.registry.DEFAULT_SOLVER"
    assert ConversionSpec().iters == SolverConfig.model_fields["iters"].default


def test_a_forward_pass_crosses_few_files():
    """docs/architecture.md walks through them."""
    x = torch.randn(2, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    convert_model(model, "proxgd", 3, pattern="all", example_inputs=x)
    for mode in (True, False):
        model.train(mode)(x)
        crossed = set()
        sys.setprofile(lambda frame, event, argument, crossed=crossed: crossed.add(frame.f_code.co_filename))
        try:
            model(x)
        finally:
            sys.setprofile(None)
        crossed = {Path(name).relative_to(PACKAGE).as_posix() for name in crossed if name.startswith(str(PACKAGE))}
        rooms = Counter(name.partition("/")[0] for name in crossed)
        assert len(crossed) - rooms["solve"] <= 14 and len(crossed) <= 24, sorted(crossed)
