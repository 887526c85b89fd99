"""What docs/router.md shows is what the code takes and gives."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from router.access_log import Entry
from router.keys import parse_keys
from router.surface import ENDPOINTS
from router.tenants import Tenant, parse_tenants
from tests.router.service_rig import ServiceRig

PAGE = (Path(__file__).parents[2] / "docs" / "router.md").read_text()


QUEUEING = (Path(__file__).parents[2] / "docs" / "queueing.md").read_text()


def block(language: str, page: str = PAGE) -> str:
    """Return the first code block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_files_are_read() -> None:
    """Both can be copied as they stand, and every field of a tenant is explained."""
    acme = parse_tenants(block("toml"))["acme"]
    assert acme.models == {"llama", "fr"}
    fields = {field for field in Tenant.__struct_fields__ if field != "name"}
    assert all(f"{field} = " in block("toml") for field in fields)
    assert len(parse_keys(block(""))) == 3
    queueing = parse_tenants(block("toml", QUEUEING))
    assert queueing["agents"].degrade_model == "small"


def test_every_endpoint_and_log_field_is_in_its_table() -> None:
    """Nobody has to read the code for a path or a field."""
    for path in ENDPOINTS:
        assert path.decode() in PAGE or path.endswith(b"/render"), path
    for field in msgspec.structs.fields(Entry):
        assert f"`{field.name}`" in PAGE, field.name


@pytest.mark.slow
async def test_the_metrics_that_are_named_exist() -> None:
    """Names in the table are those of a router that has served a request."""
    lines = PAGE[PAGE.index("## Metrics") :].splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    named = set(re.findall(r"`([a-z_0-9]+)(?:\{[a-z,]*\})?`", table))
    async with ServiceRig() as rig:
        await rig.instance("a")
        await rig.chat("one two three")
        page = rig.process.metrics.render().decode()
    told = set(re.findall(r"^# TYPE multiplane_(\w+)", page, re.MULTILINE))
    apart = {"multiplane_", "worker", "workers", "worker_restarts_total", "messages", "responses"}
    apart |= {"tenant_tokens_available", "request_retries_total", "trace_spans_total"}
    assert named - apart <= told, named - apart - told
