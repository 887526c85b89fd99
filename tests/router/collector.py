"""An OpenTelemetry collector, as far as tests need one."""

from __future__ import annotations

from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.router.service_rig import until


class Collector:
    """An OTLP receiver; an async context manager.

    Attributes:
        spans: received, in order.
        resources: attributes of what sent them, by name.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: dict[str, str] = {}
        self.status = 200

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        if self.status == 200:
            message = ExportTraceServiceRequest.FromString(await request.read())
            for of_resource in message.resource_spans:
                for each in of_resource.resource.attributes:
                    self.resources[each.key] = each.value.string_value
                self.spans += [span for of in of_resource.scope_spans for span in of.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
            status=self.status,
        )

    def named(self, name: str) -> list[Any]:
        """Return the spans of a name."""
        return [span for span in self.spans if span.name == name]

    async def whole(self, name: str, count: int = 1) -> Any:
        """Return the spans of requests to this endpoint, once there are so many."""
        await until(lambda: len(self.named(name)) >= count)
        return self.named(name)


def said(span: Any) -> dict[str, Any]:
    """Return a span's attributes."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }
