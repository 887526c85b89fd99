"""Traces of requests: read, cut, speed up, and made into prompts.

A trace says when requests came, how long they and their answers were, and which blocks of their
prompts were the same; it holds no text. A prompt is made up from its block ids: the same id gives
the same tokens everywhere, so prompts share exactly the prefixes that the trace says they shared.

Readers name the file and line of whatever they cannot use. Formats: Mooncake (JSONL, blocks of 512
tokens), Qwen-Bailian (JSONL, blocks of 16), Azure (CSV, no prefixes: every prompt is its own), and
recordings of `multiplane audit record`: one's own traffic.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.block_pool import EngineHash
from lab.engine_types import Request, chained_id, derived_hashes

T = TypeVar("T")

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
AZURE_BLOCK_TOKENS = 512
TINY_VOCABULARY = 4096
FIRST_TOKEN = 300  # above special tokens and the 256 single bytes of a byte-level vocabulary
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_IDS_PER_ROW = 1 << 20
_RECORDING = b"multiplane recording"


class TraceError(ValueError):
    """A trace that cannot be used; says where and why."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace.

    Attributes:
        at_s: seconds after the trace's start.
        block_ids: what stands for each block of the prompt, the last one possibly partial.
        session: what requests of one conversation share; empty where the trace does not say.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    session: str = ""


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival, with `block_tokens` tokens to a block id."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """When the last request comes."""
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.input_tokens for request in self.requests)

    def cut(
        self, start_s: float = 0.0, duration_s: float = math.inf, requests_max: int | None = None
    ) -> Trace:
        """Return the requests from `start_s` on for `duration_s`, their times from 0 on."""
        end_s = start_s + duration_s
        chosen = [each for each in self.requests if start_s <= each.at_s < end_s][:requests_max]
        return self._with(
            msgspec.structs.replace(each, at_s=each.at_s - start_s) for each in chosen
        )

    def faster(self, speed: float) -> Trace:
        """Return the same requests, `speed` times as close together.

        Raises:
            ValueError: `speed` is not positive.
        """
        if not speed > 0:
            raise ValueError(f"speed={speed} must be positive")
        return self._with(
            msgspec.structs.replace(each, at_s=each.at_s / speed) for each in self.requests
        )

    def within(self, tokens_max: int) -> Trace:
        """Return the requests whose prompt and answer together have at most `tokens_max` tokens."""
        return self._with(
            each for each in self.requests if each.input_tokens + each.output_tokens <= tokens_max
        )

    def prompt_ids(self, request: TraceRequest, vocabulary: int = TINY_VOCABULARY) -> list[int]:
        """Return the token ids of a request's prompt.

        Args:
            vocabulary: ids are below this, and never special tokens.
        """
        starts = np.array(request.block_ids, np.uint64) * np.uint64(self.block_tokens)
        places = np.add.outer(starts, np.arange(self.block_tokens, dtype=np.uint64))
        mixed = _mixed(places.ravel()[: request.input_tokens])
        ids = np.uint64(FIRST_TOKEN) + mixed % np.uint64(vocabulary - FIRST_TOKEN)
        tokens: list[int] = ids.tolist()
        return tokens

    def prompt_hashes(self, request: TraceRequest, block_size: int) -> list[EngineHash]:
        """Return names for the whole engine blocks of a prompt, equal where prefixes are.

        They stand for the hashes of `prompt_ids` where nobody looks at tokens.

        Raises:
            ValueError: neither block size is a multiple of the other.
        """
        prefixes: list[int] = []
        prefix = 0
        for each in request.block_ids:
            prefix = chained_id(each, prefix)
            prefixes.append(prefix)
        whole = request.input_tokens // block_size
        if block_size % self.block_tokens == 0:
            step = block_size // self.block_tokens
            return prefixes[step - 1 :: step][:whole]
        if self.block_tokens % block_size:
            raise ValueError(f"blocks of {block_size} tokens do not fit those of {self.name}")
        parts = np.arange(1, self.block_tokens // block_size + 1, dtype=np.uint64) * _GOLDEN
        spread = np.add.outer(np.array(prefixes, np.uint64), parts)
        hashes: list[int] = _mixed(spread.ravel()[:whole]).tolist()
        return hashes

    def engine_request(self, position: int, block_size: int) -> Request:
        """Return the request at `position` for the pure engine; its answer is nobody else's."""
        request = self.requests[position]
        hashes = self.prompt_hashes(request, block_size)
        blocks = (request.input_tokens + request.output_tokens) // block_size
        own = chained_id(position, hashes[-1] if hashes else 0)
        hashes += derived_hashes(own, blocks - len(hashes))
        return Request(f"{position}", request.input_tokens, request.output_tokens, hashes)

    def _with(self, requests: Iterable[TraceRequest]) -> Trace:
        return Trace(self.name, self.block_tokens, tuple(requests))


