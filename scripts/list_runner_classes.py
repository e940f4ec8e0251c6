"""List the autotuner's runner classes of FlashInfer packages, without importing them.

    list_runner_classes.py flashinfer_python-0.7.4-py3-none-any.whl
    list_runner_classes.py site-packages

Prints one line per class that derives from ``TunableRunner``, directly or not, local classes of
functions included: its name, the file and line, and the custom ops that it is looked up under,
separated by tabs, in the order of files and lines. More than one package: each under a ``#`` line.

Base classes are resolved through scopes, imports and plain assignments, by what the source says:
a class made by calling ``type()``, a base that is computed, or one that a module gets under
another name than its own by an assignment in a second module, is not seen.

The custom ops are a help for the reader, no more. An op counts for a class where a function hands
the op to ``choose_one``, ``rank_tactics`` or ``search_cache`` and names the class, itself or in a
function that it names (two steps at most). What an f-string inserts is printed as ``*``. So an op
may be listed for a class that only its neighbour is looked up under, and is missing where runners
come in as an argument (``MoELayer``), the op is a parameter, or it is put together elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = "TunableRunner"
LOOKUPS = ("choose_one", "rank_tactics", "search_cache")
STEPS = 2

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (ast.ClassDef, *FUNCTIONS)


@dataclass(frozen=True)
class Imported:
    """What an import statement binds a name to: a module, or a name in one."""

    module: str
    name: str | None = None


@dataclass(eq=False)
class Scope:
    """Names bound in a module, class or function. A name bound twice keeps both meanings."""

    module: Module
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    parent: Scope | None = None
    names: dict[str, list[Scope | Imported | ast.expr]] = field(default_factory=dict)
    children: list[Scope] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "" if isinstance(self.node, ast.Module) else self.node.name

    @property
    def line(self) -> int:
        return 0 if isinstance(self.node, ast.Module) else self.node.lineno

    def bind(self, name: str, meaning: Scope | Imported | ast.expr) -> None:
        self.names.setdefault(name, []).append(meaning)

    def tree(self) -> Iterator[Scope]:
        yield self
        for child in self.children:
            yield from child.tree()


@dataclass(eq=False)
class Module:
    """One source file, parsed when first asked for."""

    name: str
    path: str
    text: str

    @cached_property
    def scope(self) -> Scope:
        tree = ast.parse(self.text, self.path)
        scope = Scope(self, tree)
        self._collect(tree, scope)
        return scope

    def mentions(self, names: set[str]) -> bool:
        return any(name in self.text for name in names)

    def _collect(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, SCOPES):
                inner = Scope(self, child, scope)
                scope.bind(child.name, inner)
                scope.children.append(inner)
                self._collect(child, inner)
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    scope.bind(alias.asname or alias.name, Imported(alias.name))
            elif isinstance(child, ast.ImportFrom):
                source = self._absolute(child)
                for alias in child.names:
                    scope.bind(alias.asname or alias.name, Imported(source, alias.name))
            elif isinstance(child, ast.Assign):
                for target in child.targets:
                    if isinstance(target, ast.Name):
                        scope.bind(target.id, child.value)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.value:
                scope.bind(child.target.id, child.value)
            self._collect(child, scope)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        if not self.path.endswith("/__init__.py"):
            package.pop()
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


class Package:
    """The Python sources of one FlashInfer package."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = {module.name: module for module in modules}

    @classmethod
    def read(cls, path: Path) -> Package:
        """Read a wheel, or a folder that holds a ``flashinfer`` folder."""
        if path.is_dir():
            files = {str(file.relative_to(path)): file for file in path.glob("flashinfer/**/*.py")}
            sources = {name: file.read_text("utf-8") for name, file in files.items()}
        else:
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if re.fullmatch(r"flashinfer/.*\.py", name)]
                sources = {name: wheel.read(name).decode("utf-8") for name in names}
        if not sources:
            sys.exit(f"{path}: no flashinfer folder in it; name a wheel, or a folder that a wheel is installed in")
        return cls(
            [
                Module(re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."), name, text)
                for name, text in sorted(sources.items())
            ]
        )

    def runner_classes(self) -> list[Scope]:
        """Every class below ``TunableRunner``, in the order of files and lines."""
        known: set[Scope] = set()
        fresh = {ROOT}
        while fresh:
            names, fresh = fresh, set()
            for module in self.modules.values():
                for scope in module.scope.tree() if module.mentions(names) else ():
                    node = scope.node
                    if not isinstance(node, ast.ClassDef) or scope in known:
                        continue
                    bases = [base for expression in node.bases for base in self.resolve(expression, scope.parent)]
                    if node.name == ROOT or not known.isdisjoint(bases):
                        known.add(scope)
                        fresh.add(node.name)
        return sorted(
            (scope for scope in known if scope.name != ROOT), key=lambda scope: (scope.module.path, scope.line)
        )

    def resolve(self, expression: ast.expr, scope: Scope | None, depth: int = 0) -> list[Scope]:
        """The classes and functions that an expression may mean."""
        if depth > 20:  # a = b; b = a
            return []
        if isinstance(expression, ast.Subscript):
            return self.resolve(expression.value, scope, depth + 1)
        if isinstance(expression, ast.Attribute):
            modules = self._modules(expression.value, scope)
            return [one for module in modules for one in self._in_module(module, expression.attr, depth)]
        if not isinstance(expression, ast.Name):
            return []
        while scope is not None:
            if expression.id in scope.names:
                return self._meanings(scope, expression.id, depth)
            scope = scope.parent
        return []

    def _meanings(self, scope: Scope, name: str, depth: int) -> list[Scope]:
        found: list[Scope] = []
        for meaning in scope.names.get(name, ()):
            if isinstance(meaning, Scope):
                found.append(meaning)
            elif isinstance(meaning, ast.expr):
                found += self.resolve(meaning, scope, depth + 1)
            elif meaning.name is not None:
                found += self._in_module(meaning.module, meaning.name, depth)
        return found

    def _in_module(self, module: str, name: str, depth: int) -> list[Scope]:
        if module not in self.modules or depth > 20:
            return []
        scope = self.modules[module].scope
        if name in scope.names:
            return self._meanings(scope, name, depth + 1)
        stars = [meaning for meaning in scope.names.get("*", ()) if isinstance(meaning, Imported)]
        return [one for star in stars for one in self._in_module(star.module, name, depth + 1)]

    def _modules(self, expression: ast.expr, scope: Scope | None) -> list[str]:
        """The modules that ``expression`` may name, as the left side of an attribute."""
        dotted = ast.unparse(expression)
        while scope is not None:
            if dotted in scope.names:
                return [
                    f"{meaning.module}.{meaning.name}" if meaning.name else meaning.module
                    for meaning in scope.names[dotted]
                    if isinstance(meaning, Imported)
                ]
            scope = scope.parent
        return []

    def custom_ops(self, classes: list[Scope]) -> dict[Scope, set[str]]:
        """Custom ops by class; see the module's docstring for what this can't tell."""
        ops: dict[Scope, set[str]] = {runner: set() for runner in classes}
        for module in self.modules.values():
            for scope in module.scope.tree() if module.mentions(set(LOOKUPS)) else ():
                looked_up = {op for call in _lookups(scope) for op in self._op(call, scope)}
                if looked_up:
                    owner = scope.parent if scope.parent and isinstance(scope.parent.node, ast.ClassDef) else scope
                    for runner in ops.keys() & self._named(owner, STEPS) - {owner}:
                        ops[runner] |= looked_up
        return ops

    def _op(self, call: ast.Call, scope: Scope) -> set[str]:
        arguments = [word.value for word in call.keywords if word.arg == "custom_op"] + call.args[:1]
        return self._texts(arguments[0], scope) if arguments else set()

    def _texts(self, expression: ast.expr, scope: Scope | None) -> set[str]:
        """The strings that an expression may be, with ``*`` for what is inserted."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            return {expression.value}
        if isinstance(expression, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "*" for part in expression.values)
            return {re.sub(r"\*+", "*", "".join(map(str, parts)))}
        if isinstance(expression, ast.IfExp):
            return self._texts(expression.body, scope) | self._texts(expression.orelse, scope)
        if not isinstance(expression, ast.Name):
            return set()
        while scope is not None and expression.id not in scope.names:
            scope = scope.parent
        texts: set[str] = set()
        for meaning in scope.names[expression.id] if scope else ():
            if isinstance(meaning, ast.expr) and not isinstance(meaning, ast.Name):
                texts |= self._texts(meaning, scope)
            elif isinstance(meaning, Imported) and meaning.name and meaning.module in self.modules:
                texts |= self._texts(ast.Name(meaning.name), self.modules[meaning.module].scope)
        return texts

    def _named(self, scope: Scope, steps: int) -> set[Scope]:
        """The definitions inside a scope, those that it names, and those inside and named by the latter."""
        named = set(scope.tree())
        for node in ast.walk(scope.node):
            if isinstance(node, (ast.Name, ast.Attribute)):
                for meaning in self.resolve(node, scope):
                    named.add(meaning)
                    if steps and isinstance(meaning.node, FUNCTIONS) and not any(_lookups(meaning)):
                        named |= self._named(meaning, steps - 1)
        return named


def _lookups(scope: Scope) -> Iterator[ast.Call]:
    """The look-up calls in a function, without those of functions inside it."""
    pending: list[ast.AST] = list(ast.iter_child_nodes(scope.node))
    while pending:
        node = pending.pop()
        if isinstance(node, SCOPES):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS:
            yield node
        pending.extend(ast.iter_child_nodes(node))


def table(package: Package) -> str:
    """The lines that the script prints for one package."""
    classes = package.runner_classes()
    ops = package.custom_ops(classes)
    rows = ["class\tsource\tcustom_ops"]
    for runner in classes:
        source = f"{runner.module.path.removeprefix('flashinfer/')}:{runner.line}"
        rows.append(f"{runner.name}\t{source}\t{', '.join(sorted(ops[runner]))}")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Reads sources only: nothing of the package is imported or run.",
    )
    parser.add_argument(
        "packages", nargs="+", type=Path, metavar="WHEEL", help="a wheel, or a folder it is installed in"
    )
    packages: list[Path] = parser.parse_args().packages
    for path in packages:
        if len(packages) > 1:
            print(f"# {path.name}")
        print(table(Package.read(path)), end="")


if __name__ == "__main__":
    main()
