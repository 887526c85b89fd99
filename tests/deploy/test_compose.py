"""The stack of `compose.yaml`, from nothing: it answers, whatever is killed, and scales."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.deploy.compose_stack import ROOT, ComposeStack, docker
from tests.live.chaos_rig import Reply, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(420)]


def chat(stack: ComposeStack, text: str) -> list[tuple[float, dict[str, object]]]:
    """Ask through the balancer; return each event of the stream with when it came."""
    body = {
        "model": "tiny",
        "stream": True,
        "max_tokens": 24,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": text}],
    }
    request = Request(
        f"{stack.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    events = []
    with urlopen(request, timeout=30.0) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [(time.monotonic(), line.strip()) for line in answer]
    assert lines[-2][1] == b"data: [DONE]", lines[-3:]
    for came_s, line in lines:
        if line.startswith(b"data: {"):
            events.append((came_s, json.loads(line.removeprefix(b"data: "))))
    return events


def fetch(url: str) -> Any:
    """Return the JSON at a URL."""
    with urlopen(url, timeout=5.0) as answer:
        return json.load(answer)


class Casualties:
    """The replies that a kill may break: those begun before it. Nobody's until `kill`."""

    def __init__(self) -> None:
        self._killed_s = 0.0

    async def kill(self, container: str) -> None:
        """Kill a container as `docker kill` does, which no restart policy answers."""
        await asyncio.to_thread(docker, "kill", container)
        self._killed_s = time.monotonic()

    def __call__(self, reply: Reply) -> bool:
        """Whether a reply's stream broke off, and may have."""
        return reply.broke and reply.began_s <= self._killed_s


async def test_it_answers(stack: ComposeStack) -> None:
    """A chat is streamed through the balancer token by token, and every router trusts everybody."""
    await stack.healed()
    events = await asyncio.to_thread(chat, stack, "Hello")
    assert len(events) >= 24
    spread_s = events[-1][0] - events[0][0]
    assert spread_s > 0.1, "the stream came at once: somebody holds it back"


async def test_prefixes_are_found_again(stack: ComposeStack) -> None:
    """The doctor finds nothing wrong: tokens, keys and hits are the engines' own."""
    said = await asyncio.to_thread(
        stack.compose, "run", "--rm", "--no-deps", "bus-init", "doctor", "--admin",
        "http://router:8001",
    )  # fmt: skip
    assert "✗" not in said
    assert said.count("✓") > 3


async def test_a_router_is_killed(stack: ComposeStack) -> None:
    """Streams that it was sending break off; nothing else fails, and it comes back."""
    casualties = Casualties()
    async with stack.steady(casualties) as flow:
        victim = stack.containers("router")[0]
        await casualties.kill(victim)
        await flow.answered(100)
        await asyncio.to_thread(docker, "start", victim)


async def test_an_instance_is_killed(stack: ComposeStack) -> None:
    """Streams that it was sending break off; the others take over."""
    casualties = Casualties()
    async with stack.steady(casualties) as flow:
        (victim,) = stack.containers("engine-2")
        await casualties.kill(victim)
        await flow.answered(100)
        await asyncio.to_thread(docker, "start", victim)


async def test_a_sidecar_is_killed(stack: ComposeStack) -> None:
    """Nobody notices."""
    async with stack.steady() as flow:
        (victim,) = stack.containers("sidecar-1")
        await asyncio.to_thread(docker, "kill", victim)
        await flow.answered(100)
        await asyncio.to_thread(docker, "start", victim)


async def test_nats_is_killed(stack: ComposeStack) -> None:
    """Requests do not pass through it: nobody notices."""
    async with stack.steady() as flow:
        (victim,) = stack.containers("nats")
        await asyncio.to_thread(docker, "kill", victim)
        await flow.answered(200)
        await asyncio.to_thread(docker, "start", victim)


async def test_the_leading_detector_is_killed(stack: ComposeStack) -> None:
    """The other one leads within seconds, under traffic that does not notice."""
    await until(lambda: len(stack.detectors()[True]) == 1, 30.0, "one detector leads")
    async with stack.steady() as flow:
        (leader,) = stack.detectors()[True]
        (standby,) = stack.detectors()[False]
        await asyncio.to_thread(docker, "kill", leader)
        await until(lambda: stack.detectors()[True] == [standby], 30.0, "the standby leads")
        await flow.answered(40)
        await asyncio.to_thread(docker, "start", leader)


