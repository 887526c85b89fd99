"""What is published about the messages is current, and enough to read them."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from controlplane.audit import publish_schemas
from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from schemas import bus, subjects
from tests.audit.tape import Tape
from tests.core.plane_helpers import prompt
from tests.schemas.samples import SAMPLES

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_the_published_schemas_are_current() -> None:
    """`python -m controlplane.audit.publish_schemas` makes them."""
    assert publish_schemas.stale() == []
    assert publish_schemas.main(["--check"]) == 0


def test_stale_files_are_named_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, changed and surplus ones."""
    publish_schemas.write(tmp_path)
    assert publish_schemas.stale(tmp_path) == []
    (tmp_path / "schemas" / "Old.json").write_text("{}")
    (tmp_path / "schemas" / "Drain.json").write_text("{}")
    (tmp_path / "asyncapi.yaml").unlink()
    wrong = publish_schemas.stale(tmp_path)
    assert wrong == ["asyncapi.yaml", "schemas/Drain.json", "schemas/Old.json"]
    publish_schemas.write(tmp_path)
    assert publish_schemas.stale(tmp_path) == []
    monkeypatch.setattr(publish_schemas, "stale", lambda: ["asyncapi.yaml"])
    assert publish_schemas.main(["--check"]) == 1
    assert "docs/asyncapi.yaml is not current" in capsys.readouterr().out


def test_every_message_of_the_bus_is_published() -> None:
    """Each class of the wire has a schema, and each field of the samples is in it."""
    files = publish_schemas.documents()
    classes = {
        value
        for value in vars(bus).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value is not bus.Message
    }
    assert {f"schemas/{cls.__name__}.json" for cls in classes} == {
        path for path in files if path.startswith("schemas/")
    }
    for _, variants in SAMPLES.values():
        for message in variants.values():
            schema = json.loads(files[f"schemas/{type(message).__name__}.json"])
            assert set(msgspec.to_builtins(message)) <= set(schema["properties"])


def test_what_docstrings_say_of_fields_is_at_the_fields() -> None:
    """Whoever reads a schema need not read Python."""
    files = publish_schemas.documents()
    routed = json.loads(files["schemas/Routed.json"])
    assert routed["description"] == "A request was sent to an instance."
    assert routed["properties"]["attempt"]["description"] == "0, or which retry this is, from 1."
    assert (
        "in the order of the filters. One that would leave nobody"
        in (
            json.loads(files["schemas/CandidateColumns.json"])["properties"]["excluded"][
                "description"
            ]
        )
    )
    level = json.loads(files["schemas/PrefixLevel.json"])
    assert [item["title"] for item in level["prefixItems"]] == ["depth_blocks", "key", "following"]


async def followed(example: str, address: list[str], server: EmbeddedNats) -> list[str]:
    """Run an example while two requests are decided; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(EXAMPLES / example), *address, "2"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 20.0) == b"following\n"
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.ask(1, 2, 3, name="first")
    tape.ask(9, name="second")
    connection = await NatsBus.connect(server.url)
    for record in tape.records:
        connection.publish(record.subject, record.payload)
    await connection.flush()
    output, _ = await asyncio.wait_for(process.communicate(), 20.0)
    await connection.close()
    return output.decode().splitlines()


@pytest.mark.live
@pytest.mark.slow
async def test_the_example_follows_decisions() -> None:
    """A reader that knows only the documents sees names and scores as the router did."""
    async with EmbeddedNats() as server:
        lines = await followed("follow.py", [server.url], server)
    assert lines[:3] == [
        "first -> a score 21",
        "    a: P 21 x (B 0 + 1) = 21",
        "    b: P 53 x (B 0 + 1) = 53",
    ]
    assert lines[3].startswith("second -> ")


@pytest.mark.live
@pytest.mark.slow
async def test_the_plain_protocol_is_enough() -> None:
    """A socket and a page of code read the same decisions: no library of NATS or msgpack."""
    async with EmbeddedNats() as server:
        address = server.url.removeprefix("nats://").split(":")
        lines = await followed("plain.py", address, server)
    assert lines[0] == "first -> a: 32 of 53 tokens cached, by router-a"
    assert lines[1] == "first ended: ok"
    assert lines[2].startswith("second -> ")


def test_the_examples_use_nothing_of_ours() -> None:
    """What they import is the standard library, a client of NATS and msgpack; or nothing at all."""
    allowed = {"follow.py": {"nats", "msgpack"}, "plain.py": set[str]()}
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(allowed)
    for name, foreign in allowed.items():
        tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
        modules = {
            module.split(".")[0]
            for node in ast.walk(tree)
            for module in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert modules - sys.stdlib_module_names == foreign


def messages_of(text: str) -> Iterator[Any]:
    """Yield every message that a document describes."""
    for channel in yaml.safe_load(text)["channels"].values():
        yield from channel["messages"].values()


def test_the_document_leads_to_every_schema_it_names() -> None:
    """AsyncAPI's references are files that are there, and its channels are the bus's subjects."""
    text = publish_schemas.documents()["asyncapi.yaml"]
    document = yaml.safe_load(text)
    assert document["asyncapi"] == "3.0.0"
    for message in messages_of(text):
        assert (publish_schemas.ROOT / message["payload"]["$ref"]).is_file()
    addresses = {channel["address"] for channel in document["channels"].values()}
    assert "mp.v1.route.{model}.{router}" in addresses
    for subject in (subjects.kv("m", "i"), subjects.route("m", "r"), subjects.hotspot("m")):
        assert any(
            re.fullmatch(re.sub(r"\\{\w+\\}", "[^.]+", re.escape(address)), subject)
            for address in addresses
        )


def test_what_the_document_refers_to_is_explained() -> None:
    """Pages and their sections exist."""
    text = publish_schemas.documents()["asyncapi.yaml"]
    for page, section in set(re.findall(r"see docs/(\w+\.md), ([\w ]+)\.", text)):
        assert f"## {section}" in (publish_schemas.ROOT / page).read_text(encoding="utf-8")
