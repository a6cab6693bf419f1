"""The contract between a teacher and its students: what they say, as values and as bytes.

Both programs import this package; it imports neither. Start at `types` for the
values, `frame` for the bytes, `codecs` for how a distribution becomes few bytes.
"""

WIRE_VERSION = 1
"""Raised when old and new ends can no longer talk; the package version is separate."""
