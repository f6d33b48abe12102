"""The import rules of `docs/architecture.md`, read from its table and checked against the source."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from test_tools import loaded

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "skylark"
MODULES = sorted(SOURCE.rglob("*.py"))

# What would let a clock, a socket or a file into the pure protocol.
IMPURE = {
    "asyncio", "ctypes", "fcntl", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "select", "selectors",
    "shutil", "signal", "ssl", "subprocess", "tempfile", "threading", "time", "uvloop",
}  # fmt: skip
# `socket` is let in for its address codecs alone.
SOCKET_CODECS = {"inet_pton", "inet_ntop", "inet_aton", "inet_ntoa", "AF_INET", "AF_INET6"}


def _rules() -> dict[str, set[str]]:
    """Package -> what it may import, from the lines `| package | may import |` of the table."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rules: dict[str, set[str]] = {}
    for packages, allowed in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) \|", text, re.MULTILINE):
        for package in re.findall(r"`(\w+)`", packages):
            rules[package] = set(re.findall(r"`([\w.]+)`", allowed))
    return rules


RULES = _rules()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, wherever the import stands."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports of our own are absolute"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def _allowed(target: str, package: str) -> bool:
    """`target` is what follows `skylark.`, such as `store.store.Store`."""
    return any(target == rule or target.startswith(rule + ".") for rule in RULES[package] | {package})


def test_every_package_has_a_rule() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(RULES)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_packages_import_only_what_they_may(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        return
    for target in _imports(path):
        if target.startswith("skylark."):
            assert _allowed(target.removeprefix("skylark."), parts[0]), f"{parts[0]} may not import {target}"


@pytest.mark.parametrize("path", sorted((SOURCE / "wire").rglob("*.py")), ids=_name)
def test_the_wire_is_pure(path: Path) -> None:
    for target in _imports(path):
        module, _, name = target.partition(".")
        assert module not in IMPURE, f"wire may not import {target}"
        assert module != "socket" or name in SOCKET_CODECS | {""}, f"wire may not import {target}"
    for node in ast.walk(_tree(path)):
        assert not (isinstance(node, ast.Name) and node.id == "open"), "wire may not open files"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "socket":
            assert node.attr in SOCKET_CODECS, f"wire may not use socket.{node.attr}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_say_what_they_are_for(path: Path) -> None:
    tree = _tree(path)
    assert not tree.body or ast.get_docstring(tree), "a module opens with what it is for"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_bare_except(path: Path) -> None:
    handlers = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type is not None for handler in handlers)


def test_third_party_imports_are_declared() -> None:
    # pytest is not a dependency: its plugin is only ever loaded by pytest.
    declared = {"lark", "librt", "msgspec", "mypy_extensions", "rich", "typer", "uvloop", "skylark"}
    declared |= {"pytest", "lz4", "backports", "compression"}
    of_spark = {"pyspark", "pyarrow", "numpy", "py4j", "fastavro", "google"}
    more = {"spark": of_spark, "pipelines": of_spark | {"yaml", "matplotlib"}}
    for path in MODULES:
        allowed = declared | more.get(path.relative_to(SOURCE).parts[0], set())
        for target in _imports(path):
            top = target.partition(".")[0]
            assert top in allowed or top in sys.stdlib_module_names, f"{_name(path)} imports {top}"


def _bases(path: Path) -> Iterator[tuple[str, str]]:
    """Every class of a file that names a base from elsewhere: its name, and `module.Base`."""
    origins: dict[str, str] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom):
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                whole = ast.unparse(base)
                first, dot, rest = whole.partition(".")
                yield node.name, origins.get(first, first) + dot + rest


def _keyword(decorator: ast.expr) -> str | None:
    return decorator.keywords[0].arg if isinstance(decorator, ast.Call) and decorator.keywords else None


def test_no_source_makes_a_subclass_of_a_compiled_class() -> None:
    """Compiled code knows the subclasses of its classes from when it was made, and `isinstance` takes no other for one.

    Python refuses most of them, but not an exception, which then counts as what it is in one form and not in the other.
    """
    compiled = {SOURCE.parent / path for path in loaded("compile").MODULES}
    classes = {
        f"skylark.{_name(path).removesuffix('.py').replace('/', '.')}.{node.name}"
        for path in compiled
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef) and "allow_interpreted_subclasses" not in map(_keyword, node.decorator_list)
    }
    assert "skylark.wire.typed.BadHeader" in classes
    others = [path for path in MODULES if path not in compiled]
    assert [f"{_name(path)}: {name}({base})" for path in others for name, base in _bases(path) if base in classes] == []
