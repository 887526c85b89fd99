"""Who may say what: NATS users with least permissions, from a list of the plane's members.

    python -m controlplane.bus.accounts members.toml --secret-file secret > users.conf

prints the users that `deploy/nats.conf` includes, and with `--password-of NAME` one member's
password. Passwords derive from the one secret, so that a member may be added without touching the
others. The list is TOML:

    [[sidecar]]
    name = "gpu-1"
    model = "Qwen/Qwen3-8B"
    instances = ["gpu-1"]

    [[router]]
    name = "router-a"
    ids = ["router-a"]

    [[router]]
    name = "routers"            # replicas that share this account and make up their own ids

    [[service]]
    name = "detector"
    role = "detector"           # detector, predictor, auditor or operator

What the permissions hold against: a sidecar speaks for its own instances only, a router for
itself (one without `ids` for any router) and for what tenants have registered, an auditor for
nobody. Answers cannot be read by others, since each member has an inbox of its own name. Who may
both write to a stream and read it by a consumer could have its own words delivered under any
subject, so no sidecar may create a consumer, and no router one on what it writes. An operator may
do anything.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from schemas import subjects
from schemas.ids import encode_token

SECRET_BYTES_MIN = 16

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_API = "$JS.API"
_ANSWERS_MAX = 4096  # to one request, within
_ANSWER_EXPIRES = "1m"


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sidecar, and the instances (one a rank) that it speaks for."""

    name: str
    model: str
    instances: list[str]


class Router(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router host, and the ids of its router processes; none listed: any, for replicas."""

    name: str
    ids: list[str] = []


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service, or a person."""

    name: str
    role: Literal["detector", "predictor", "auditor", "operator"]


Member = Sidecar | Router | Service


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of members, as the TOML file has it."""

    sidecar: list[Sidecar] = []
    router: list[Router] = []
    service: list[Service] = []


class Permissions(msgspec.Struct, frozen=True):
    """What a member may publish and subscribe to, its own inbox aside.

    Attributes:
        answers: whether it may answer requests that it receives.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def _read_values(*streams: str) -> tuple[str, ...]:
    """Single values, which come wrapped in JSON: fit for no other subject."""
    return tuple(f"{_API}.STREAM.MSG.GET.{stream}" for stream in streams)


def _read_all(*streams: str) -> tuple[str, ...]:
    """Single values, and everything by a consumer."""
    verbs = ("CREATE", "MSG.NEXT", "DELETE")
    consumers = tuple(f"{_API}.CONSUMER.{verb}.{s}.>" for s in streams for verb in verbs)
    return _read_values(*streams) + consumers


def _kv(bucket: str) -> str:
    return f"KV_{bucket}"


def _obj(store: str) -> str:
    return f"OBJ_{store}"


def _of_sidecar(member: Sidecar) -> Permissions:
    publish = [*_read_values(_kv(subjects.INSTANCES), _obj(subjects.MODELS))]
    publish.append(f"$O.{subjects.MODELS}.>")
    subscribe = [subjects.policy(member.model)]
    for instance in member.instances:
        publish += [subjects.kv(member.model, instance), subjects.load(member.model, instance)]
        publish.append(f"$KV.{subjects.INSTANCES}.{subjects.key(member.model, instance)}")
        subscribe.append(subjects.snapshot(member.model, instance))
    return Permissions(tuple(publish), tuple(subscribe), answers=True)


def _of_router(member: Router) -> Permissions:
    read = _read_all(
        _kv(subjects.INSTANCES),
        _kv(subjects.VERDICTS),
        _obj(subjects.MODELS),
        _obj(subjects.PREDICTORS),
    )
    # What it may write it must not have sent to it by a consumer: of registered prefixes it reads
    # single values, and hears what others write as they do.
    values = _read_values(_kv(subjects.ROUTERS), _kv(subjects.PREFIXES))
    publish = [*read, *values, subjects.all_of("snapshot"), f"$KV.{subjects.PREFIXES}.*"]
    for token in map(encode_token, member.ids) if member.ids else ("*",):
        publish += [f"{subjects.PREFIX}.route.*.{token}", f"$KV.{subjects.ROUTERS}.*.{token}"]
    kinds = ("kv", "load", "route", "hotspot", "policy")
    heard = (*(subjects.all_of(kind) for kind in kinds), f"$KV.{subjects.PREFIXES}.>")
    return Permissions(tuple(publish), heard)


_BUCKETS = tuple(
    _kv(name)
    for name in (subjects.INSTANCES, subjects.ROUTERS, subjects.VERDICTS, subjects.LEADERS)
)
_STORES = (_obj(subjects.MODELS), _obj(subjects.PREDICTORS))


def _of_service(member: Service) -> Permissions:
    everything = f"{subjects.PREFIX}.>"
    if member.role == "operator":
        return Permissions((">",), (">",))
    if member.role == "auditor":
        about = (f"{_API}.INFO", f"{_API}.STREAM.INFO.*")
        kept = (*_BUCKETS, _kv(subjects.PREFIXES), *_STORES)
        read = _read_all(*subjects.STREAMS, *kept)
        return Permissions((*about, *read), (everything,))
    lease = (f"$KV.{subjects.LEADERS}.{encode_token(member.role)}",)
    if member.role == "detector":
        speak = (subjects.all_of("hotspot"), subjects.all_of("policy"))
        write = (*lease, f"$KV.{subjects.VERDICTS}.>")
        return Permissions((*speak, *write, *_read_all(*_BUCKETS)), (everything,))
    store = (f"$O.{subjects.PREDICTORS}.>", f"{_API}.STREAM.PURGE.{_obj(subjects.PREDICTORS)}")
    read = _read_all("MP_ROUTE", "MP_LOAD", *_BUCKETS, *_STORES)
    return Permissions((*lease, *store, *read), (everything,))


def permissions(member: Member) -> Permissions:
    """Return what a member may do."""
    if isinstance(member, Sidecar):
        return _of_sidecar(member)
    return _of_router(member) if isinstance(member, Router) else _of_service(member)


def password(secret: bytes, name: str) -> str:
    """Return a member's password: 43 letters, derived from the secret.

    Raises:
        ValueError: the secret is too short to be one.
    """
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"the secret must have {SECRET_BYTES_MIN} bytes or more")
    return hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:43]


