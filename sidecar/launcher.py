"""The command that starts the engine: what it needs so that the sidecar can do its work. Pure.

Flags that are absent are added, the user's are kept, and what contradicts the sidecar's work is an
error that says what to change. `sidecar.engine_process` runs the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from sidecar.config import SidecarConfig

_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server")
_EVENTS = "--kv-events-config"
_QUIET = "--disable-access-log-for-endpoints"
_ASKED_OFTEN = "/health,/load,/metrics"  # a dozen times a second, which would drown the log
_TEMPLATE_KWARGS = "--default-chat-template-kwargs"
_LOOPBACK = "127.0.0.1"


class LaunchError(Exception):
    """The engine's command contradicts what the sidecar needs; says how to mend it."""


class Launch(msgspec.Struct, frozen=True):
    """How to start an engine, and how to find it then.

    Attributes:
        command: with everything added.
        added: what was added, for the log.
        config: the sidecar's, completed by what the command says.
    """

    command: tuple[str, ...]
    added: tuple[str, ...]
    config: SidecarConfig


class _Flags:
    """The options of a vLLM command, in all the forms that its parser takes."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.values: dict[str, str] = {}
        for at, argument in enumerate(arguments):
            if not argument.startswith("-") or argument == "-":
                continue
            name, equals, value = argument.partition("=")
            if not equals and at + 1 < len(arguments) and not arguments[at + 1].startswith("--"):
                value = arguments[at + 1]
            self.values[_canonical(name)] = value

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, *names: str) -> str:
        """Return the value of the first of these flags that is there; empty if none is."""
        return next((self.values[name] for name in names if name in self.values), "")

    def number(self, *names: str, default: int) -> int:
        """Return a flag's value as a number. Raises LaunchError if it is none."""
        text = self.text(*names)
        if not text:
            return default
        if not text.isdecimal():
            raise LaunchError(f"{names[0]} {text}: not a number")
        return int(text)


def _canonical(name: str) -> str:
    """Return a flag as vLLM documents it: with hyphens, its sub-keys as they are."""
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def prepare(
    command: Sequence[str],
    config: SidecarConfig,
    find_ports: Callable[[int], int],
    environment: Mapping[str, str],
) -> Launch:
    """Return how to start the engine of `vllm serve …`.

    Args:
        command: as the user gave it.
        find_ports: returns the first of so many free consecutive TCP ports.
        environment: of the engine.

    Raises:
        LaunchError: the command is not vLLM's, or contradicts what the sidecar needs.
    """
    flags = _Flags(command[_server_at(command) :])
    _refuse_contradictions(flags)
    ranks = flags.number("--data-parallel-size", "-dp", default=1)
    added: list[str] = []
    replaced = list(command)
    if "--enable-prefix-caching" not in flags:
        added.append("--enable-prefix-caching")
    events = _events_of(flags)
    if events is None:
        events = _new_events(find_ports, ranks)
        added += [_EVENTS, _json(events)]
        config = _listening(config, events)
    else:
        _check_events(events, ranks)
        if not events.get("replay_endpoint"):
            events["replay_endpoint"] = f"tcp://{_LOOPBACK}:{find_ports(ranks)}"
            replaced, added = _without(replaced, _EVENTS), [*added, _EVENTS, _json(events)]
    for flag in ("--enable-server-load-tracking", "--enable-prompt-tokens-details"):
        if flag not in flags:
            added.append(flag)
    if not any(flag in flags for flag in (_QUIET, "--disable-uvicorn-access-log")):
        added += [_QUIET, _ASKED_OFTEN]
    return Launch((*replaced, *added), tuple(added), _completed(config, flags, environment))


def _server_at(command: Sequence[str]) -> int:
    """Return where vLLM's own arguments begin. Raises LaunchError if it is no vLLM server."""
    for at, word in enumerate(command):
        if word in _SERVERS:
            return at + 1
        if word == "serve" and at and PurePath(command[at - 1]).name.startswith("vllm"):
            return at + 1
    raise LaunchError(
        f"not a vLLM server: {' '.join(command[:3])} …; give `vllm serve MODEL …` after `--`, or "
        "start the engine yourself and give its URL with --engine"
    )


def _refuse_contradictions(flags: _Flags) -> None:
    refused = {
        "--no-enable-prefix-caching": "without prefix caching there is nothing to route by",
        "--no-enable-server-load-tracking": "the sidecar reads /load",
        "--headless": "a headless engine has no API server; start the sidecar beside the head node",
        "--uds": "the sidecar and routers reach the engine over TCP; use --host and --port",
    }
    for flag, reason in refused.items():
        if flag in flags:
            raise LaunchError(f"{flag}: {reason}")


