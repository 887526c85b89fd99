"""The plane of `compose.yaml` on a Docker engine, under a project name and on ports of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from testcontainers.compose import DockerCompose

from controlplane.http_client import HttpClient, HttpError
from tests.live.chaos_rig import Reply, Traffic, eventually

ROOT = Path(__file__).parents[2]
INSTANCES = ("engine-1", "engine-2", "engine-3")
HEALED_S_MAX = 60.0  # includes the pause before a restart policy acts, and NATS' own start


def docker(*arguments: str) -> str:
    """Run the docker client and return what it prints; fail with what it complains about."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def free_port() -> int:
    """Return a port of this host that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ComposeStack:
    """Brings the stack up and down, and says what runs in it.

    Attributes:
        ports: of the services that publish one.
    """

    def __init__(self) -> None:
        self.project = f"mp-test-{secrets.token_hex(4)}"
        self.ports = {name: free_port() for name in ("balancer", "dashboard", "grafana")}
        self._environment = {
            "COMPOSE_PROJECT_NAME": self.project,
            "MULTIPLANE_PORT": str(self.ports["balancer"]),
            "DASHBOARD_PORT": str(self.ports["dashboard"]),
            "GRAFANA_PORT": str(self.ports["grafana"]),
            "PIP_NO_INDEX": "1" if any((ROOT / "deploy" / "wheels").glob("*.whl")) else "",
        }
        self._compose = DockerCompose(ROOT, wait=True)

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://127.0.0.1:{self.ports['balancer']}"

    def _enter(self) -> None:
        """Say which project is meant; Compose reads it from the environment."""
        os.environ |= self._environment

    def up(self) -> None:
        """Build the images and start everything; return once all that is asked how it is is well.

        Raises:
            AssertionError: something is not; holds what everybody said.
        """
        self._enter()
        try:
            for service in ("credentials", "predictor"):  # the second's begins as the first's
                self.compose("build", service)
            self._compose.start()
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"{self.compose('ps', '-a')}\n{self.logs()}") from error

    def down(self) -> None:
        """End everything and remove it, with its volumes."""
        self._enter()
        self._compose.stop()

    def compose(self, *arguments: str) -> str:
        """Run `docker compose`."""
        self._enter()
        return docker("compose", *arguments)

    def containers(self, service: str = "", *, stopped: bool = False) -> list[str]:
        """Return the ids of the containers, of one service or of all."""
        wanted = [f"label=com.docker.compose.project={self.project}"]
        wanted += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [word for each in wanted for word in ("--filter", each)]
        return docker("ps", "-q", *(["-a"] if stopped else []), *filters).split()

    def inspect(self, *containers: str) -> list[dict[str, Any]]:
        """Return what the engine knows of containers."""
        found: list[dict[str, Any]] = json.loads(docker("inspect", *containers))
        return found

    def address(self, container: str) -> str:
        """Return the address of a container on the plane's network."""
        networks = self.inspect(container)[0]["NetworkSettings"]["Networks"]
        address: str = networks[f"{self.project}_default"]["IPAddress"]
        return address

    def logs(self) -> str:
        """Return what everybody said last."""
        return self.compose("logs", "--no-color", "--tail", "15")

    # --- what the plane says of itself

    async def routers_see(self, http: HttpClient) -> dict[str, dict[str, str]]:
        """Return each router's trust in each instance that it would use, by router's container."""
        seen = {}
        for container in self.containers("router"):
            url = f"http://{self.address(container)}:8001/debug/state"
            try:
                models = (await http.get(url))["models"]
            except HttpError as error:
                seen[container] = {"": str(error)}
                continue
            instances = [each for model in models.values() for each in model["instances"]]
            seen[container] = {
                each["instance"]: each["trust"]
                for each in instances
                if each["state"] == "ready" and not each["breaker_open"]
            }
        return seen

    async def healed(self, within_s: float = HEALED_S_MAX) -> None:
        """Wait until every router trusts every instance."""

        async def look() -> list[dict[str, str]]:
            return list((await self.routers_see(http)).values())

        wanted = dict.fromkeys(INSTANCES, "exact")
        async with HttpClient(5.0) as http:
            count = len(self.containers("router"))
            await eventually(look, [wanted] * count, "every router trusts all", within_s)

    def metric(self, container: str, name: str, port: int) -> float:
        """Return the sum of a container's metric over its labels; 0 if it does not answer yet."""
        url = f"http://{self.address(container)}:{port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=5.0) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        ours = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in ours)

    def detectors(self) -> dict[bool, list[str]]:
        """Return the containers of detectors, by whether they say that they lead."""
        found: dict[bool, list[str]] = {True: [], False: []}
        for container in self.containers("detector"):
            leads = self.metric(container, "multiplane_detector_leading", 9100) > 0
            found[leads].append(container)
        return found

    @asynccontextmanager
    async def steady(
        self, may_fail: Callable[[Reply], bool] = lambda reply: False, *, after: int = 80
    ) -> AsyncIterator[Traffic]:
        """Steady traffic through the balancer around a fault: inject it inside.

        Afterwards every request has been answered, but for those that may fail, and every router
        trusts every instance.
        """
        flow = Traffic("127.0.0.1", self.ports["balancer"], 25.0, 8)
        try:
            await flow.answered(40)
            yield flow
            await flow.answered(after, within_s=60.0)
        finally:
            await flow.stop()
        wrong = [reply for reply in flow.replies if not (reply.ok or may_fail(reply))]
        assert not wrong, f"{len(wrong)} of {len(flow.replies)}: {wrong[:3]}\n{self.logs()}"
        await self.healed()