def read_members(text: str) -> list[Member]:
    """Return the members of a TOML list.

    Raises:
        ValueError: it is not such a list, or a name is used twice or is not plain; says which.
    """
    listed = msgspec.convert(tomllib.loads(text), Members)
    members: list[Member] = [*listed.sidecar, *listed.router, *listed.service]
    names = [member.name for member in members]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r}: a name is made of letters, digits, _ and -")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is listed twice")
    return members


def _quoted(texts: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def render(members: Sequence[Member], secret: bytes) -> str:
    """Return the `users` part of a NATS account, for `include`."""
    lines = ["users = ["]
    for member in members:
        allowed = permissions(member)
        subscribe = (*allowed.subscribe, f"_INBOX.{encode_token(member.name)}.>")
        answers = f'{{max: {_ANSWERS_MAX}, expires: "{_ANSWER_EXPIRES}"}}'
        lines += [
            "  {",
            f'    user: "{member.name}", password: "{password(secret, member.name)}"',
            "    permissions {",
            f"      publish {{allow: {_quoted(allowed.publish)}}}",
            f"      subscribe {{allow: {_quoted(subscribe)}}}",
            *([f"      allow_responses: {answers}"] if allowed.answers else []),
            "    }",
            "  }",
        ]
    return "\n".join([*lines, "]", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the users, or one password. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m controlplane.bus.accounts")
    parser.add_argument("members", type=Path, help="the members, in TOML")
    parser.add_argument(
        "--secret-file", type=Path, required=True, help="what passwords derive from"
    )
    parser.add_argument("--password-of", metavar="NAME", help="print one member's password instead")
    options = parser.parse_args(arguments)
    try:
        members = read_members(options.members.read_text())
        secret = options.secret_file.read_bytes().strip()
        if options.password_of is None:
            sys.stdout.write(render(members, secret))
        elif options.password_of in {member.name for member in members}:
            sys.stdout.write(f"{password(secret, options.password_of)}\n")
        else:
            raise ValueError(f"no member is called {options.password_of!r}")
    except (OSError, ValueError, msgspec.ValidationError) as error:
        sys.stderr.write(f"accounts: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
