"""A pool of running vLLM servers, so that tests share starts and never caches."""

from tests.vllm.harness import VllmServer, VllmSpec, start_all
from tests.vllm.launch import Nursery

SERVERS_MAX = 8  # of 0.25 GiB each


class VllmFleet:
    """Lends servers to one test at a time, reset."""

    def __init__(self, nursery: Nursery, servers_max: int = SERVERS_MAX) -> None:
        """Keeps at most `servers_max` servers; the longest unused give way to others."""
        self._nursery = nursery
        self._servers_max = servers_max
        self._servers: list[VllmServer] = []  # least recently lent first

    def servers(self, *specs: VllmSpec) -> list[VllmServer]:
        """Returns a ready server with an empty cache for each spec, all different.

        Servers of earlier tests are used again; one that a test stopped or killed starts again.

        Raises:
            ValueError: More than `servers_max` are asked for.
            VllmError: One did not start.
        """
        if len(specs) > self._servers_max:
            raise ValueError(f"{len(specs)} servers asked for, {self._servers_max} are the most")
        lent: list[VllmServer] = []
        for spec in specs:
            lent.append(self._idle(spec, lent) or VllmServer(spec, self._nursery))
        self._servers = [server for server in self._servers if server not in lent] + lent
        while len(self._servers) > self._servers_max:
            self._servers.pop(0).kill()
        running = [server for server in lent if server.alive]
        start_all(server for server in lent if server not in running)
        for server in running:
            server.thaw()
            server.reset_prefix_cache()
        return lent

    def server(self, spec: VllmSpec | None = None) -> VllmServer:
        """Returns one ready server with an empty cache."""
        return self.servers(spec or VllmSpec())[0]

    def _idle(self, spec: VllmSpec, lent: list[VllmServer]) -> VllmServer | None:
        free = (s for s in self._servers if s.spec == spec and s not in lent)
        return next(free, None)
