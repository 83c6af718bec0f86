"""How the package is built: small files, no cycles of imports, no two classes of one name."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

import grimp

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
