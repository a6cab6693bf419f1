"""gRPC settings of both ends, as one matched pair.

Most gRPC faults users report come from an option set on one side only, so both
lists are built here from the same numbers. Reasons, each measured with grpcio 1.85:

- Messages: chunks are at most 1 MiB, a request at most a few; the 4 MiB default
  would still refuse a long request, and "unlimited" would let a stranger fill memory.
- Keepalive: a frozen peer is noticed after `ping_timeout`, whatever
  `keepalive_timeout` says; its default is 60 s. The server must allow pings more
  often than the client sends them, or it ends the connection (too_many_pings).
- so_reuseport: on by default, it lets a second server take half the traffic of a
  port without an error.
- Proxy: corporate proxy variables would capture teacher traffic.

Depends on: nothing.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_INTERVAL_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Strictly below the client's interval: equal values cause strikes by jitter.
MIN_PING_INTERVAL_MS = 10_000

Option = tuple[str, int]

_BOTH: tuple[Option, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options() -> list[Option]:
    """Options of a student's channel."""
    return [*_BOTH, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


def server_options() -> list[Option]:
    """Options of a teacher's server."""
    return [
        *_BOTH,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.so_reuseport", 0),
    ]
