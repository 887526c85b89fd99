"""Puts the model card where routers find it, in the background, until it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import structs

from controlplane.bus.protocol import Bus, BusError
from schemas import subjects
from schemas.bus import ModelCard
from sidecar.card_probe import probes_of
from sidecar.config import SidecarConfig
from sidecar.discovery import EngineFacts
from sidecar.engine_http import EngineHttp
from sidecar.model_card import CardError, build_card, digest_of, find_model_folder

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class CardUpload:
    """The card of the engine's model.

    Attributes:
        digest: its name in the object store; empty while it is not there.
    """

    def __init__(
        self, config: SidecarConfig, bus: Bus, http: EngineHttp, changed: Callable[[], None]
    ) -> None:
        self.digest = ""
        self._config = config
        self._bus = bus
        self._http = http
        self._changed = changed
        self._facts: EngineFacts | None = None
        self._wanted: tuple[str, str, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def want(self, facts: EngineFacts, block_size: int) -> None:
        """Upload the card of an engine, in place of an earlier one."""
        wanted = (facts.model, facts.root, block_size)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._facts = facts
        self.close()
        self._task = asyncio.create_task(self._upload(facts, block_size), name="model-card")

    def block_size_is(self, block_size: int) -> None:
        """Follow the block size that the engine's events show."""
        if self._facts is not None and block_size:
            self.want(self._facts, block_size)

    def upload_again(self) -> None:
        """See to it that the card is there: the bus may have come back without it."""
        facts, wanted = self._facts, self._wanted
        if facts is not None and wanted is not None:
            self._wanted = None
            self.want(facts, wanted[2])

    def close(self) -> None:
        """Stop trying."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _upload(self, facts: EngineFacts, block_size: int) -> None:
        try:
            await self._build_and_put(facts, block_size)
        except Exception:  # a bug: else nobody would learn why there is no card
            logger.exception("no model card; routers will route %s by load", facts.model)

    async def _build_and_put(self, facts: EngineFacts, block_size: int) -> None:
        try:
            card = await asyncio.to_thread(self._build, facts, block_size)
        except CardError as error:
            logger.error("no model card: %s; routers will route %s by load", error, facts.model)
            return
        if card is None:
            logger.warning(
                "no model card: the tokenizer of %r is not on this machine, so routers will route "
                "%s by load alone; give its folder with --model-path",
                facts.root,
                facts.model,
            )
            return
        probes = await probes_of(self._http, facts.model, card.chat_template)
        digest, data = digest_of(structs.replace(card, probes=probes))
        while True:
            try:
                objects = await self._bus.objects(subjects.MODELS)
                await objects.put(digest, data)  # it leaves alone what is there already
                break
            except BusError as error:
                logger.debug("model card: %s", error)
            await asyncio.sleep(_RETRY_S)
        logger.info("model card %s of %s is on the bus", digest[:12], facts.model)
        self.digest = digest
        self._changed()

    def _build(self, facts: EngineFacts, block_size: int) -> ModelCard | None:
        config = self._config
        folder = find_model_folder(config.model_path, facts.root, config.hub_cache)
        if folder is None:
            return None
        return build_card(
            folder,
            facts.model,
            block_size=block_size,
            max_model_len=facts.max_model_len,
            told=config,
        )
