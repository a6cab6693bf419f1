"""What the teacher tells Prometheus. Names end in their unit, as its conventions ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from distill_wire.types import TeacherDescription, Timings

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


class TeacherMetrics:
    """The server's own registry and what is counted in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "teacher_requests", "Score calls by status.", ["code"], registry=self.registry
        )
        self.dropped = Counter(
            "teacher_dropped_requests",
            "Requests that left the queue before the device.",
            ["reason"],
            registry=self.registry,
        )
        self.tokens = Counter("teacher_tokens", "Tokens computed.", registry=self.registry)
        self.answer_bytes = Counter(
            "teacher_answer_bytes", "Frame bytes sent.", registry=self.registry
        )
        self.batch_tokens = Histogram(
            "teacher_batch_tokens", "Tokens of a batch.", buckets=_TOKENS, registry=self.registry
        )
        self.queue_s, self.forward_s, self.encode_s = (
            Histogram(f"teacher_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)
            for name, text in (
                ("queue", "Wait of a request for the device."),
                ("forward", "Trunk pass of a batch."),
                ("encode", "Head, codec, copy and frame of a request."),
            )
        )
        self.ready = Gauge("teacher_ready", "1 while requests are taken.", registry=self.registry)
        self.loop_lag_s = Gauge(
            "teacher_event_loop_lag_seconds", "Delay of the event loop.", registry=self.registry
        )
        self._queue_tokens = Gauge(
            "teacher_queue_tokens", "Tokens that wait.", registry=self.registry
        )
        self._queue_requests = Gauge(
            "teacher_queue_requests", "Requests that wait.", registry=self.registry
        )
        self._model = Info("teacher_model", "The model served.", registry=self.registry)

    def watch_queue(self, load: Callable[[], tuple[int, int]]) -> None:
        """Read the queue's load whenever metrics are collected."""
        self._queue_tokens.set_function(lambda: load()[0])
        self._queue_requests.set_function(lambda: load()[1])

    def set_model(self, description: TeacherDescription) -> None:
        """Publish the model's identity."""
        self._model.info(
            {
                "model_id": description.model_id,
                "revision": description.revision,
                "weights_fingerprint": description.weights_fingerprint,
                "dtype": description.dtype,
                "attention_implementation": description.attention_implementation,
            }
        )

    def observe_batch(self, batch: Sequence[Timings]) -> None:
        """Count a batch that was answered."""
        if not batch:
            return
        self.batch_tokens.observe(batch[0].batch_tokens)
        self.tokens.inc(batch[0].batch_tokens)
        self.forward_s.observe(batch[0].forward_s)
        for timings in batch:
            self.queue_s.observe(timings.queue_s)
            self.encode_s.observe(timings.encode_s)
