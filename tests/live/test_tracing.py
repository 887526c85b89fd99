"""Traces of a plane of real processes, as the environment asks for them."""

from __future__ import annotations

import pytest

from lab.load import run_load
from lab.stack import LocalStack, StackOptions
from tests.audit.load import chats
from tests.router.collector import Collector, said
from tests.router.service_rig import until

pytestmark = [pytest.mark.live, pytest.mark.slow]


async def test_routers_send_traces_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every stage of every request, from a router process that was told nothing else."""
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with LocalStack(StackOptions(engines=2, routers=1)) as stack:
            answers = await run_load(stack.url, chats(6, 20.0))
            await until(lambda: len(collector.named("chat")) == len(answers))
    for name in ("tokenize", "decide", "upstream wait", "stream"):
        assert len(collector.named(name)) == len(answers)
    for own in collector.named("chat"):
        assert said(own)["multiplane.outcome"] == "ok"
        assert said(own)["gen_ai.usage.output_tokens"] > 0
