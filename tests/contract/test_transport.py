"""Oracle: the other end's list, and real servers and channels made with both.

PBR-53: a limit raised on one side only is the fault users report most.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from distill_wire.chunking import CHUNK_BYTES
from distill_wire.transport import MAX_MESSAGE_BYTES, channel_options, server_options

CLIENT = dict(channel_options())
SERVER = dict(server_options())


@pytest.mark.parametrize("options", [channel_options(), server_options()], ids=["client", "server"])
def test_no_option_is_set_twice(options: list[tuple[str, int]]) -> None:
    assert len(dict(options)) == len(options)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_pbr_53_both_ends_allow_messages_of_the_same_size(way: str) -> None:
    name = f"grpc.max_{way}_message_length"

    assert CLIENT[name] == SERVER[name] == MAX_MESSAGE_BYTES
    assert MAX_MESSAGE_BYTES >= 2 * CHUNK_BYTES


def test_the_server_allows_pings_more_often_than_the_client_sends_them() -> None:
    allowed = SERVER["grpc.http2.min_recv_ping_interval_without_data_ms"]

    assert allowed < CLIENT["grpc.keepalive_time_ms"]
    # 0 = no bound; else grpc would stop pinging an idle but open call after two.
    assert CLIENT["grpc.http2.max_pings_without_data"] == 0
    assert CLIENT["grpc.keepalive_permit_without_calls"] == 1
    assert SERVER["grpc.keepalive_permit_without_calls"] == 1


def test_a_frozen_peer_is_noticed_before_the_next_ping() -> None:
    for options in (CLIENT, SERVER):
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"]
        assert options["grpc.keepalive_timeout_ms"] < options["grpc.keepalive_time_ms"]


def test_the_client_alone_decides_on_proxies_and_the_server_on_its_port() -> None:
    assert CLIENT["grpc.enable_http_proxy"] == 0
    assert SERVER["grpc.so_reuseport"] == 0


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    handlers = {
        "Length": grpc.unary_unary_rpc_method_handler(
            lambda request, context: str(len(request)).encode()
        ),
        "Zeros": grpc.unary_unary_rpc_method_handler(lambda request, context: bytes(int(request))),
    }
    pool = ThreadPoolExecutor(1)
    server = grpc.server(
        pool,
        handlers=[grpc.method_handlers_generic_handler("test.Echo", handlers)],
        options=server_options(),
    )
    port = server.add_insecure_port("localhost:0")
    server.start()
    yield port
    server.stop(grace=None).wait(10)
    pool.shutdown()


def test_pbr_53_five_megabytes_of_zeros_pass_with_and_without_gzip(port: int) -> None:
    with grpc.insecure_channel(f"localhost:{port}", options=channel_options()) as channel:
        call = channel.unary_unary("/test.Echo/Length")
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            assert call(bytes(5_000_000), compression=compression, timeout=30) == b"5000000"
        answer = channel.unary_unary("/test.Echo/Zeros")(b"5000000", timeout=30)

    assert len(answer) == 5_000_000


def test_a_proxy_variable_does_not_capture_the_channel(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Port 9 is discard: a client that obeyed would get UNAVAILABLE.
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    with grpc.insecure_channel(f"localhost:{port}", options=channel_options()) as channel:
        answer = channel.unary_unary("/test.Echo/Length")(b"abc", timeout=10)

    assert answer == b"3"


def test_a_second_server_cannot_take_half_of_a_port(port: int) -> None:
    pool = ThreadPoolExecutor(1)
    second = grpc.server(pool, options=server_options())

    with pytest.raises(RuntimeError, match="Failed to bind"):
        second.add_insecure_port(f"localhost:{port}")

    second.stop(grace=None).wait(10)
    pool.shutdown()
