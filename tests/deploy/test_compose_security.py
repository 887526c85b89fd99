"""What the stack lets in, and what its parts may do."""

from __future__ import annotations

import json

import pytest

from tests.deploy.compose_stack import ComposeStack, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(420)]

PUBLISHED = {"balancer", "dashboard", "grafana"}

# Run in the image of the plane, on its network, with what a stranger or a member has.
TRY_BUS = """
import asyncio, sys
from controlplane.bus import BusError, NatsBus, NatsOptions
from schemas import subjects
async def main(user, password, subject):
    options = NatsOptions(user=user or None, password=password or None,
                          tls_ca="/run/secrets/bus/ca.pem")
    try:
        bus = await NatsBus.connect("nats://nats:4222", options=options, wait_s=5.0)
    except BusError as error:
        print("refused", str(error).lower())
        return
    if not bus.connected:
        print("no connection")
        return
    before = bus.stats().refused
    bus.publish(subject, b"forged")
    await bus.flush()
    print("forbidden" if bus.stats().refused > before else "let through")
    await bus.close()
asyncio.run(main(*sys.argv[1:]))
"""


def try_bus(stack: ComposeStack, service: str, user: str, password: str, subject: str) -> str:
    """Try to say something on the bus from a service's place; return what came of it."""
    if password == "own":
        password = stack.compose("exec", "-T", service, "cat", "/run/secrets/bus/password")
    return stack.compose(
        "exec", "-T", service, "python", "-c", TRY_BUS, user, password, subject
    )  # fmt: skip


def test_only_three_ports_are_published(stack: ComposeStack) -> None:
    """Balancer, dashboard and Grafana, on loopback; nothing else can be reached from outside."""
    published = {}
    for found in stack.inspect(*stack.containers()):
        bindings = found["NetworkSettings"]["Ports"] or {}
        for binding in (each for listed in bindings.values() for each in listed or []):
            service = found["Config"]["Labels"]["com.docker.compose.service"]
            published.setdefault(service, set()).add(binding["HostIp"])
    assert published == {service: {"127.0.0.1"} for service in PUBLISHED}


def test_nobody_else_has_a_way_out(stack: ComposeStack) -> None:
    """Everybody but those with a published port is on the inner network alone."""
    inner, edge = f"{stack.project}_default", f"{stack.project}_edge"
    assert json.loads(docker("network", "inspect", inner))[0]["Internal"] is True
    for found in stack.inspect(*stack.containers()):
        service = found["Config"]["Labels"]["com.docker.compose.service"]
        networks = {inner, edge} if service in PUBLISHED else {inner}
        assert set(found["NetworkSettings"]["Networks"]) == networks, service


def test_nobody_is_root(stack: ComposeStack) -> None:
    """Every process runs as a user of its own, without capabilities, on a read-only system."""
    containers = stack.containers(stopped=True)
    assert len(containers) >= 18
    for found in stack.inspect(*containers):
        name, host = found["Name"], found["HostConfig"]
        user = found["Config"]["User"].partition(":")[0]
        assert user.isdecimal(), name
        assert int(user) > 0, name
        assert host["ReadonlyRootfs"] is True, name
        assert host["CapDrop"] == ["ALL"], name
        assert not host["CapAdd"], name
        assert host["Privileged"] is False, name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert host["Memory"] > 0, name
        assert host["NanoCpus"] > 0, name
        assert host["PidsLimit"] > 0, name
    for container in stack.containers():
        rows = docker("top", container, "-eo", "pid,uid").splitlines()[1:]
        assert all(int(row.split()[1]) > 0 for row in rows), (container, rows)


def test_nats_refuses_strangers(stack: ComposeStack) -> None:
    """Nobody gets in without a name, with a wrong password, or with another's."""
    for user, password in (("", ""), ("operator", "guessed"), ("operator", "own")):
        said = try_bus(stack, "dashboard", user, password, "mp.v1.policy.tiny")
        assert said.startswith("refused"), (user, said)
        assert "authorization" in said, (user, said)


@pytest.mark.parametrize(
    ("service", "user", "subject", "outcome"),
    [
        ("sidecar-1", "sidecar-1", "mp.v1.load.tiny.engine-1", "let through"),
        ("sidecar-1", "sidecar-1", "mp.v1.load.tiny.engine-2", "forbidden"),
        ("sidecar-1", "sidecar-1", "mp.v1.policy.tiny", "forbidden"),
        ("router", "router", "mp.v1.kv.tiny.engine-1", "forbidden"),
        ("router", "router", "mp.v1.hotspot.tiny", "forbidden"),
        ("dashboard", "auditor", "mp.v1.policy.tiny", "forbidden"),
        ("detector", "detector", "mp.v1.kv.tiny.engine-1", "forbidden"),
        ("predictor", "predictor", "mp.v1.policy.tiny", "forbidden"),
    ],
)
def test_members_keep_to_their_role(
    stack: ComposeStack, service: str, user: str, subject: str, outcome: str
) -> None:
    """A member with its right password may say what its role says, and nothing else."""
    assert try_bus(stack, service, user, "own", subject) == outcome


def test_a_member_has_its_own_password_only(stack: ComposeStack) -> None:
    """No container holds another's, and none holds the secret that they come from."""
    seen = {}
    for service in ("sidecar-1", "sidecar-2", "router", "detector", "dashboard"):
        listed = stack.compose("exec", "-T", service, "ls", "/run/secrets/bus").split()
        assert sorted(listed) == ["ca.pem", "password"], service
        seen[service] = stack.compose("exec", "-T", service, "cat", "/run/secrets/bus/password")
    assert len(set(seen.values())) == len(seen)
    for found in stack.inspect(*stack.containers()):
        said = json.dumps([found["Config"]["Env"], found["Config"]["Cmd"], found["Args"]])
        assert not any(password in said for password in seen.values()), found["Name"]
