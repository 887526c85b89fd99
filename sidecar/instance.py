"""One instance as the sidecar keeps it: an engine rank, its block feed, its load, its record."""

from __future__ import annotations

import time
from typing import Literal

from schemas import subjects
from schemas.bus import InstanceRecord, LoadReport
from sidecar.config import SidecarConfig
from sidecar.discovery import EngineFacts, RankFacts
from sidecar.feed import BlockFeed
from sidecar.load import Load, LoadTracker

State = Literal["starting", "ready", "draining", "stopped"]


class Instance:
    """One rank of the engine.

    Attributes:
        instance_id: name on the bus.
        key: of its record.
        feed: its block stream; None where the engine publishes no events.
        load: what the engine says of its load.
        still: requests run, and nothing is computed for too long.
    """

    def __init__(
        self,
        instance_id: str,
        engine: EngineFacts,
        rank: RankFacts,
        feed: BlockFeed | None,
        config: SidecarConfig,
    ) -> None:
        self.instance_id = instance_id
        self.engine = engine
        self.rank = rank
        self.feed = feed
        self.load = LoadTracker()
        self.still = False
        self.key = subjects.key(engine.model, instance_id)
        self.load_subject = subjects.load(engine.model, instance_id)
        self._config = config
        self._started_ns = time.time_ns()
        self._record_seq = 0
        self._load_seq = 0

    @property
    def block_size(self) -> int:
        """Tokens a block: as the events have it, or else the engine's settings; 0 if unknown."""
        learned = self.feed.mirror.block_size if self.feed is not None else None
        return learned or self.rank.block_size

    @property
    def several(self) -> bool:
        """Whether the engine has further ranks."""
        return len(self.engine.ranks) > 1

    def record(self, state: State, card: str) -> InstanceRecord:
        """Return the instance's record as of now."""
        engine, config = self.engine, self._config
        self._record_seq += 1
        return InstanceRecord(
            instance_id=self.instance_id,
            model=engine.model,
            url=(config.advertise_url or config.engine_url).rstrip("/"),
            epoch=self.feed.epoch if self.feed is not None else self._started_ns,
            state=state,
            aliases=list(engine.aliases),
            loras=list(engine.loras),
            dp_rank=self.rank.rank if self.several else None,
            block_size=self.block_size if self.feed is not None else 0,
            num_blocks=self.rank.num_blocks,
            max_model_len=engine.max_model_len,
            max_num_seqs=config.max_num_seqs,
            engine_version=engine.version,
            card=card,
            kv_events=self.feed is not None,
            heartbeat_s=config.heartbeat_s,
            seq=self._record_seq,
            sent_wall_s=time.time(),
            mirror_complete=self.feed is None or self.feed.mirror.complete,
            blind=self.feed is not None and self.feed.mirror.blind,
            host=config.host,
        )

    def load_report(self, load: Load) -> LoadReport:
        """Return the next report of the load stream."""
        seq, self._load_seq = self._load_seq, self._load_seq + 1
        return LoadReport(
            instance_id=self.instance_id,
            epoch=self._started_ns,
            seq=seq,
            sent_wall_s=time.time(),
            running=load.running,
            waiting=load.waiting,
            server_load=load.server_load,
            kv_usage=load.kv_usage,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
        )
