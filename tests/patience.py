"""How long a test waits for something before it says that it hangs.

It is no statement about speed: a machine that runs two suites and burns its CPUs beside them is six to eight times
slower than one at rest, and nothing here takes half a minute at rest. It is shorter than the limit for a whole test in
pyproject.toml, so that a test that hangs says where.
"""

from __future__ import annotations

from typing import Final

DEADLINE_S: Final = 240.0
