"""Imports the sources of the package, although compiled modules may lie or appear beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class SourceFinder:
    """Finds modules of the package, and sources only. Packages in it are left to the usual finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("skylark.") or path is None:
            return None
        sources = (Path(where, f"{name.rpartition('.')[2]}.py") for where in path)
        return next((spec_from_file_location(name, source) for source in sources if source.is_file()), None)


sys.meta_path.insert(0, SourceFinder)
