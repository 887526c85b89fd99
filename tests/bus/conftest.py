"""Worlds for the bus tests: in memory, and on real servers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from controlplane.bus.embedded import EmbeddedNats
from tests.bus.container_nats import ContainerNats
from tests.bus.worlds import MemoryWorld, NatsWorld, World

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmbeddedNats]:
    """One nats-server for all tests that do not hurt it; who needs it starts it."""
    server = EmbeddedNats()
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def shared_container() -> Iterator[ContainerNats]:
    """The same in a container, of the image that is deployed."""
    server = ContainerNats()
    yield server
    asyncio.run(server.stop())


WORLDS = [
    "memory",
    pytest.param("nats", marks=pytest.mark.live),
    pytest.param("container", marks=pytest.mark.docker),
]


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world that outlives the test: names in it must be the test's own."""
    if request.param == "memory":
        world: World = MemoryWorld()
    elif request.param == "container":
        container = request.getfixturevalue("shared_container")
        world = NatsWorld(await container.start(), shared=True)
    else:
        server = request.getfixturevalue("shared_server")
        world = NatsWorld(await server.start(), shared=True)
    yield world
    await world.close()


@pytest.fixture(params=WORLDS)
async def fragile_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world of the test's own, which it may cut and heal."""
    if request.param == "memory":
        world: World = MemoryWorld()
    elif request.param == "container":
        world = NatsWorld(await ContainerNats().start(), shared=False)
    else:
        world = NatsWorld(await EmbeddedNats().start(), shared=False)
    yield world
    await world.close()


@pytest.fixture
def own() -> str:
    """A token that no other test uses."""
    return f"t{next(_numbers)}"