SPAN_S_MAX = 366 * 86_400.0
BLOCK_ID_MAX = (1 << 63) - 1


def sample_trace() -> Trace:
    """Return the packaged trace: ten minutes of Mooncake's conversations, 1,750 requests."""
    folder = Path(__file__).with_name("assets") / "traces"
    return read_mooncake(folder / "mooncake-conversation-10min.jsonl")


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class _BailianLine(msgspec.Struct, frozen=True):
    chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    parent_chat_id: int = -1


def read_mooncake(path: Path) -> Trace:
    """Read Mooncake's format: JSON lines with `timestamp` in milliseconds, blocks of 512 tokens.

    Raises:
        TraceError: the file cannot be read, or a line is not of the format.
    """

    def request(line: _MooncakeLine) -> TraceRequest:
        return TraceRequest(
            line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids
        )

    return _read_json_lines(path, MOONCAKE_BLOCK_TOKENS, _MooncakeLine, request)


def read_bailian(path: Path) -> Trace:
    """Read Qwen-Bailian's format: JSON lines with `timestamp` in seconds, blocks of 16 tokens.

    A request's session is the id of the first chat in its line of parents.

    Raises:
        TraceError: the file cannot be read, or a line is not of the format.
    """
    roots: dict[int, int] = {}

    def request(line: _BailianLine) -> TraceRequest:
        root = roots.get(line.parent_chat_id, line.chat_id)
        roots[line.chat_id] = root
        lengths = line.input_length, line.output_length
        return TraceRequest(line.timestamp, *lengths, line.hash_ids, str(root))

    return _read_json_lines(path, BAILIAN_BLOCK_TOKENS, _BailianLine, request)