def _events_of(flags: _Flags) -> dict[str, Any] | None:
    """Return the user's KV event settings, None if there are none."""
    parts = {
        name.removeprefix(f"{_EVENTS}."): value
        for name, value in flags.values.items()
        if name.startswith(f"{_EVENTS}.")
    }
    text = flags.text(_EVENTS)
    if _EVENTS not in flags:
        if parts:
            raise LaunchError(f"give {_EVENTS} as one JSON object instead of {_EVENTS}.KEY flags")
        return None
    try:
        events: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LaunchError(f"{_EVENTS} is no JSON object: {error}") from error
    return events


def _new_events(find_ports: Callable[[int], int], ranks: int) -> dict[str, Any]:
    """Return settings whose ports are free, for each rank: vLLM counts up from rank 0's.

    Events hold prompts' tokens, so they must not leave this machine. The only TCP address that
    vLLM listens at is every one (`*`), whereas it connects to one that is spelled out.
    """
    first = find_ports(2 * ranks)
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{_LOOPBACK}:{first}",
        "replay_endpoint": f"tcp://{_LOOPBACK}:{first + ranks}",
    }


def _listening(config: SidecarConfig, events: dict[str, Any]) -> SidecarConfig:
    """Return settings of a sidecar that the engine connects to. Raises LaunchError."""
    if config.kv_endpoint:
        raise LaunchError(
            f"--kv-endpoint is for an engine that runs already; for one that the sidecar starts, "
            f"give vLLM its {_EVENTS}"
        )
    return msgspec.structs.replace(
        config,
        kv_endpoint=events["endpoint"],
        kv_replay_endpoint=events["replay_endpoint"],
        kv_bind=True,
    )


def _check_events(events: dict[str, Any], ranks: int) -> None:
    """Refuse settings under which no event reaches the sidecar."""
    if events.get("enable_kv_cache_events") is not True:
        raise LaunchError(f'{_EVENTS}: "enable_kv_cache_events" must be true')
    if events.get("publisher", "zmq") != "zmq":
        raise LaunchError(f'{_EVENTS}: "publisher" must be "zmq", not {events["publisher"]!r}')
    endpoint = str(events.get("endpoint", "tcp://*:5557"))
    if not ("*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))):
        port = endpoint.rpartition(":")[2]
        raise LaunchError(
            f'{_EVENTS}: vLLM does not listen at "{endpoint}", it connects to it, so nobody gets '
            f'its events; write "tcp://*:{port}"'
        )
    if endpoint.startswith("inproc://"):
        raise LaunchError(f'{_EVENTS}: "{endpoint}" is out of reach of other processes')
    live, replay = (
        text.rpartition(":")[2] for text in (endpoint, str(events.get("replay_endpoint") or ""))
    )
    if live.isdecimal() and replay.isdecimal() and abs(int(live) - int(replay)) < ranks:
        raise LaunchError(
            f"{_EVENTS}: ports {live} and {replay} overlap: each of the {ranks} ranks takes the "
            "next port up from both"
        )


def _without(command: Sequence[str], flag: str) -> list[str]:
    """Return a command without a flag and its value."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip:
            skip = False
        elif _canonical(word.partition("=")[0]) == flag:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def _completed(
    config: SidecarConfig, flags: _Flags, environment: Mapping[str, str]
) -> SidecarConfig:
    """Return the sidecar's settings with what the engine's command says."""
    host = flags.text("--host")
    host = _LOOPBACK if host in ("", "0.0.0.0", "::") else host  # noqa: S104 (compared, not bound)
    scheme = "https" if "--ssl-certfile" in flags else "http"
    port = flags.number("--port", default=8000)
    seqs = flags.number("--max-num-seqs", default=0)
    return msgspec.structs.replace(
        config,
        engine_url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
        api_key=config.api_key or flags.text("--api-key") or environment.get("VLLM_API_KEY", ""),
        chat_template=config.chat_template or flags.text("--chat-template"),
        template_kwargs=config.template_kwargs or _template_kwargs(flags),
        content_format=_content_format(flags, config),
        drop_unchosen_tools="--exclude-tools-when-tool-choice-none" in flags,
        max_num_seqs=config.max_num_seqs or seqs or None,
        server_load=config.server_load and flags.number("--api-server-count", default=1) == 1,
    )


def _template_kwargs(flags: _Flags) -> dict[str, Any]:
    text = flags.text(_TEMPLATE_KWARGS)
    try:
        kwargs: dict[str, Any] = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LaunchError(f"{_TEMPLATE_KWARGS} is no JSON object: {error}") from error
    return kwargs


def _content_format(flags: _Flags, config: SidecarConfig) -> Literal["auto", "string", "openai"]:
    match flags.text("--chat-template-content-format"):
        case "string":
            return "string"
        case "openai":
            return "openai"
    return config.content_format


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
