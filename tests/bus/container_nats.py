"""A nats-server in a container, with the face of `EmbeddedNats` as far as a world needs it."""

from __future__ import annotations

import asyncio
import socket

from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

IMAGE = "nats:2.15.1-alpine"
READY = "Server is ready"


class ContainerNats:
    """Starts the image that `compose.yaml` names, with JetStream; it keeps its port and its files.

    Attributes:
        url: where clients find it.
    """

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self._container = (
            DockerContainer(IMAGE)
            .with_command(["--jetstream", "--store_dir", "/data"])
            .waiting_for(LogMessageWaitStrategy(READY).with_startup_timeout(30))
        )
        self._container.ports["4222/tcp"] = ("127.0.0.1", port)  # on loopback only
        self._begun = False

    async def start(self) -> ContainerNats:
        """Start it, or start it again with what it had stored."""
        if self._begun:
            await asyncio.to_thread(self._container.get_wrapped_container().start)
        else:
            await asyncio.to_thread(self._container.start)
            self._begun = True
        return self

    async def kill(self) -> None:
        """End it as a crash would."""
        await asyncio.to_thread(self._container.get_wrapped_container().kill)

    async def stop(self) -> None:
        """End it and remove the container with its files."""
        if self._begun:
            await asyncio.to_thread(self._container.stop)
