"""What holds for all tests: other work on the machine is no fault of the example that it slows down."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
