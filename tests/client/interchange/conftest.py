"""Children with torch that are forked."""

from tests.forked_child import forked_child

__all__ = ["forked_child"]