def read_azure(path: Path) -> Trace:
    """Read Azure's format: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    It says nothing of prefixes, so each prompt gets blocks of its own.

    Raises:
        TraceError: the file cannot be read, or a line is not of the format.
    """
    requests = []
    for number, row in _rows(path):
        try:
            at_s = _azure_time_s(row["TIMESTAMP"])
            tokens, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"{path}:{number}: not an Azure trace line: {error}") from error
        if tokens > _IDS_PER_ROW * AZURE_BLOCK_TOKENS:
            raise TraceError(f"{path}:{number}: {tokens} prompt tokens are more than any model's")
        first = number * _IDS_PER_ROW
        ids = tuple(range(first, first + -(-tokens // AZURE_BLOCK_TOKENS)))
        requests.append(TraceRequest(at_s, tokens, output, ids))
        _check(requests[-1], AZURE_BLOCK_TOKENS, f"{path}:{number}")
    return _trace(path, AZURE_BLOCK_TOKENS, requests)


def read_recorded(path: Path) -> Trace:
    """Read a recording of `multiplane audit record`, in blocks of 16 tokens.

    Raises:
        TraceError: the file cannot be read, is damaged, or holds no request that could be replayed.
    """
    # Few who read traces have recordings, and reading those needs the bus's library.
    from lab import recorded

    roots: dict[int, int] = {}
    requests = []
    try:
        for line in recorded.recorded_requests(path):
            root = roots.setdefault(line.chat_id, roots.get(line.parent_chat_id, line.chat_id))
            lengths = line.input_length, line.output_length
            requests.append(TraceRequest(line.timestamp, *lengths, tuple(line.hash_ids), str(root)))
    except recorded.RecordingError as error:
        raise TraceError(str(error)) from error
    except recorded.NothingRecorded as error:
        raise TraceError(f"{path}: {error}") from error
    return _trace(path, recorded.BLOCK_TOKENS, requests)


FORMATS: dict[str, Callable[[Path], Trace]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "azure": read_azure,
    "recording": read_recorded,
}


def read_trace(path: Path) -> Trace:
    """Read a trace in whichever of `FORMATS` its first line looks like.

    Raises:
        TraceError: the file cannot be read, or is of none of them.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_RECORDING))
        if start == _RECORDING:
            return read_recorded(path)
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {_reason(error)}") from error
    if "ContextTokens" in first:
        return read_azure(path)
    if not first.lstrip().startswith("{"):
        kinds = "Mooncake's, Qwen-Bailian's or Azure's format"
        raise TraceError(f"{path}:1: neither a trace in {kinds} nor a recording")
    return read_bailian(path) if '"chat_id"' in first else read_mooncake(path)


def _read_json_lines(
    path: Path, block_tokens: int, kind: type[T], request_of: Callable[[T], TraceRequest]
) -> Trace:
    decode = msgspec.json.Decoder(kind).decode
    requests = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            request = request_of(decode(line))
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        _check(request, block_tokens, f"{path}:{number}")
        requests.append(request)
    return _trace(path, block_tokens, requests)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from enumerate(file, 1)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {_reason(error)}") from error


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    return error.strerror or str(error)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(line for _, line in _lines(path))
    for row in reader:
        yield reader.line_num, row


def _check(request: TraceRequest, block_tokens: int, place: str) -> None:
    """Refuse lengths that do not go with each other."""
    if request.input_tokens < 1 or request.output_tokens < 1:
        raise TraceError(f"{place}: a request needs at least one prompt and one output token")
    if min(request.block_ids, default=0) < 0:
        raise TraceError(f"{place}: block ids must not be negative")
    if max(request.block_ids, default=0) > BLOCK_ID_MAX:
        raise TraceError(f"{place}: block ids must be at most {BLOCK_ID_MAX}")
    blocks = -(-request.input_tokens // block_tokens)
    if len(request.block_ids) != blocks:
        raise TraceError(
            f"{place}: {request.input_tokens} prompt tokens make {blocks} blocks of "
            f"{block_tokens}, but there are {len(request.block_ids)} block ids"
        )


def _trace(path: Path, block_tokens: int, requests: list[TraceRequest]) -> Trace:
    """Return the trace in order of time, beginning at 0."""
    if not requests:
        raise TraceError(f"{path}: there is no request in it")
    requests.sort(key=lambda request: request.at_s)
    start_s = requests[0].at_s
    span_s = requests[-1].at_s - start_s
    if not span_s <= SPAN_S_MAX:
        raise TraceError(
            f"{path}: from the first request to the last {span_s:.0f} s pass, which is over a "
            "year: are its times in the unit of its format, and all from one clock?"
        )
    return Trace(path.stem, block_tokens, tuple(requests)).cut(start_s)


def _azure_time_s(text: str) -> float:
    """Return seconds of a time stamp such as `2023-11-16 18:15:46.6805900`, from any origin."""
    whole, _, fraction = text.partition(".")
    digits = fraction.rstrip("Z").partition("+")[0]
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{digits or 0}")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 well mixed bits for each value (the finalizer of SplitMix64)."""
    mixed = values * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))
