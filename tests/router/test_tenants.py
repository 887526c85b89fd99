"""The tenants file: what it may say, and what is said about a mistake."""

from __future__ import annotations

import pytest

from router.tenants import TENANTS_MAX, ConfigError, Tenant, parse_tenants


def test_a_full_table_is_read() -> None:
    """Every field arrives; what is left out has its default."""
    found = parse_tenants(
        """
        [tenants.acme]
        requests_max = 64
        tokens_per_s = 20_000
        models = ["llama", "fr"]
        alpha = 1.5
        beta = 0.5
        weight = 2.0
        ttft_budget_s = 2.0
        total_budget_s = 60
        trusted = true
        degrade = "shorten"
        degrade_max_tokens = 64
        isolated = true

        [tenants."team/b"]
        """
    )
    acme = found["acme"]
    assert (acme.name, acme.requests_max, acme.tokens_per_s) == ("acme", 64, 20_000.0)
    assert (acme.alpha, acme.beta, acme.weight, acme.trusted) == (1.5, 0.5, 2.0, True)
    assert (acme.ttft_budget_s, acme.total_budget_s) == (2.0, 60.0)
    assert (acme.degrade, acme.degrade_max_tokens, acme.isolated) == ("shorten", 64, True)
    assert acme.burst == 200_000.0
    assert acme.may_use("fr")
    assert not acme.may_use("de")
    assert found["team/b"] == Tenant(name="team/b")
    assert found["team/b"].may_use("anything")
    assert parse_tenants("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants.a", "no TOML"),
        ("[tenant.a]", r"unknown table \[tenant\]"),
        ("tenants = 3", "must be tables"),
        ("[tenants]\na = 1", r"tenants.a must be a table"),
        ("[tenants.a]\nrequest_max = 3", r"\[tenants.a\].*`request_max`"),
        ("[tenants.a]\nrequests_max = 0", r"\[tenants.a\].*>= 1.*requests_max"),
        ("[tenants.a]\nrequests_max = '3'", r"\[tenants.a\].*requests_max"),
        ("[tenants.a]\nweight = 0.0", r">= 1e-06.*weight"),
        ("[tenants.a]\nweight = 1e-320", r">= 1e-06.*weight"),
        ("[tenants.a]\ntokens_per_s = 1e-320", r">= 1e-06.*tokens_per_s"),
        ("[tenants.a]\nalpha = -1.0", r"alpha"),
        ("[tenants.a]\nname = 'b'", "remove `name`"),
        ("[tenants.a]\ntokens_burst = 5.0", "tokens_burst needs tokens_per_s"),
        ("[tenants.a]\ndegrade = 'sing'", r"degrade"),
        ("[tenants.a]\ndegrade = 'shorten'", "degrade_max_tokens go together"),
        ("[tenants.a]\ndegrade_model = 'b'", "degrade_model go together"),
        ("[tenants.'a b']", r"name"),
        ("[tenants.a]\nmodels = " + "[" * 10_000, "nested too deeply"),
        ("\n".join(f"[tenants.t{n}]" for n in range(TENANTS_MAX + 1)), "at most"),
    ],
)
def test_mistakes_name_the_table_and_the_key(text: str, said: str) -> None:
    """Whoever wrote the file learns where to look."""
    with pytest.raises(ConfigError, match=said):
        parse_tenants(text)
