"""How to reach NATS: the options, and what they come down to for one connection."""

from __future__ import annotations

import importlib.util
import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from controlplane.bus.protocol import BusError
from schemas.ids import encode_token

MIB = 1 << 20


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to connect, and the bounds of a connection.

    Attributes:
        user: with `password`; may also stand in the URL.
        token: instead of a user.
        creds: path of a credentials file (JWT and nkey seed). Needs the package `nkeys`.
        nkey: path of a file that holds an nkey seed. Needs the package `nkeys`.
        tls_ca: path of the CA certificates to trust; setting any of the TLS options, or a `tls://`
            URL, makes TLS compulsory.
        tls_cert: path of the client's certificate, with `tls_key`.
        tls_hostname: name to expect in the server's certificate, where the URL has another.
        tls_first: begin with the TLS handshake, as the server's `handshake_first` wants it.
        inbox: subject prefix for answers; default `_INBOX.<user>`, or a random one without user.
            A server that limits subscriptions must allow `<inbox>.>`.
        echo: whether what we publish comes back to our own subscriptions.
        connect_s_max: longest wait for one server at one attempt.
        ping_s: a server that answers no ping for three times this long is lost.
        retry_s_min: first pause after all servers failed; it doubles up to
        retry_s_max: with a random part, so that clients do not come back all at once.
        return_s_max: a client waits for a random time up to this before it reconnects.
        buffer_messages_max: messages that wait to be sent; over it the oldest are dropped.
        buffer_bytes_max: likewise, in bytes of payload.
        serving_max: requests answered at a time; more are refused.
        answers_max: unread answers to one request; more fail it.
        call_s_max: longest wait for the server's answer to one operation.
    """

    user: str | None = None
    password: str | None = None
    token: str | None = None
    creds: str | None = None
    nkey: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_hostname: str | None = None
    tls_first: bool = False
    inbox: str | None = None
    echo: bool = True
    connect_s_max: float = 2.0
    ping_s: float = 1.5
    retry_s_min: float = 0.05
    retry_s_max: float = 1.0
    return_s_max: float = 0.2
    buffer_messages_max: int = 10_000
    buffer_bytes_max: int = 16 * MIB
    serving_max: int = 64
    answers_max: int = 4096
    call_s_max: float = 5.0

    @property
    def identified(self) -> bool:
        """Whether they say who we are: the server then knows what we may do."""
        return any((self.user, self.token, self.creds, self.nkey, self.tls_cert))

    def __repr__(self) -> str:
        """Leave the secrets out."""
        return f"NatsOptions(user={self.user!r}, …)"


def _tls_context(options: NatsOptions, servers: Sequence[str]) -> ssl.SSLContext | None:
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    wanted = any(files) or options.tls_hostname or options.tls_first
    if not wanted and not any(server.startswith("tls://") for server in servers):
        return None
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:
        raise BusError(f"TLS files for NATS cannot be used ({files}): {error}") from error
    return context


def _split_url(url: str) -> tuple[str, str | None, str | None]:
    """Return (URL without userinfo, user, password)."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "nats", url.strip()
    if scheme not in ("nats", "tls"):
        raise BusError(f"not a NATS URL: {scheme}://… (nats:// and tls:// are known)")
    userinfo, at, host = rest.rpartition("@")
    if not host:
        raise BusError("a NATS URL must name a host: nats://HOST:PORT")
    try:
        port = urlsplit(f"{scheme}://{host}").port
    except ValueError as error:
        raise BusError(f"not a NATS URL: {scheme}://{host}: {error}") from error
    if port == 0:
        raise BusError(f"not a NATS URL: {scheme}://{host}: nobody listens on port 0")
    user, colon, password = userinfo.partition(":")
    return (
        f"{scheme}://{host}",
        unquote(user) if at else None,
        unquote(password) if colon else None,
    )


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection needs to know; each is as in `NatsOptions`."""

    name: str
    inbox: str
    user: str | None
    password: str | None
    token: str | None
    creds: str | None
    nkey: str | None
    tls: ssl.SSLContext | None
    tls_hostname: str | None
    tls_first: bool
    echo: bool
    connect_s_max: float
    ping_s: float

    def __repr__(self) -> str:
        """Leave the secrets out."""
        return f"LinkOptions(name={self.name!r}, user={self.user!r}, …)"


def link_options(
    servers: Sequence[str], name: str, options: NatsOptions
) -> tuple[list[str], LinkOptions]:
    """Return the servers' URLs without credentials, and how to connect to any of them.

    Raises:
        BusError: a URL or a file of the options is of no use; says which.
    """
    for path in filter(None, (options.creds, options.nkey)):
        if importlib.util.find_spec("nkeys") is None:
            raise BusError("NATS keys need the package nkeys: pip install 'nats-py[nkeys]'")
        if not Path(path).is_file():
            raise BusError(f"NATS keys: there is no file {path}")
    split = [_split_url(server) for server in servers]
    if not split:
        raise BusError("no NATS server given")
    urls = [url for url, _, _ in split]
    user = options.user or next((user for _, user, _ in split if user), None)
    password = options.password or next((secret for _, _, secret in split if secret), None)
    token = options.token
    if user and password is None and not token:
        user, token = None, user  # nats://TOKEN@host
    owner = encode_token(user) if user else secrets.token_hex(6)
    return urls, LinkOptions(
        name=name,
        inbox=options.inbox or f"_INBOX.{owner}",
        user=user,
        password=password,
        token=token,
        creds=options.creds,
        nkey=options.nkey,
        tls=_tls_context(options, urls),
        tls_hostname=options.tls_hostname,
        tls_first=options.tls_first,
        echo=options.echo,
        connect_s_max=options.connect_s_max,
        ping_s=options.ping_s,
    )
