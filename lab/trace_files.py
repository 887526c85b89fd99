"""Writes traces, in the Qwen-Bailian format that `traces.read_bailian` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.traces import BAILIAN_BLOCK_TOKENS, Trace, TraceError


def write_bailian(trace: Trace, path: Path, kind: str = "text") -> None:
    """Write a trace as JSON lines; requests of one session name each other as parents.

    Raises:
        TraceError: its blocks have not the 16 tokens of the format.
        OSError: the file cannot be written.
    """
    if trace.block_tokens != BAILIAN_BLOCK_TOKENS:
        raise TraceError(
            f"{trace.name} has blocks of {trace.block_tokens} tokens, the format has "
            f"{BAILIAN_BLOCK_TOKENS}"
        )
    last: dict[str, tuple[int, int]] = {}  # session → its last chat and turn
    encode = msgspec.json.encode
    with path.open("wb") as file:
        for chat, request in enumerate(trace.requests):
            session = request.session or f"chat {chat}"
            parent, turn = last.get(session, (-1, 0))
            last[session] = chat, turn + 1
            line = {
                "chat_id": chat,
                "parent_chat_id": parent,
                "timestamp": request.at_s,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "type": kind,
                "turn": turn + 1,
                "hash_ids": request.block_ids,
            }
            file.write(encode(line) + b"\n")
