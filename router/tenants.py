"""Tenants as configured: who may ask for how much, and how their requests are weighed.

The file is TOML; every field may be left out:

    [tenants.acme]
    requests_max = 64          # in flight at once
    tokens_per_s = 20_000.0    # prompt and answer tokens together, in the long run
    tokens_burst = 200_000.0   # and at once
    models = ["llama", "fr"]   # names this tenant may ask for; all if left out
    alpha = 1.0                # exponents of P and B + 1 in the score
    beta = 1.0
    weight = 1.0               # share of the queue
    ttft_budget_s = 2.0        # what its requests may take
    total_budget_s = 60.0
    degrade = "reject"         # what would miss that: reject, best_effort, shorten, other_model
    degrade_max_tokens = 256   # with shorten: as long as such an answer may be
    degrade_model = "small"    # with other_model: who answers instead
    isolated = false           # its requests never share a place in the queue with others'
    trusted = false            # may name another tenant in X-Multiplane-Tenant

A table named `default` is for callers without a tenant of their own: everybody, where no API keys
are configured.
"""

from __future__ import annotations

import tomllib
from typing import Annotated, Final, Literal

import msgspec

DEFAULT: Final = "default"
TENANTS_MAX: Final = 1024
"""Tenants are metric labels, and label sets are bounded."""

_Above = Annotated[float, msgspec.Meta(ge=1e-6, le=1e15)]
"""Above 0, and so far that what is divided by it stays finite."""
Degrade = Literal["reject", "best_effort", "shorten", "other_model"]
_Exponent = Annotated[float, msgspec.Meta(ge=0, le=10)]


class ConfigError(ValueError):
    """A configuration file that cannot be used; says where and why, without any secret."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant; see the module's text for the fields."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:@/-]{1,64}$")] = DEFAULT
    requests_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_s: _Above | None = None
    tokens_burst: _Above | None = None
    models: frozenset[str] | None = None
    alpha: _Exponent = 1.0
    beta: _Exponent = 1.0
    weight: _Above = 1.0
    ttft_budget_s: _Above | None = None
    total_budget_s: _Above | None = None
    degrade: Degrade = "reject"
    degrade_max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    degrade_model: str = ""
    isolated: bool = False
    trusted: bool = False

    @property
    def burst(self) -> float:
        """Tokens that may be used at once: ten seconds' worth unless the file says."""
        if self.tokens_burst is not None:
            return self.tokens_burst
        return 10.0 * (self.tokens_per_s or 0.0)

    def may_use(self, model: str) -> bool:
        """Whether this tenant may ask for a model by this name."""
        return self.models is None or model in self.models


ANYBODY: Final = Tenant()
NOBODY: Final = Tenant(name="-")
"""Whoever was turned away before it was known who it was."""


def parse_tenants(text: str) -> dict[str, Tenant]:
    """Read a tenants file.

    Raises:
        ConfigError: names the table and the key that is wrong.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"this is no TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError("this is nested too deeply to be a list of tenants") from error
    if unknown := document.keys() - {"tenants"}:
        raise ConfigError(f"unknown table [{min(unknown)}]: tenants are tables [tenants.NAME]")
    tables = document.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError("tenants must be tables [tenants.NAME]")
    if len(tables) > TENANTS_MAX:
        raise ConfigError(f"{len(tables)} tenants: at most {TENANTS_MAX} are possible")
    return {name: _tenant(name, table) for name, table in tables.items()}


def _tenant(name: str, table: object) -> Tenant:
    if not isinstance(table, dict):
        raise ConfigError(f"tenants.{name} must be a table [tenants.{name}]")
    if "name" in table:
        raise ConfigError(f"[tenants.{name}]: the name is the table's own; remove `name`")
    try:
        tenant = msgspec.convert({**table, "name": name}, Tenant)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[tenants.{name}]: {error}") from error
    if tenant.tokens_burst is not None and tenant.tokens_per_s is None:
        raise ConfigError(f"[tenants.{name}]: tokens_burst needs tokens_per_s")
    if (tenant.degrade == "shorten") != (tenant.degrade_max_tokens is not None):
        raise ConfigError(
            f'[tenants.{name}]: degrade = "shorten" and degrade_max_tokens go together'
        )
    if (tenant.degrade == "other_model") != bool(tenant.degrade_model):
        raise ConfigError(
            f'[tenants.{name}]: degrade = "other_model" and degrade_model go together'
        )
    return tenant
