"""API keys: whose request it is.

The file has one key a line, followed by its tenant; a key may be given by its SHA-256 instead, so
that the file holds no secret:

    sk-acme-2f6c…                      acme
    sha256:9f86d081884c7d659a2feaa0…   umbrella
    sk-test-1                          # no tenant: default

A presented key is hashed and looked up by its hash, so how long a look-up takes tells nothing about
any key; the hashes are compared in constant time besides. Keys are never logged, also not in errors
about the file.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from router.tenants import DEFAULT, ConfigError

KEYS_MAX: Final = 100_000
KEY_CHARS_MAX: Final = 512

_COMMENT: Final = re.compile(r"(?:^|\s)#")  # a key may have a # inside
_HASHED: Final = "sha256:"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class KeyRing:
    """The keys of one file; immutable."""

    def __init__(self, tenants: dict[bytes, str]) -> None:
        """Args: tenants: SHA-256 of a key → tenant."""
        self._tenants = {digest: (digest, tenant) for digest, tenant in tenants.items()}

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def tenants(self) -> set[str]:
        """Every tenant that has a key."""
        return {tenant for _, tenant in self._tenants.values()}

    def tenant_of(self, key: bytes) -> str | None:
        """Return the tenant that a key belongs to; None if it is no key of ours."""
        digest = hashlib.sha256(key).digest()
        known, tenant = self._tenants.get(digest, (bytes(_DIGEST_BYTES), ""))
        return tenant if hmac.compare_digest(digest, known) else None


def parse_keys(text: str) -> KeyRing:
    """Read a keys file.

    Raises:
        ConfigError: names the line that is wrong.
    """
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.split(line, 1)[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(f"line {number}: expected KEY TENANT, found {len(words)} words")
        digest = _digest(words[0], number)
        if digest in tenants:
            raise ConfigError(f"line {number}: this key is there already")
        tenants[digest] = words[1] if len(words) == 2 else DEFAULT
        if len(tenants) > KEYS_MAX:
            raise ConfigError(f"line {number}: more than {KEYS_MAX} keys")
    if not tenants:
        raise ConfigError("there is no key in it, so nobody could send anything")
    return KeyRing(tenants)


def _digest(key: str, number: int) -> bytes:
    """Return the SHA-256 of a key as the file gives it."""
    if not key.startswith(_HASHED):
        if len(key) > KEY_CHARS_MAX:
            raise ConfigError(f"line {number}: a key longer than {KEY_CHARS_MAX} characters")
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != _DIGEST_BYTES:
        raise ConfigError(f"line {number}: sha256: must be followed by 64 hexadecimal digits")
    return digest


def presented(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    """Return the key that a request brings: `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and key.strip():
            return key.strip()
    return x_api_key.strip() if x_api_key else None
