"""Every metric that routers, sidecars and services export, gathered from running ones."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from controlplane.bus import MemoryBroker
from controlplane.core.coalesce import CoalesceConfig
from controlplane.core.detector import DetectorConfig
from controlplane.core.queue_lines import QueueConfig
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.metrics import describe
from controlplane.detector.service import DetectorService
from controlplane.exporter import Exporter as ServiceExporter
from controlplane.exporter import Family
from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.metrics import describe as describe_predictor
from controlplane.predictor.service import PredictorService
from router.config import RouterConfig
from router.metrics import PREFIX
from router.supervisor import Supervisor
from router.supervisor_admin import SupervisorAdmin
from router.upstream import UpstreamPool
from sidecar.exporter import Exporter as SidecarExporter
from tests.bus.worlds import eventually
from tests.detector.rig import MODEL, PretendedRouter
from tests.lab.server_helpers import serving
from tests.router.service_rig import ServiceRig, until
from tests.sidecar.service_helpers import sidecar_of

_TENANTS = "[tenants.default]\nrequests_max = 8\ntokens_per_s = 1000\n"


class Exported(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        source: `router`, `sidecar`, `detector` or `predictor`.
        name: of its samples; without the suffixes of histograms.
        labels: names, in order; `le` of histograms left out.
    """

    source: str
    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


async def exported(folder: Path) -> list[Exported]:
    """Return every metric, by source and name.

    Args:
        folder: for files that the processes need.
    """
    found = await router_metrics(folder)
    for others in (sidecar_metrics, detector_metrics, predictor_metrics):
        found += await others()
    return sorted(found, key=lambda each: (each.source, each.name))


def pages(metrics: list[Exported]) -> dict[str, Exported]:
    """Return metrics by each name that queries can use."""
    named = {}
    for each in metrics:
        suffixes = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        for suffix in suffixes:
            named[each.name + suffix] = each
    return named


async def router_metrics(folder: Path) -> list[Exported]:
    """Return those of a router that does everything it can be told to do, and of a supervisor."""
    tenants = folder / "tenants.toml"
    tenants.write_text(_TENANTS)
    settings = {
        "access_log": str(folder / "access.log"),
        "tenants_path": str(tenants),
        "otlp_endpoint": "http://127.0.0.1:9",
        "otlp_share": 0.0,
        "queue": QueueConfig("fcfs"),
        "coalesce": CoalesceConfig(),
    }
    async with ServiceRig(settings, batch_cap=8) as rig:
        await rig.instance("a")
        await rig.chat("one two three")
        page = await fetch(f"{rig.admin}/metrics")
        metrics = rig.process.metrics
        labels = {PREFIX + each.name: each.labels for each in metrics.tallies}
        for sample in rig.process._samples():
            labels[_bare(PREFIX + sample.name)] = sample.labels
    supervisor = SupervisorAdmin(Supervisor(RouterConfig("memory://"), 1), UpstreamPool())
    return [*_parsed("router", page + supervisor._own_metrics(1), labels)]


async def sidecar_metrics() -> list[Exported]:
    """Return those of a sidecar beside an engine that has computed something."""
    broker = MemoryBroker()
    async with (
        serving(num_blocks=129, max_model_len=2000) as client,
        sidecar_of(client.url, bus := broker.bus()) as service,
    ):
        await eventually(lambda: service.state == "ready")
        body = {"model": "tiny", "prompt": list(range(300)), "max_tokens": 2, "ignore_eos": True}
        await client.ok("/v1/completions", body)
        feeds = [each.feed for each in service.instances]
        await eventually(lambda: all(feed and len(feed.mirror) > 5 for feed in feeds))
        exporter = SidecarExporter(service, bus, "127.0.0.1", 0)
        try:
            page = await fetch(f"http://127.0.0.1:{exporter.port}/metrics")
        finally:
            exporter.close()
    return [*_parsed("sidecar", page, {})]


async def detector_metrics() -> list[Exported]:
    """Return those of a detector that has raised a verdict."""
    broker = MemoryBroker()
    router = await PretendedRouter(broker.bus()).start()
    config = DetectorServiceConfig(detector_id="a", detector=DetectorConfig(requests_min=3))
    service = DetectorService(broker.bus(), config)
    await service.start()
    await until(lambda: service.leading)
    router.ask(4, prompt_tokens=100, hit_tokens=75)
    await until(router.barred)
    assert list(service.models) == [MODEL]
    families = describe(service)
    await service.stop()
    return await _shown("detector", families)


async def predictor_metrics() -> list[Exported]:
    """Return those of a predictor that has seen requests."""
    broker = MemoryBroker()
    router = await PretendedRouter(broker.bus()).start()
    service = PredictorService(broker.bus(), PredictorConfig())
    await service.start()
    await until(lambda: service.leading)
    router.ask(4, prompt_tokens=100, hit_tokens=75)
    await until(lambda: MODEL in service.models)
    families = describe_predictor(service)
    await service.stop()
    return await _shown("predictor", families)


async def _shown(source: str, families: list[Family]) -> list[Exported]:
    """Return a service's metrics as its page shows them."""
    exporter = ServiceExporter("127.0.0.1", 0)
    try:
        exporter.show(families)
        page = await fetch(f"http://127.0.0.1:{exporter.port}/metrics")
    finally:
        exporter.close()
    return [*_parsed(source, page, {each.name: each.labels for each in families})]


def _parsed(source: str, page: str, labels: dict[str, tuple[str, ...]]) -> Iterator[Exported]:
    """Yield the metrics of a page; labels that no sample shows are as told."""
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        seen = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        seen.pop("le", None)
        known = labels.get(family.name)
        assert known is None or not seen or set(seen) == set(known), (name, seen, known)
        told = tuple(seen) if known is None else known
        yield Exported(source, name, family.type, family.documentation, told)


def _bare(name: str) -> str:
    return re.sub("_total$", "", name)


async def fetch(url: str) -> str:
    """Return a page."""

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(ask)
