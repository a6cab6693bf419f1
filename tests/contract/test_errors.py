"""Oracle: the tree at the head of errors.py, and what a real gRPC server of this process says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from distill_wire import errors
from distill_wire.errors import (
    STATUS_OF,
    DistillError,
    FrameCorrupt,
    IdentityMismatch,
    RequestInvalid,
    TeacherOverloaded,
    TeacherUnreachable,
    VersionMismatch,
    error_from_status,
    error_metadata,
)

LEAVES = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, DistillError) and not error.__subclasses__()
]
BUSY_METHOD = "/test.Echo/Busy"
ECHO_METHOD = "/test.Echo/Echo"


STATUSES = {
    "FrameCorrupt": "DATA_LOSS",
    "VersionMismatch": "FAILED_PRECONDITION",
    "RequestInvalid": "INVALID_ARGUMENT",
    "IdentityMismatch": "FAILED_PRECONDITION",
    "TeacherOverloaded": "RESOURCE_EXHAUSTED",
    "TeacherNotReady": "UNAVAILABLE",
    "TeacherFailed": "INTERNAL",
    "TeacherUnreachable": "DEADLINE_EXCEEDED",
}


def test_every_leaf_and_nothing_else_has_its_status() -> None:
    assert {error.__name__: status for error, status in STATUS_OF.items()} == STATUSES
    assert set(STATUS_OF) == set(LEAVES)
    assert set(STATUSES.values()) <= set(grpc.StatusCode.__members__)


@pytest.mark.parametrize("error", LEAVES)
def test_every_error_comes_back_as_itself(error: type[DistillError]) -> None:
    sent = error("row 3 holds token id 70000")

    found = error_from_status(STATUS_OF[error], str(sent), dict(error_metadata(sent)))

    assert type(found) is error
    assert str(found) == str(sent)
    assert found.is_retryable == sent.is_retryable


@pytest.mark.parametrize("error", LEAVES)
def test_an_error_can_be_raised_again_with_more_text(error: type[DistillError]) -> None:
    assert str(error("what, and of which sample")) == "what, and of which sample"


def test_only_waiting_or_going_elsewhere_helps_against_three_errors() -> None:
    retryable = {error.__name__ for error in LEAVES if error.is_retryable}

    assert retryable == {"TeacherOverloaded", "TeacherNotReady", "TeacherUnreachable"}


@pytest.mark.parametrize("seconds", [0.0, 0.25, 12.5])
def test_the_pause_of_an_overload_travels(seconds: float) -> None:
    sent = TeacherOverloaded("full", retry_after_s=seconds)

    found = error_from_status("RESOURCE_EXHAUSTED", "full", dict(error_metadata(sent)))

    assert isinstance(found, TeacherOverloaded)
    assert found.retry_after_s == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2.5", 2.5),
        ("-3", 0.0),
        ("nan", 1.0),
        ("inf", 1.0),
        ("-inf", 1.0),
        ("", 1.0),
        ("soon", 1.0),
    ],
)
def test_a_pause_is_a_finite_number_whatever_a_peer_wrote(text: str, seconds: float) -> None:
    found = error_from_status("RESOURCE_EXHAUSTED", "full", {"retry-after-s": text})

    assert isinstance(found, TeacherOverloaded)
    assert found.retry_after_s == seconds


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("INVALID_ARGUMENT", RequestInvalid),
        ("FAILED_PRECONDITION", IdentityMismatch),
        ("RESOURCE_EXHAUSTED", TeacherOverloaded),
        ("DATA_LOSS", FrameCorrupt),
        # Of a proxy or a dying peer: our own servers send their key. Worth another try.
        ("INTERNAL", TeacherUnreachable),
        ("UNKNOWN", TeacherUnreachable),
        ("UNAUTHENTICATED", RequestInvalid),
        ("PERMISSION_DENIED", RequestInvalid),
        ("UNIMPLEMENTED", VersionMismatch),
        ("UNAVAILABLE", TeacherUnreachable),
        ("DEADLINE_EXCEEDED", TeacherUnreachable),
        ("CANCELLED", TeacherUnreachable),
    ],
)
def test_a_bare_status_becomes_the_nearest_error(status: str, error: type[DistillError]) -> None:
    assert type(error_from_status(status, "a proxy said no", {})) is error


@pytest.mark.parametrize("status", sorted(grpc.StatusCode.__members__))
def test_every_status_becomes_an_error_with_a_message(status: str) -> None:
    found = error_from_status(status, "", {"content-type": "application/grpc"})

    assert isinstance(found, DistillError)
    assert str(found) == f"the server answered {status} without a message"


@pytest.mark.parametrize("name", ["TeacherOnFire", "DistillError", "WireError", "Exception"])
def test_a_class_that_is_no_leaf_falls_back_to_the_status(name: str) -> None:
    found = error_from_status("INVALID_ARGUMENT", "no", {"distill-error": name})

    assert type(found) is RequestInvalid


def test_an_error_with_our_key_keeps_its_class_whatever_its_text_says() -> None:
    sent = TeacherOverloaded("the queue holds a message larger than max")

    found = error_from_status("RESOURCE_EXHAUSTED", str(sent), dict(error_metadata(sent)))

    assert type(found) is TeacherOverloaded


def _abort_as_busy(request: bytes, context: grpc.ServicerContext) -> bytes:
    error = TeacherOverloaded("17 tokens are waiting", retry_after_s=0.125)
    context.set_trailing_metadata(error_metadata(error))
    context.abort(grpc.StatusCode[STATUS_OF[type(error)]], str(error))


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    """A server that takes 1 KiB at most and a client that takes 2 KiB."""
    handlers = {
        "Busy": grpc.unary_unary_rpc_method_handler(_abort_as_busy),
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: 4 * request),
    }
    pool = ThreadPoolExecutor(1)
    server = grpc.server(
        pool,
        handlers=[grpc.method_handlers_generic_handler("test.Echo", handlers)],
        options=[("grpc.max_receive_message_length", 1024)],
    )
    port = server.add_insecure_port("localhost:0")
    server.start()
    options = [("grpc.max_receive_message_length", 2048), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"localhost:{port}", options=options) as channel:
        yield channel
    server.stop(grace=None).wait(10)
    pool.shutdown()


def fail(channel: grpc.Channel, method: str, request: bytes) -> DistillError:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(request, timeout=10, wait_for_ready=True)
    call = caught.value
    metadata = {key: str(value) for key, value in call.trailing_metadata() or ()}
    return error_from_status(call.code().name, call.details() or "", metadata)


def test_an_error_survives_a_real_grpc_call(channel: grpc.Channel) -> None:
    found = fail(channel, BUSY_METHOD, b"")

    assert isinstance(found, TeacherOverloaded)
    assert (str(found), found.retry_after_s) == ("17 tokens are waiting", 0.125)


def test_a_method_that_is_not_there_is_another_version(channel: grpc.Channel) -> None:
    assert type(fail(channel, "/test.Echo/Score", b"")) is VersionMismatch


@pytest.mark.parametrize("num_bytes", [1000, 1025], ids=["the answer", "the request"])
def test_pbr_53_a_message_that_never_fits_is_not_sent_again(
    channel: grpc.Channel, num_bytes: int
) -> None:
    found = fail(channel, ECHO_METHOD, bytes(num_bytes))

    assert type(found) is RequestInvalid
    assert "larger than max" in str(found)
    assert not found.is_retryable
