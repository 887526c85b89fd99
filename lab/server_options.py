"""The emulated engine's command line: `python -m lab.server --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from lab.engine_types import EngineConfig
from lab.profiles import DEFAULT_PROFILE, PROFILES, find_profile
from lab.publisher import BUFFER_STEPS
from lab.server_model import ServedModel
from lab.tiny_model import tiny_model_dir


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
    parser = argparse.ArgumentParser(prog="python -m lab.server", description=__doc__)
    defaults = ServerOptions(tiny_model_dir(), ["tiny"])
    add = parser.add_argument
    add("--model-dir", type=Path, default=defaults.model_dir, help="tokenizer, template, config")
    add("--name", dest="names", action="append", help="served model name; repeat for aliases")
    add("--lora", dest="loras", action="append", default=[], help="adapter name; repeatable")
    add("--host", default=defaults.host)
    add("--port", type=int, default=defaults.port, help="0 picks a free one")
    add("--profile", default=defaults.profile, choices=list(PROFILES), metavar="GPU/MODEL")
    add("--speed", type=float, default=defaults.speed, help="times as fast as the profile")
    add("--blocks", dest="num_blocks", type=int, default=0, help="KV blocks; 0: the GPU's")
    add("--block-size", type=int, default=defaults.block_size)
    add("--max-model-len", type=int, default=0, help="0: the model's")
    add("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    add("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens)
    add("--max-num-queued-reqs", type=int, default=0, help="beyond it 503; 0: no limit")
    add("--stream-interval", type=int, default=1, help="tokens to a streamed chunk")
    add("--no-prefix-caching", dest="prefix_caching", action="store_false")
    add("--answer-tokens", type=int, default=defaults.answer_tokens, help="mean, where free to end")
    add("--api-key", help="answer 401 under /v1 without it")
    add("--kv-port", type=int, default=0, help="event socket; 0 picks a free one")
    add("--kv-replay-port", type=int, default=0)
    add("--kv-topic", default="")
    add("--kv-buffer-steps", type=int, default=defaults.kv_buffer_steps)
    add("--kv-encoding", default="map", choices=["map", "array"], help="array: vLLM before 0.24")
    add("--no-kv-events", dest="kv_port", action="store_const", const=None)
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
