"""What `bench.proxy` compares: how each router is started, as templates.

A target is data, so that any other server can be measured beside the built-in ones:

    python -m bench.proxy --targets mine.json

where the file holds a list of objects with `name`, `argv` and, if needed, `env` and `files`. In
all texts `{port}` stands for the port to listen on, `{port2}` for another free
one, `{dir}` for a folder of the target's own, in which `files` (name to content) are written first,
`{engines}` for `host:port,host:port`, and `{python}` for this interpreter. `{bus}` stands for the
URL of a new NATS server that is started for this target alone, and not counted as part of it. An
argument that is `{engine_urls}` alone becomes one argument an engine. The first target of the file
is taken for ours, to which the bars apply.
"""

from __future__ import annotations

import shutil
from typing import Final

import msgspec

from bench.peers_env import PeersUnavailable, peers_python


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server to be measured.

    Fields:
        name: what the report calls it.
        argv: the command, a template.
        env: variables added to the environment, templates.
        files: configuration files, name to template.
    """

    name: str
    argv: list[str]
    env: dict[str, str] = {}
    files: dict[str, str] = {}

    @property
    def wants_bus(self) -> bool:
        """Whether it needs a NATS server."""
        return any("{bus}" in text for text in (*self.argv, *self.env.values()))


FULL: Final = Target(
    "multiplane router",
    [
        *("{python}", "-m", "bench.router_alone", "--bus", "{bus}"),
        *("--port", "{port}", "--engines", "{engines}"),
    ],
)
"""Policy `multiplicative`, KV index filled, metrics and route events on: what the bars judge."""

BARE: Final = Target(
    "multiplane data plane",
    ["{python}", "-m", "bench.proxy_bare", "--port", "{port}", "--engines", "{engines}"],
)

FLOOR: Final = Target(
    "floor of python",
    ["{python}", "-m", "bench.proxy_floor", "--port", "{port}", "--engines", "{engines}"],
)
"""A relay with nothing in it: what of the costs is uvloop's reading and writing; has no bars."""

# One thread each, as our router is one process: CPU time is compared, not parallelism.
_HAPROXY: Final = """
global
    nbthread 1
    maxconn 8192
defaults
    mode http
    timeout connect 5s
    timeout client 600s
    timeout server 600s
    http-reuse always
frontend clients
    bind 127.0.0.1:{port}
    default_backend engines
backend engines
    balance roundrobin
{servers_haproxy}
"""
_NGINX: Final = """
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {dir}/nginx.pid;
error_log {dir}/error.log error;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {dir}/body;
    proxy_temp_path {dir}/proxy;
    fastcgi_temp_path {dir}/fastcgi;
    uwsgi_temp_path {dir}/uwsgi;
    scgi_temp_path {dir}/scgi;
    keepalive_requests 1000000;
    keepalive_timeout 600s;
    upstream engines {{
{servers_nginx}
        keepalive 512;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
            client_max_body_size 64m;
            client_body_buffer_size 128k;
        }}
    }}
}}
"""


def built_in_targets() -> tuple[list[Target], list[str]]:
    """Return the built-in targets that can be started here, and why the others cannot."""
    targets, missing = [FULL, BARE, FLOOR], []
    for name, binary, argv, files in (
        ("haproxy", "haproxy", ["-db", "-f", "{dir}/haproxy.cfg"], {"haproxy.cfg": _HAPROXY}),
        ("nginx", "nginx", ["-c", "{dir}/nginx.conf", "-p", "{dir}"], {"nginx.conf": _NGINX}),
    ):
        if (path := shutil.which(binary)) is None:
            missing.append(f"{name}: no `{binary}` on the path; apt-get install {binary}")
        else:
            targets.append(Target(name, [path, *argv], files=files))
    try:
        targets += _rust_routers(str(peers_python()))
    except PeersUnavailable as error:
        missing.append(f"vllm-router, sglang-router: {error}")
    return targets, missing


def _rust_routers(python: str) -> list[Target]:
    """Return the peer routers, with as little logging as they can do."""
    options = ["--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{port2}"]
    options += ["--worker-urls", "{engine_urls}", "--log-level"]
    vllm = [python, "-m", "vllm_router.launch_router", *options, "error", "--policy"]
    sglang = [python, "-m", "sglang_router.launch_router", *options, "error", "--policy"]
    return [
        Target("vllm-router round_robin", [*vllm, "round_robin"]),
        Target("vllm-router cache_aware", [*vllm, "cache_aware"]),
        Target("sglang-router round_robin", [*sglang, "round_robin"]),
        Target("sglang-router cache_aware", [*sglang, "cache_aware"]),
    ]


def read_targets(path: str) -> list[Target]:
    """Read targets from a JSON file.

    Raises:
        msgspec.ValidationError: it does not hold a list of targets.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=list[Target])
