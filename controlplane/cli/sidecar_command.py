"""`multiplane sidecar`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_folder, named, read_key
from controlplane.cli.options import (
    PORT_MAX,
    BusPlace,
    LogLevel,
    require_port,
    require_url,
    set_up_logs,
    with_service_bus,
)

ENGINE = "The engine"
EVENTS = "Its KV events, where it cannot be asked"
PROCESS = "How it runs"

USAGE = {"allow_extra_args": True, "ignore_unknown_options": False}


@with_service_bus
def sidecar(
    context: typer.Context,
    engine: Annotated[
        str,
        typer.Option(
            help="URL of the engine's API server; made from its --host and --port with `--`.",
            rich_help_panel=ENGINE,
        ),
    ] = "",
    instance_id: Annotated[
        str,
        typer.Option(
            help="Name on the bus, unique in the fleet; host and port by default.",
            rich_help_panel=ENGINE,
        ),
    ] = "",
    advertise_url: Annotated[
        str,
        typer.Option(
            help="URL under which routers reach the engine, where it is another.",
            rich_help_panel=ENGINE,
        ),
    ] = "",
    model_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tokenizer.json and the chat template; asked from the engine, or "
            "looked up in the Hugging Face cache, by default.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="As the engine's own --chat-template.", rich_help_panel=ENGINE),
    ] = None,
    chat_template_kwargs: Annotated[
        str,
        typer.Option(
            help="As the engine's own --default-chat-template-kwargs: a JSON object.",
            rich_help_panel=ENGINE,
        ),
    ] = "",
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the engine's --api-key.", rich_help_panel=ENGINE),
    ] = None,
    kv_endpoint: Annotated[
        str, typer.Option(help="E.g. tcp://127.0.0.1:5557.", rich_help_panel=EVENTS)
    ] = "",
    kv_replay_endpoint: Annotated[
        str, typer.Option(help="E.g. tcp://127.0.0.1:5558.", rich_help_panel=EVENTS)
    ] = "",
    kv_topic: Annotated[
        str | None, typer.Option(help="Only this topic; all by default.", rich_help_panel=EVENTS)
    ] = None,
    kv_bind: Annotated[
        bool,
        typer.Option(
            "--kv-bind",
            help="Listen at --kv-endpoint, for engines that connect.",
            rich_help_panel=EVENTS,
        ),
    ] = False,
    drain_s: Annotated[
        float,
        typer.Option(min=0.0, help="Time for running requests at a stop.", rich_help_panel=PROCESS),
    ] = 60.0,
    metrics_host: Annotated[
        str, typer.Option(help="Address for the sidecar's metrics.", rich_help_panel=PROCESS)
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=PORT_MAX,
            help="Port for them, 0 for a free one; none by default.",
            rich_help_panel=PROCESS,
        ),
    ] = None,
    log_level: LogLevel = "info",
    *,
    bus: BusPlace,
) -> None:
    """Publish one engine's cached blocks and load.

    Example, beside a running engine: `multiplane sidecar --engine http://127.0.0.1:8100`

    Or to start it: `multiplane sidecar -- vllm serve MODEL --port 8100`. The flags that it needs
    are added, signals are passed on, and running requests finish before it is stopped.
    """
    set_up_logs(log_level)
    require_port("--metrics-port", metrics_host, metrics_port or 0)
    for flag, url in (("--engine", engine), ("--advertise-url", advertise_url)):
        if url:
            require_url(flag, url)
    _check_model_files(model_path, chat_template)
    settings: dict[str, Any] = {
        "bus_url": bus.url,
        "bus_options": bus.options,
        "instance_id": instance_id,
        "advertise_url": advertise_url.rstrip("/"),
        "model_path": "" if model_path is None else str(model_path),
        "chat_template": "" if chat_template is None else str(chat_template),
        "template_kwargs": _object(chat_template_kwargs),
        "api_key": read_key("--api-key-file", api_key_file),
        "kv_endpoint": kv_endpoint,
        "kv_replay_endpoint": kv_replay_endpoint,
        "kv_topic": kv_topic,
        "kv_bind": kv_bind,
        "drain_s_max": drain_s,
        "metrics_host": metrics_host,
        "metrics_port": metrics_port,
    }
    command = list(context.args)
    if not engine and not command:
        raise UsageError("give --engine URL of a running engine, or `-- vllm serve MODEL …`")
    raise typer.Exit(_run(engine.rstrip("/"), command, settings))


def _check_model_files(model_path: Path | None, chat_template: Path | None) -> None:
    """See that the files of the model that flags name can be used. Raises UsageError."""
    from sidecar.model_card import CardError, read_tokenizer

    if model_path is not None:
        wanted = "the folder of the model's tokenizer.json"
        check_folder("--model-path", model_path.expanduser(), wanted)
        try:
            read_tokenizer(model_path.expanduser())
        except CardError as error:
            raise UsageError(f"--model-path {model_path}: {error}") from error
    if chat_template is not None:
        with named("--chat-template", chat_template, "a file that holds a Jinja template"):
            chat_template.expanduser().read_text(encoding="utf-8")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--chat-template-kwargs must be a JSON object, not {text}")
    return found


def _run(engine: str, command: list[str], settings: dict[str, Any]) -> int:
    from sidecar.config import SidecarConfig
    from sidecar.exporter import Exporter
    from sidecar.launcher import LaunchError
    from sidecar.main import run_sidecar
    from sidecar.service import SidecarService

    def started(service: SidecarService, exporter: Exporter | None) -> None:
        _said(
            {
                "sidecar": service.config.instance_id,
                "engine": service.config.engine_url,
                "metrics_port": None if exporter is None else exporter.port,
            }
        )

    try:
        config = SidecarConfig(engine_url=engine or "http://127.0.0.1:8000", **settings)
    except ValueError as error:
        raise UsageError(f"--engine or its companions: {error}") from error
    try:
        return run_sidecar(config, command, started)
    except LaunchError as error:
        raise UsageError(f"the command after `--`: {error}") from error


def _said(ready: dict[str, Any]) -> None:
    """Print where the sidecar stands, as one line of JSON."""
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
