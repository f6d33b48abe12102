"""Imports the sources of the package although compiled modules lie beside them; `SKYLARK_PURE=1` asks for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class SourceFinder:
    """Finds what belongs to the package, and sources only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("skylark.") or path is None:
            return None
        found = (FileFinder(where, (SourceFileLoader, [".py"])).find_spec(name) for where in path)
        return next((spec for spec in found if spec is not None), None)


sys.meta_path.insert(0, SourceFinder)
