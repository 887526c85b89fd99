"""Decisions as Parquet files, partitioned by day and model: `day=2026-11-29/model=m/….parquet`.

Readers that know Hive's folders (DuckDB, Spark, pandas, Polars) find both columns in the names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from controlplane.audit.table import DecisionRow
from schemas.ids import encode_token

ROWS_A_GROUP = 20_000
FILES_OPEN_MAX = 32

_CANDIDATE = pa.struct(
    [
        ("instance_id", pa.string()),
        ("hit_tokens", pa.int64()),
        ("queued_tokens", pa.int64()),
        ("batch_size", pa.int64()),
        ("score", pa.float64()),
        ("eligible", pa.bool_()),
        ("excluded_by", pa.list_(pa.string())),
    ]
)

_TYPES: dict[str, pa.DataType] = {
    "at_wall_s": pa.timestamp("us", tz="UTC"),
    "prompt_key": pa.uint64(),
    "kv_epoch": pa.uint64(),
    "class_keys": pa.list_(pa.uint64()),
    "class_depths": pa.list_(pa.int32()),
    "candidates": pa.list_(_CANDIDATE),
    **dict.fromkeys(("exact", "ended"), pa.bool_()),
    **dict.fromkeys(
        ("score", "alpha", "beta", "next_score", "decide_s", "tokenize_s", "queue_s"), pa.float64()
    ),
    **dict.fromkeys(("ttft_s", "duration_s"), pa.float64()),
    **dict.fromkeys(
        ("model", "router_id", "request_id", "instance_id", "policy", "reason", "trust", "tenant"),
        pa.string(),
    ),
    **dict.fromkeys(("next_instance_id", "outcome"), pa.string()),
}


def schema(*, with_candidates: bool) -> pa.Schema:
    """Return the columns of the files; `model` and `day` are in the folders' names."""
    names = [name for name in DecisionRow.__struct_fields__ if name != "model"]
    if not with_candidates:
        names.remove("candidates")
    return pa.schema([(name, _TYPES.get(name, pa.int64())) for name in names])


class ParquetFiles:
    """Writes rows into partitions; `close` completes the files.

    Args:
        folder: below which the partitions are made.
        name: of the files, without the ending: a run of its own writes files of its own.

    Attributes:
        files: completed or being written.
    """

    def __init__(self, folder: Path, name: str, *, with_candidates: bool = False) -> None:
        self.files: list[Path] = []
        self._folder = folder
        self._name = name
        self._schema = schema(with_candidates=with_candidates)
        self._waiting: dict[tuple[str, str], list[DecisionRow]] = {}
        self._open: OrderedDict[tuple[str, str], pq.ParquetWriter] = OrderedDict()

    def add(self, row: DecisionRow) -> None:
        """Write a row, with others of its partition. Raises OSError."""
        day = datetime.fromtimestamp(row.at_wall_s, UTC).strftime("%Y-%m-%d")
        rows = self._waiting.setdefault((day, row.model), [])
        rows.append(row)
        if len(rows) >= ROWS_A_GROUP:
            self._write((day, row.model))

    def close(self) -> None:
        """Write what waits, and complete all files. Raises OSError."""
        for partition in list(self._waiting):
            self._write(partition)
        while self._open:
            self._open.popitem()[1].close()

    def _write(self, partition: tuple[str, str]) -> None:
        rows = self._waiting.pop(partition)
        self._writer(partition).write_table(_table(rows, self._schema))

    def _writer(self, partition: tuple[str, str]) -> pq.ParquetWriter:
        writer = self._open.get(partition)
        if writer is None:
            day, model = partition
            folder = self._folder / f"day={day}" / f"model={encode_token(model)}"
            folder.mkdir(parents=True, exist_ok=True)
            number = len(self.files)
            path = folder / f"{self._name}-{number:04d}.parquet"
            self.files.append(path)
            writer = self._open[partition] = pq.ParquetWriter(
                path, self._schema, compression="zstd"
            )
        self._open.move_to_end(partition)
        while len(self._open) > FILES_OPEN_MAX:
            self._open.popitem(last=False)[1].close()
        return writer


def _table(rows: Sequence[DecisionRow], columns: pa.Schema) -> pa.Table:
    arrays = [pa.array(_column(rows, field), field.type) for field in columns]
    return pa.Table.from_arrays(arrays, schema=columns)


def _column(rows: Sequence[DecisionRow], field: pa.Field) -> list[object]:
    values = [getattr(row, field.name) for row in rows]
    if field.name == "at_wall_s":
        return [round(value * 1e6) for value in values]
    if field.name == "candidates":
        return [None if value is None else msgspec.to_builtins(value) for value in values]
    return values
