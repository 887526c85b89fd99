"""`multiplane audit record` and `export`: the record of a plane in files."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
import typer

from controlplane.audit.heard import understand
from controlplane.audit.recording import RecordingWriter
from controlplane.audit.table import DecisionRow, Table
from controlplane.audit.trace import TraceLine, TraceWriter
from controlplane.bus.protocol import Record
from controlplane.cli.audit_source import From, Model, Since, run, source
from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_writable, check_writable_folder
from controlplane.cli.options import BusPlace, with_bus
from controlplane.cli.tables import size

KINDS = ("kv", "load", "route", "hotspot", "policy")
_STATUS_S = 1.0


@with_bus
def record(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    seconds: Annotated[
        float, typer.Option("--for", min=0.0, help="Seconds to record; 0: until Ctrl-C.")
    ] = 0.0,
    kinds: Annotated[str, typer.Option(help="What to record, comma-separated.")] = ",".join(KINDS),
    bytes_max: Annotated[int, typer.Option(min=1, help="Largest file, in bytes.")] = 2_000_000_000,
    model: Model = "",
    *,
    bus: BusPlace,
) -> None:
    """Record a plane, from its present state on, into a file that needs nothing else.

    `audit verify --from`, `tail --from`, `show --from` and `export --from` read it.

    Example: `multiplane audit record plane.mpr --for 600`
    """
    wanted = tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
    unknown = [kind for kind in wanted if kind not in KINDS]
    if unknown or not wanted:
        raise UsageError(f"--kinds {kinds}: choose of {', '.join(KINDS)}")
    check_writable("OUT", out)

    async def work() -> int:
        from controlplane.audit.record import record as record_bus

        async with bus.opened("audit") as nats:
            with RecordingWriter(out) as writer:
                recording = record_bus(
                    nats,
                    writer,
                    wanted,
                    model=model or None,
                    wall=time.time,
                    bytes_max=bytes_max,
                    written=_Status(writer).written,
                )
                await _until_asked(asyncio.ensure_future(recording), seconds)
                typer.echo(f"{writer.frames:,} messages, {size(writer.nbytes)} in {out}")
        return 0

    run(work())


class _Status:
    """Says on standard error how a recording goes, now and then."""

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self._said_s = time.monotonic()

    def written(self, _: Record) -> None:
        """Take note of a record."""
        now_s = time.monotonic()
        if now_s - self._said_s >= _STATUS_S and typer.get_text_stream("stderr").isatty():
            self._said_s = now_s
            said = f"{self._writer.frames:,} messages, {size(self._writer.nbytes)}"
            typer.echo(f"\r{said:<40}", nl=False, err=True)


async def _until_asked(task: asyncio.Future[None], seconds: float) -> None:
    """Let a task run for some time, or until a signal; raises what it raises."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    asked = asyncio.ensure_future(stop.wait())
    waiting: list[asyncio.Future[Any]] = [task, asked]
    await asyncio.wait(waiting, timeout=seconds or None, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@with_bus
def export(
    out: Annotated[Path, typer.Argument(help="Folder for Parquet, file for a trace.")],
    form: Annotated[
        Literal["parquet", "trace"],
        typer.Option("--format", help="parquet: a row a decision; trace: what `lab replay` reads."),
    ] = "parquet",
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Parquet: with every candidate of each decision.")
    ] = False,
    since: Since = "",
    file: From = None,
    model: Model = "",
    *,
    bus: BusPlace,
) -> None:
    """Write decisions as Parquet, by day and model, or as a trace for `multiplane lab replay`.

    Example: `multiplane audit export decisions --since 1d`
    """
    where = source(bus, file=file, model=model, since=since)
    if form == "parquet":
        check_writable_folder("OUT", out)
        sink: _Parquet | _Trace = _Parquet(out, with_candidates=candidates)
    else:
        check_writable("OUT", out)
        sink = _Trace(out)

    async def work() -> int:
        await where.read(sink.kinds, sink.hear, "exporting")
        typer.echo(sink.close())
        return 0

    run(work())


class _Parquet:
    """Writes decisions as Parquet."""

    kinds = ("route",)

    def __init__(self, folder: Path, *, with_candidates: bool) -> None:
        try:
            from controlplane.audit.parquet import ParquetFiles
        except ImportError as error:
            raise UsageError("Parquet needs pyarrow: pip install 'multiplane[audit]'") from error
        self._table = Table(with_candidates=with_candidates)
        name = time.strftime("decisions-%Y%m%dT%H%M%S")
        self._files = ParquetFiles(folder, name, with_candidates=with_candidates)

    def hear(self, record: Record) -> None:
        """Take the next record."""
        self._write(self._table.hear(understand(record)))

    def close(self) -> str:
        """Complete the files; returns what was written."""
        self._write(self._table.end())
        self._files.close()
        counts = self._table.counts
        absurd = counts["implausible"]
        return (
            f"{counts['rows']:,} decisions, {counts['rows without an end']:,} of them without an "
            f"end, in {len(self._files.files)} files"
            + (f"; left out: {absurd:,} that no router would make" if absurd else "")
        )

    def _write(self, rows: Iterable[DecisionRow]) -> None:
        for row in rows:
            self._files.add(row)


class _Trace:
    """Writes requests as a trace."""

    kinds = ("kv", "route")

    def __init__(self, path: Path) -> None:
        self._trace = TraceWriter()
        self._file: IO[bytes] = path.open("wb")

    def hear(self, record: Record) -> None:
        """Take the next record."""
        self._write(self._trace.hear(understand(record)))

    def close(self) -> str:
        """Complete the file; returns what was written."""
        self._write(self._trace.end())
        self._file.close()
        counts = self._trace.counts
        left_out = [f"{name}: {n:,}" for name, n in counts.items() if name.startswith("left out")]
        known = counts["blocks"] - counts["blocks_unknown"]
        share = known / counts["blocks"] if counts["blocks"] else 1.0
        return "; ".join(
            [
                f"{counts['requests']:,} requests, {share:.1%} of their blocks in the record",
                *left_out,
            ]
        )

    def _write(self, lines: Iterable[TraceLine]) -> None:
        for line in lines:
            self._file.write(msgspec.json.encode(line) + b"\n")
