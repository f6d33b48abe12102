"""For all tests."""

from hypothesis import settings

# A test must not fail because the machine is busy.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
