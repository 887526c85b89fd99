"""The engine's command: what is added, what is kept, what is refused."""

from __future__ import annotations

import json

import pytest

from sidecar.config import SidecarConfig
from sidecar.launcher import Launch, LaunchError, prepare

BASE = ["vllm", "serve", "org/model", "--port", "8101"]
CONFIG = SidecarConfig(engine_url="http://unset")


def prepared(*more: str, command: list[str] | None = None, **environment: str) -> Launch:
    """Prepare a command; free ports begin at 6000."""
    return prepare([*(command or BASE), *more], CONFIG, lambda count: 6000, environment)


def events_in(launch: Launch) -> dict[str, object]:
    """The KV event settings of a command, which must be there once."""
    assert launch.command.count("--kv-events-config") == 1
    at = launch.command.index("--kv-events-config")
    events: dict[str, object] = json.loads(launch.command[at + 1])
    return events


def test_a_plain_command_gets_all_it_needs() -> None:
    """Caching, events with replay, load tracking and cached-token counts."""
    launch = prepared()
    assert launch.command[:5] == tuple(BASE)
    assert launch.command[5:] == launch.added
    for flag in (
        "--enable-prefix-caching",
        "--enable-server-load-tracking",
        "--enable-prompt-tokens-details",
    ):
        assert flag in launch.added
    assert events_in(launch) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:6000",
        "replay_endpoint": "tcp://127.0.0.1:6001",
    }
    assert launch.config.engine_url == "http://127.0.0.1:8101"


def test_what_the_sidecar_asks_often_is_not_logged() -> None:
    """Unless the user has a word of their own about the engine's access log."""
    launch = prepared()
    at = launch.added.index("--disable-access-log-for-endpoints")
    assert launch.added[at + 1] == "/health,/load,/metrics"
    assert "/health,/load,/metrics" not in prepared("--disable-uvicorn-access-log").added


def test_ranks_get_ports_that_do_not_collide() -> None:
    """Each rank counts up from rank 0's port, for both sockets."""
    events = events_in(prepared("-dp", "4"))
    assert (events["endpoint"], events["replay_endpoint"]) == (
        "tcp://127.0.0.1:6000",
        "tcp://127.0.0.1:6004",
    )


def test_events_stay_on_this_machine_unless_the_user_says_otherwise() -> None:
    """They hold prompts: vLLM connects to where the sidecar listens, which is loopback only."""
    launch = prepared()
    assert "*" not in str(events_in(launch))
    config = launch.config
    assert (config.kv_endpoint, config.kv_bind) == ("tcp://127.0.0.1:6000", True)
    assert config.kv_replay_endpoint == "tcp://127.0.0.1:6001"
    mine = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}'
    config = prepared("--kv-events-config", mine).config
    assert (config.kv_endpoint, config.kv_bind) == ("", False)


def test_an_endpoint_of_an_engine_that_runs_already_contradicts_a_command() -> None:
    """The engine would not publish there."""
    config = SidecarConfig(engine_url="http://unset", kv_endpoint="tcp://127.0.0.1:5557")
    with pytest.raises(LaunchError, match="--kv-endpoint"):
        prepare(BASE, config, lambda count: 6000, {})


def test_what_the_user_gave_is_kept() -> None:
    """Nothing is added twice, in whichever form it was given."""
    mine = (
        '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'
    )
    launch = prepared(
        f"--kv-events-config={mine}",
        "--enable_prefix_caching",
        "--enable-server-load-tracking",
        "--enable-prompt-tokens-details",
        "--disable_access_log_for_endpoints=/health",
    )
    assert launch.added == ()
    assert launch.command[5] == f"--kv-events-config={mine}"


@pytest.mark.parametrize("form", ["--kv-events-config={}", "--kv_events_config {}"])
def test_a_missing_replay_endpoint_is_added_to_the_users_settings(form: str) -> None:
    """The rest of the settings stays as it is."""
    mine = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","topic":"mine"}'
    launch = prepared(*form.format(mine).split(" ", 1), "--seed", "1")
    assert events_in(launch) == {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "topic": "mine",
        "replay_endpoint": "tcp://127.0.0.1:6000",
    }
    assert launch.command[5:7] == ("--seed", "1")


def test_the_command_completes_the_sidecars_settings() -> None:
    """Host, port, key, template and limits need not be said twice."""
    launch = prepared(
        *("--host", "0.0.0.0", "--api-key", "secret", "--max-num-seqs=64"),
        *("--chat-template", "/t.jinja", "--api-server-count", "2", "--ssl-certfile", "c"),
    )
    config = launch.config
    assert config.engine_url == "https://127.0.0.1:8101"
    assert (config.api_key, config.chat_template) == ("secret", "/t.jinja")
    assert (config.max_num_seqs, config.server_load) == (64, False)
    assert prepared("--host", "::1").config.engine_url == "http://[::1]:8101"
    assert prepared(VLLM_API_KEY="from-env").config.api_key == "from-env"
    assert prepared(command=["vllm", "serve", "m"]).config.engine_url == "http://127.0.0.1:8000"


def test_how_chats_are_rendered_is_taken_from_the_command() -> None:
    """Routers must render them as this engine does."""
    config = prepared(
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        *("--chat-template-content-format", "openai", "--exclude-tools-when-tool-choice-none"),
    ).config
    assert config.template_kwargs == {"enable_thinking": False}
    assert (config.content_format, config.drop_unchosen_tools) == ("openai", True)
    plain = prepared("--chat-template-content-format=string").config
    assert (plain.template_kwargs, plain.content_format) == ({}, "string")
    assert prepared().config.content_format == "auto"
    assert not prepared().config.drop_unchosen_tools


def test_wrapped_commands_and_modules_are_known() -> None:
    """What stands before vLLM's own arguments does not matter."""
    for command in (
        ["numactl", "-N", "0", "/opt/bin/vllm", "serve", "m"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
    ):
        assert prepared(command=command).command[: len(command)] == tuple(command)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-enable-prefix-caching"], "nothing to route by"),
        (["--headless"], "no API server"),
        (["--uds", "/s"], "over TCP"),
        (["--port", "http"], "--port http: not a number"),
        (["--kv-events-config", "{"], "no JSON object"),
        (["--kv-events-config", '{"publisher":"zmq"}'], '"enable_kv_cache_events" must be true'),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"null"}'],
            '"publisher" must be "zmq"',
        ),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"tcp://h:55"}'],
            r'write "tcp://\*:55"',
        ),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"inproc://x"}'],
            "out of reach",
        ),
        (
            [
                *("-dp", "2", "--kv-events-config"),
                '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557",'
                '"replay_endpoint":"tcp://*:5558"}',
            ],
            "overlap",
        ),
        (["--kv-events-config.publisher", "zmq"], "as one JSON object"),
        (["--default-chat-template-kwargs", "[1]"], "kwargs is no JSON object"),
    ],
)
def test_contradictions_are_refused_with_what_to_do(arguments: list[str], said: str) -> None:
    """The message names the flag."""
    with pytest.raises(LaunchError, match=said):
        prepared(*arguments)


def test_other_programs_are_refused() -> None:
    """Only vLLM's server has these flags."""
    with pytest.raises(LaunchError, match=r"not a vLLM server: bash run\.sh"):
        prepared(command=["bash", "run.sh"])
