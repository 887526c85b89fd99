"""The comparison with peers: short, so that it cannot rot; it must notice a missed bar."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from bench import proxy
from bench.proxy import QUICK, Numbers, ratios, run, summary
from bench.proxy_targets import BARE, FULL, built_in_targets, read_targets

PLAIN = Numbers(**dict.fromkeys(Numbers.__struct_fields__, 100.0))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_whole_router_is_measured_over_nats() -> None:
    """A little load is answered in full by the router and by the data plane alone, and costs."""
    found = await run([FULL, BARE], 1, QUICK)
    for numbers in (summary(found[FULL.name]), summary(found[BARE.name])):
        assert numbers.errors == 0
        assert numbers.request_us > 0
        assert numbers.stream_us > 0
        assert numbers.start_mib > 1


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_compares_with_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one JSON document; its status tells of missed bars, and of nothing to compare."""
    monkeypatch.setattr(proxy, "built_in_targets", lambda: (_without_rust(), ["rust: left out"]))
    monkeypatch.setattr("sys.argv", ["proxy", "--quick", "--json", "--rounds", "1"])
    with pytest.raises(SystemExit) as ended:
        proxy.main()
    document = json.loads(capsys.readouterr().out)
    assert document["ours"] == FULL.name
    assert document["missing"] == ["rust: left out"]
    peers = ["haproxy"] * 2 if shutil.which("haproxy") else []
    assert [bar["peer"] for bar in document["bars"]] == peers
    judged = 0 if all(bar["met"] for bar in document["bars"]) else 1
    assert ended.value.code == (judged if peers else 2)


def _without_rust() -> list[proxy.Target]:
    return [each for each in built_in_targets()[0] if each.name in (FULL.name, "haproxy")]


def test_a_missed_bar_is_found() -> None:
    """Each bar compares with its peer; the best of the Rust routers is the one with the least."""
    table = {
        FULL.name: msgspec.structs.replace(PLAIN, stream_us=80.0),
        "haproxy": msgspec.structs.replace(PLAIN, request_us=39.0),
        "vllm-router round_robin": msgspec.structs.replace(PLAIN, request_us=167.0),
        "vllm-router cache_aware": msgspec.structs.replace(PLAIN, stream_us=120.0),
    }
    met = {(line["number"], line["peer"]): line["met"] for line in ratios(table, FULL.name)}
    assert met == {
        ("request_us", "vllm-router round_robin"): True,
        ("request_us", "vllm-router cache_aware"): False,
        ("request_us", "haproxy"): False,
        ("stream_us", "haproxy"): True,
        ("stream_us", "best Rust LLM router"): False,
    }
    assert not ratios({FULL.name: PLAIN}, FULL.name)


def test_of_rounds_the_least_cpu_time_counts_and_every_error() -> None:
    """Whatever disturbs a round makes it dearer, so the least of them is nearest the truth."""
    rounds = [
        msgspec.structs.replace(PLAIN, request_us=us, added_p50_us=us, errors=1.0)
        for us in (90.0, 300.0, 80.0)
    ]
    settled = summary(rounds)
    assert (settled.request_us, settled.added_p50_us, settled.errors) == (80.0, 90.0, 3.0)


def test_targets_of_a_file_come_first(tmp_path) -> None:
    """A file may name any server; one that asks for a bus is given one."""
    path = tmp_path / "mine.json"
    path.write_text('[{"name": "mine", "argv": ["serve", "--bus={bus}", "{port}"]}]')
    (mine,) = read_targets(str(path))
    assert mine.wants_bus
    assert not BARE.wants_bus
