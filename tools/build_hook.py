"""Puts the compiled modules into the wheel that `pip install .` builds, where there is a C compiler.

Without one, or with SKYLARK_PURE=1, the wheel has the sources only, which run up to three times slower.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import compile as compiler


class Compiled(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own configuration, which nobody reads here
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and not os.environ.get("SKYLARK_PURE")

    def dependencies(self) -> list[str]:
        """The compiler, and what the modules import: it reads their types."""
        if not self._is_wanted():
            return []
        return ["mypy>=2.0", "setuptools>=80", *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not self._is_wanted() or not compiler.ensure():
            return
        build_data["force_include"] |= {str(compiler.SOURCE / path): str(path) for path in compiler.PRODUCTS}
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