@pytest.mark.parametrize("service", ["sidecar-3", "router", "nats"])
async def test_what_crashes_is_started_again(stack: ComposeStack, service: str) -> None:
    """The restart policy answers a crash: nobody has to."""
    container = stack.containers(service)[0]
    state = stack.inspect(container)[0]
    os.kill(state["State"]["Pid"], signal.SIGKILL)
    await until(
        lambda: (
            stack.inspect(container)[0]["RestartCount"] > state["RestartCount"]
            and stack.inspect(container)[0]["State"]["Running"]
        ),
        30.0,
        f"{service} runs again",
    )
    await stack.healed()


async def test_routers_are_scaled(stack: ComposeStack) -> None:
    """From two to four, each of which gets requests, and down to one: no request fails."""

    async def scale(count: int) -> None:
        await asyncio.to_thread(
            stack.compose, "up", "-d", "--no-deps", "--no-recreate", "--scale", f"router={count}",
            "router",
        )  # fmt: skip

    def all_have_answered() -> bool:
        counts = [
            stack.metric(router, "multiplane_requests_total", 8001)
            for router in stack.containers("router")
        ]
        return len(counts) == 4 and min(counts) > 0

    async with stack.steady() as flow:
        await scale(4)
        await until(all_have_answered, 60.0, "all four routers answer")
        await flow.answered(40)
        await scale(1)
        await flow.answered(100)
        assert len(stack.containers("router")) == 1
        await scale(2)


async def test_prometheus_sees_everybody(stack: ComposeStack) -> None:
    """Each service is scraped, replicas too, and the alarms are loaded."""
    (prometheus,) = stack.containers("prometheus")
    url = f"http://{stack.address(prometheus)}:9090/api/v1"

    def look() -> dict[str, int]:
        targets = fetch(f"{url}/targets")["data"]["activeTargets"]
        jobs = [each["labels"]["job"] for each in targets if each["health"] == "up"]
        return {job: jobs.count(job) for job in jobs}

    wanted = {"router": 2, "detector": 2, "sidecar": 3, "engine": 3}
    wanted |= {"balancer": 1, "predictor": 1}
    await until(lambda: look() == wanted, 60.0, f"Prometheus scrapes {wanted}")
    (groups,) = (await asyncio.to_thread(fetch, f"{url}/rules"))["data"].values()
    assert {"multiplane-hotspots", "multiplane-plane"} <= {group["name"] for group in groups}


def test_the_published_pages_answer(stack: ComposeStack) -> None:
    """The dashboard shows the plane, and Grafana is well."""
    for name, path in (("dashboard", "/"), ("grafana", "/api/health")):
        with urlopen(f"http://127.0.0.1:{stack.ports[name]}{path}", timeout=10.0) as answer:
            assert answer.status == 200


def test_every_profile_is_read(stack: ComposeStack) -> None:
    """With real GPUs: each engine shares its network with a sidecar, and neither holds it."""
    config = json.loads(stack.compose("--profile", "gpu", "config", "--format", "json"))
    services = config["services"]
    for number in ("1", "2"):
        space = f"service:gpu-{number}"
        assert services[f"vllm-{number}"]["network_mode"] == space
        assert services[f"gpu-sidecar-{number}"]["network_mode"] == space
    assert ROOT.joinpath("deploy/compose/members.toml").read_text().count("gpu-2") == 1


async def test_it_leaves_nothing_behind() -> None:
    """Down is down: no container, no volume and no network is left."""
    stack = ComposeStack()
    await asyncio.to_thread(stack.compose, "up", "-d", "--wait", "nats")
    mine = f"label=com.docker.compose.project={stack.project}"
    assert stack.containers()
    await asyncio.to_thread(stack.down)
    assert not stack.containers(stopped=True)
    assert not docker("volume", "ls", "-q", "--filter", mine)
    assert not docker("network", "ls", "-q", "--filter", mine)
