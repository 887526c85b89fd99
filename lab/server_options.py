"""The emulated engine's command line: `python -m lab.server --help`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.engine_types import EngineConfig
from lab.profiles import DEFAULT_PROFILE, PROFILES, find_profile
from lab.publisher import BUFFER_STEPS
from lab.server_model import ServedModel
from lab.tiny_model import tiny_model_dir

_NUMBER: Final[dict[str, Any]] = {"type": int, "metavar": "N"}


class ServerOptions(msgspec.Struct, frozen=True):
    """How to run one emulated engine; field by field the command line's flags.

    Attributes:
        names: served model names, the first one canonical.
        speed: how many times as fast as the profile its steps are.
        num_blocks: KV blocks; 0 for what the profile's GPU holds.
        max_model_len: 0 for the model folder's.
        max_num_queued_reqs: running and waiting together; 0 for no limit.
        stream_interval: tokens to a streamed chunk, but for the first; more of them save CPU.
        kv_port: of the event socket; 0 picks a free one, None publishes nothing.
    """

    model_dir: Path
    names: list[str]
    loras: list[str] = []
    host: str = "127.0.0.1"
    port: int = 0
    profile: str = DEFAULT_PROFILE
    speed: float = 1.0
    num_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int = 0
    stream_interval: int = 1
    prefix_caching: bool = True
    answer_tokens: int = 64
    api_key: str | None = None
    kv_port: int | None = 0
    kv_replay_port: int = 0
    kv_topic: str = ""
    kv_buffer_steps: int = BUFFER_STEPS
    kv_encoding: str = "map"

    def engine_config(self, model: ServedModel) -> EngineConfig:
        """Return the engine's limits. Raises ValueError where they contradict each other."""
        profile = find_profile(self.profile)
        return EngineConfig(
            num_blocks=self.num_blocks or profile.num_blocks(self.block_size),
            step_times=profile.step_times.scaled(1.0 / self.speed),
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or model.max_model_len,
            prefix_caching=self.prefix_caching,
            report_events=self.kv_port is not None,
        )


def parse(arguments: list[str]) -> ServerOptions:
    """Read the command line; what is wrong goes to stderr, and the process exits with 2."""
    defaults = ServerOptions(tiny_model_dir(), ["tiny"])
    parser = _parser(defaults)
    given = parser.parse_args(arguments)
    given.names = given.names or defaults.names
    if not given.speed > 0:
        parser.error(f"argument --speed: {given.speed} is not positive")
    for flag, value in (
        ("--blocks", given.num_blocks),
        ("--max-model-len", given.max_model_len),
        ("--max-num-queued-reqs", given.max_num_queued_reqs),
        ("--answer-tokens", given.answer_tokens),
    ):
        if value < 0:
            parser.error(f"argument {flag}: {value} is negative")
    if given.stream_interval < 1:
        parser.error(f"argument --stream-interval: {given.stream_interval} is not positive")
    return ServerOptions(**vars(given))


def _parser(defaults: ServerOptions) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.server",
        description="An emulated vLLM server: HTTP API, KV events and metrics are as vLLM's, "
        "steps take as long as on the GPU of a profile. Prints a line of JSON once it serves.",
        epilog="Example: python -m lab.server --port 8100 --kv-port 5557 --kv-replay-port 5558",
    )
    _add_serving(parser, defaults)
    _add_engine(parser, defaults)
    _add_events(parser, defaults)
    return parser


def _add_serving(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    add = parser.add_argument_group("what it serves, and where").add_argument
    folder = "tokenizer, chat template, config; a tiny one that comes with it by default"
    names = "served model name (tiny); repeat for aliases"
    free_end = "mean length of answers that are free to end, in tokens (%(default)s)"
    add("--model-dir", type=Path, default=defaults.model_dir, metavar="FOLDER", help=folder)
    add("--name", dest="names", action="append", metavar="NAME", help=names)
    add(
        "--lora",
        dest="loras",
        action="append",
        default=[],
        metavar="NAME",
        help="adapter name; repeatable",
    )
    add(
        "--host", default=defaults.host, metavar="ADDRESS", help="address to serve on (%(default)s)"
    )
    add("--port", default=defaults.port, help="port; 0 picks a free one (%(default)s)", **_NUMBER)
    add("--api-key", metavar="KEY", help="answer 401 under /v1 without it; none by default")
    add("--answer-tokens", default=defaults.answer_tokens, help=free_end, **_NUMBER)
    add("--stream-interval", default=1, help="tokens to a streamed chunk (%(default)s)", **_NUMBER)


def _add_engine(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    add = parser.add_argument_group("the engine").add_argument
    profiles = "whose step times it has, one of: " + ", ".join(PROFILES) + " (%(default)s)"
    add(
        "--profile",
        default=defaults.profile,
        choices=list(PROFILES),
        metavar="GPU/MODEL",
        help=profiles,
    )
    add(
        "--speed",
        type=float,
        default=defaults.speed,
        metavar="X",
        help="times as fast as the profile (%(default)s)",
    )
    add(
        "--blocks",
        dest="num_blocks",
        default=0,
        help="KV blocks; 0: the GPU's (%(default)s)",
        **_NUMBER,
    )
    add("--block-size", default=defaults.block_size, help="tokens a block (%(default)s)", **_NUMBER)
    add(
        "--max-model-len",
        default=0,
        help="tokens of prompt and answer; 0: the model's (%(default)s)",
        **_NUMBER,
    )
    add(
        "--max-num-seqs",
        default=defaults.max_num_seqs,
        help="requests in a step at most (%(default)s)",
        **_NUMBER,
    )
    add(
        "--max-num-batched-tokens",
        default=defaults.max_num_batched_tokens,
        help="tokens in a step at most (%(default)s)",
        **_NUMBER,
    )
    add(
        "--max-num-queued-reqs",
        default=0,
        help="requests running and waiting, 503 beyond; 0: no limit (%(default)s)",
        **_NUMBER,
    )
    add("--no-prefix-caching", dest="prefix_caching", action="store_false", help="cache nothing")


def _add_events(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    add = parser.add_argument_group("its KV events").add_argument
    encoding = "how events are written; array as before vLLM 0.24 (%(default)s)"
    add(
        "--kv-port",
        default=0,
        help="port of the events; 0 picks a free one (%(default)s)",
        **_NUMBER,
    )
    add(
        "--kv-replay-port",
        default=0,
        help="port that repeats them; likewise (%(default)s)",
        **_NUMBER,
    )
    add("--kv-topic", default="", metavar="TOPIC", help="topic of its messages; empty by default")
    add(
        "--kv-buffer-steps",
        default=defaults.kv_buffer_steps,
        help="steps that can be repeated (%(default)s)",
        **_NUMBER,
    )
    add("--kv-encoding", default="map", choices=["map", "array"], help=encoding)
    add("--no-kv-events", dest="kv_port", action="store_const", const=None, help="publish none")
