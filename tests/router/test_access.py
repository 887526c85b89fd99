"""Who may send requests, in whose name, as the files say at present."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.access import Access
from router.refusals import Refusal
from router.tenant_gate import TenantGate
from router.tenants import ConfigError

TENANTS = """
[tenants.acme]
requests_max = 2
[tenants.gateway]
trusted = true
"""
KEYS = "sk-acme acme\nsk-gate gateway\n"


class Asking:
    """A request, as far as `Access` looks at it."""

    def __init__(self, **headers: str) -> None:
        self._headers = {k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}

    def header(self, name: bytes) -> bytes | None:
        """Return a header's value."""
        return self._headers.get(name)


def who(access: Access, **headers: str) -> str:
    """Return the tenant of a request, or the status and reason of its refusal."""
    found = access.identify(Asking(**headers))  # type: ignore[arg-type]
    if isinstance(found, Refusal):
        return f"{found.status} {found.reason}"
    assert isinstance(found, TenantGate)
    return found.tenant.name


@pytest.fixture
def access(tmp_path: Path) -> Access:
    """Access by both files."""
    (tmp_path / "tenants.toml").write_text(TENANTS)
    (tmp_path / "keys").write_text(KEYS)
    made = Access(str(tmp_path / "keys"), str(tmp_path / "tenants.toml"))
    made.load(0.0)
    return made


def test_keys_tell_the_tenant(access: Access) -> None:
    """Both headers work; without a key, or with a wrong one, nobody comes in."""
    assert who(access, authorization="Bearer sk-acme") == "acme"
    assert who(access, x_api_key="sk-acme") == "acme"
    assert who(access) == "401 key"
    assert who(access, authorization="Bearer nope") == "401 key"


def test_only_the_trusted_may_name_another_tenant(access: Access) -> None:
    """A gateway speaks for its users; nobody else does."""
    gate = {"authorization": "Bearer sk-gate"}
    assert who(access, **gate) == "gateway"
    assert who(access, **gate, x_multiplane_tenant="acme") == "acme"
    assert who(access, **gate, x_multiplane_tenant="nobody") == "403 not_allowed"
    acme = {"authorization": "Bearer sk-acme"}
    assert who(access, **acme, x_multiplane_tenant="gateway") == "403 not_allowed"


def test_without_files_everybody_is_the_default() -> None:
    """No keys are asked for, and a header that means nothing here is none of our business."""
    open_to_all = Access()
    open_to_all.load(0.0)
    assert who(open_to_all) == "default"
    assert who(open_to_all, x_multiplane_tenant="acme") == "default"


def test_keys_alone_make_their_tenants(tmp_path: Path) -> None:
    """Without a tenants file each tenant that a key names exists, without limits."""
    (tmp_path / "keys").write_text(KEYS)
    access = Access(str(tmp_path / "keys"))
    access.load(0.0)
    assert who(access, authorization="Bearer sk-gate") == "gateway"
    assert {gate.tenant.name for gate in access.gates} == {"default", "acme", "gateway"}


def test_a_reload_keeps_what_is_in_use(access: Access, tmp_path: Path) -> None:
    """Limits change under running requests; revoked keys are out at once."""
    gate = access.identify(Asking(authorization="Bearer sk-acme"))  # type: ignore[arg-type]
    assert isinstance(gate, TenantGate)
    gate.enter()
    (tmp_path / "tenants.toml").write_text("[tenants.acme]\nrequests_max = 1\n")
    (tmp_path / "keys").write_text("sk-new acme\n")
    access.load(1.0)
    assert (gate.running, gate.tenant.requests_max) == (1, 1)
    assert gate.enter() is not None
    assert who(access, authorization="Bearer sk-acme") == "401 key"
    assert access.identify(Asking(authorization="Bearer sk-new")) is gate  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tenants.toml", "[tenants.acme]\nnonsense = 1", "tenants.toml: .*nonsense"),
        ("keys", "sk-1 stranger", "keys: no tenant 'stranger' in .*tenants.toml"),
        ("keys", "", "keys: there is no key"),
        ("keys", b"\xff\xfe", "keys: this is no text"),
    ],
)
def test_a_bad_file_is_named_and_changes_nothing(
    access: Access, tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    """The old keys and limits stay in force."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said):
        access.load(1.0)
    assert who(access, authorization="Bearer sk-acme") == "acme"


def test_each_bad_file_is_named(access: Access, tmp_path: Path) -> None:
    """Whoever changed both need not mend one to hear of the other."""
    (tmp_path / "tenants.toml").write_text("nonsense")
    (tmp_path / "keys").write_text("sk-1 stranger\nsk-1 stranger")
    with pytest.raises(ConfigError, match=r"tenants\.toml: .*; .*keys: ") as caught:
        access.load(1.0)
    assert "no tenant" not in str(caught.value), "nobody knows which there are"
    assert who(access, authorization="Bearer sk-acme") == "acme"
