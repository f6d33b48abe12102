"""How many files this process may have open: each mapping of the store holds one, and each connection."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


def allow_all() -> int:
    """Allows as many as the system lets us, as Java does for Apache's servers; says how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
