"""Who may send requests, and in whose name: API keys and tenants, as their files say at present.

Without a keys file everybody is the tenant `default`. A caller whose tenant is trusted (a gateway
that has checked its users itself) may name another one in `X-Multiplane-Tenant`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from router.http_exchange import Exchange
from router.keys import KeyRing, parse_keys, presented
from router.refusals import Refusal, bad_key, not_allowed
from router.tenant_gate import TenantGate
from router.tenants import ANYBODY, DEFAULT, ConfigError, Tenant, parse_tenants

TENANT_HEADER: Final = b"x-multiplane-tenant"
KEY_HEADERS: Final = frozenset({b"authorization", b"x-api-key"})


class FileError(ConfigError):
    """A file of keys or tenants that cannot be read or used.

    Attributes:
        path: of the file.
        problem: what is wrong with it, or where in it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class FilesError(ConfigError):
    """What keeps files of keys and tenants from being used.

    Attributes:
        problems: of each file that has one.
    """

    def __init__(self, problems: Sequence[FileError]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


class Access:
    """The callers of one router process.

    Args:
        keys_path: file of API keys; empty if none are asked for.
        tenants_path: file of tenants; empty if none has limits.
    """

    def __init__(self, keys_path: str = "", tenants_path: str = "") -> None:
        self.paths = tuple(filter(None, (keys_path, tenants_path)))
        self._keys_path = keys_path
        self._tenants_path = tenants_path
        self._keys: KeyRing | None = None
        self._gates = {DEFAULT: TenantGate(ANYBODY, 0.0)}

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys_path)

    @property
    def gates(self) -> Iterator[TenantGate]:
        """The gate of every tenant."""
        return iter(self._gates.values())

    def gate(self, tenant: str) -> TenantGate | None:
        """Return a tenant's gate; None if it is no tenant of this router."""
        return self._gates.get(tenant)

    @property
    def limits_anybody(self) -> bool:
        """Whether any tenant has a limit, so that other routers' requests are of interest."""
        return bool(self._tenants_path)

    def used_elsewhere(self, changes: Mapping[str, tuple[int, int]]) -> None:
        """Take in tenants' requests in flight at other routers, and tokens newly used there."""
        for name, (running, tokens) in changes.items():
            gate = self._gates.get(name)
            if gate is not None:
                gate.elsewhere = running
                gate.settle(tokens)

    @property
    def anybody(self) -> TenantGate:
        """The gate of callers without a tenant of their own."""
        return self._gates[DEFAULT]

    def load(self, now_s: float) -> None:
        """Read both files; what is in use stays in use.

        Raises:
            FilesError: one or both cannot be read or used; nothing has changed.
        """
        tenants, keys = {DEFAULT: ANYBODY}, None
        problems: list[FileError] = []
        if self._tenants_path:
            with _noted(problems, self._tenants_path):
                tenants |= parse_tenants(_text(self._tenants_path))
        tenants_known = not problems
        if self._keys_path:
            with _noted(problems, self._keys_path):
                keys = parse_keys(_text(self._keys_path))
                if tenants_known:
                    tenants |= self._implied(keys, tenants)
        if problems:
            raise FilesError(problems)
        self._keys = keys
        self._configure(tenants, now_s)

    def _implied(self, keys: KeyRing, tenants: dict[str, Tenant]) -> dict[str, Tenant]:
        """Return tenants that only the keys name; they exist if no file says which do."""
        unknown = keys.tenants - tenants.keys()
        if unknown and self._tenants_path:
            raise ConfigError(f"no tenant {min(unknown)!r} in {self._tenants_path}")
        return {name: Tenant(name=name) for name in unknown}

    def _configure(self, tenants: dict[str, Tenant], now_s: float) -> None:
        gates: dict[str, TenantGate] = {}
        for name, tenant in tenants.items():
            gate = self._gates.get(name)
            if gate is None:
                gate = TenantGate(tenant, now_s)
            else:
                gate.configure(tenant, now_s)
            gates[name] = gate
        self._gates = gates

    def identify(self, exchange: Exchange) -> TenantGate | Refusal:
        """Return whose request this is, or why it is refused."""
        gate = self._caller(exchange)
        if isinstance(gate, Refusal) or not self.paths:
            return gate
        named = exchange.header(TENANT_HEADER)
        if named is None:
            return gate
        if not gate.tenant.trusted:
            return not_allowed("only a trusted tenant may send X-Multiplane-Tenant")
        other = self._gates.get(named.decode("latin-1"))
        return other or not_allowed("X-Multiplane-Tenant names no tenant of this router")

    def trusts(self, exchange: Exchange) -> bool:
        """Whether whoever sent a request, in whose name ever, is trusted."""
        gate = self._caller(exchange)
        return not isinstance(gate, Refusal) and gate.tenant.trusted

    def _caller(self, exchange: Exchange) -> TenantGate | Refusal:
        """Return whose key this is."""
        if self._keys is None:
            return self._gates[DEFAULT]
        key = presented(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        owner = None if key is None else self._keys.tenant_of(key)
        return bad_key(key is not None) if owner is None else self._gates[owner]


@contextmanager
def _noted(problems: list[FileError], path: str) -> Iterator[None]:
    """Add to the problems what keeps a file from being used."""
    try:
        yield
    except ConfigError as error:
        problems.append(FileError(path, str(error)))
    except OSError as error:
        problems.append(FileError(path, error.strerror or str(error)))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is no text in UTF-8: {error.reason}") from error
