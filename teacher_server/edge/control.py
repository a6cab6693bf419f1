"""The HTTP control plane: is it alive, is it ready, how is it doing, who is it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from distill_wire.errors import TeacherNotReady
from teacher_server.metrics import TeacherMetrics
from teacher_server.scheduling.admission import Admission


def build_control_plane(admission: Admission, metrics: TeacherMetrics) -> FastAPI:
    """Build the app with /healthz, /readyz, /metrics and /v1/describe."""
    app = FastAPI(title="teacher-server", docs_url="/docs", redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("alive")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        try:
            admission.describe(include_token_map=False)
        except TeacherNotReady as exc:
            return PlainTextResponse(str(exc), status_code=503)
        return PlainTextResponse("ready")

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/describe")
    async def describe() -> JSONResponse:
        try:
            description = admission.describe(include_token_map=False)
        except TeacherNotReady as exc:
            return JSONResponse({"error": str(exc)}, status_code=503)
        fields: dict[str, Any] = asdict(description)
        del fields["token_map"]
        fields["codecs"] = [codec.name.lower() for codec in description.codecs]
        return JSONResponse(fields)

    return app
