"""The models a router serves: a plane and a prompt reader for each, found by any of its names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from controlplane.core.effects import Alarm, Effect
from controlplane.core.plane import Plane, PlaneConfig
from router.template_habits import Habits
from router.tokens import PromptReader
from schemas.bus import InstanceRecord, ModelCard

# What a reader is made of: a card that differs in nothing else needs no other one.
_READ_FIELDS = (
    *("tokenizer", "chat_template", "special_tokens", "adds_special_tokens"),
    *("block_size", "tokenizer_config", "template_kwargs", "content_format"),
    *("drop_unchosen_tools", "probes"),
)


CARDS_SEEN_MAX: Final = 64


class Resolved(msgspec.Struct, frozen=True):
    """What a model name in a request stands for.

    Attributes:
        lora: the adapter's name, if the name is one.
    """

    served: ServedModel
    lora: str | None


class ServedModel:
    """One model: its plane, and how to read prompts for it.

    Attributes:
        card: digest of the card in use; empty before there is one.
        block_size: tokens a block, as that card says.
        reader: None until the card has come; requests are routed by load until then.
        habits: how Anthropic's messages become chats.
        max_model_len: the longest context that any instance takes; None if none says.
        idle_since_s: since when it has had no instance and no request; None if it has some.
        cards_seen: digest of a card → whether it reads prompts as the one in use does.
    """

    def __init__(self, model: str, plane: Plane) -> None:
        self.model = model
        self.plane = plane
        self.card = ""
        self.block_size = 0
        self.reader: PromptReader | None = None
        self.habits = Habits()
        self.max_model_len: int | None = None
        self.idle_since_s: float | None = None
        self.cards_seen: dict[str, bool] = {}
        self._made_from: ModelCard | None = None

    @property
    def idle(self) -> bool:
        """Whether it has neither an instance nor a request on its way."""
        return not len(self.plane.fleet) and not self.plane.requests.tickets

    @property
    def card_in_use(self) -> bool:
        """Whether prompts are read by a card that belongs to some instance."""
        return bool(self.card) and any(i.record.card == self.card for i in self.plane.fleet)

    def saw_card(self, digest: str, *, alike: bool) -> None:
        """Remember whether a card reads prompts as the one in use does; some, not for ever."""
        if len(self.cards_seen) >= CARDS_SEEN_MAX:
            self.cards_seen.clear()
        self.cards_seen[digest] = alike

    def card_differs(self, digest: str) -> list[Effect]:
        """Return an alarm about the instances whose card reads prompts otherwise than the others'.

        Their engines make other tokens of a prompt than routers do, and so find no hit in it.
        """
        names = [each.record.instance_id for each in self.plane.fleet if each.record.card == digest]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = (
            f"its model card{more} reads prompts otherwise than the one in use, {self.card[:12]}: "
            "its cache does not count; start engine and sidecar as the others of this model"
        )
        return [Alarm("card_differs", names[0], text)] if names else []

    def close(self) -> None:
        """Forget its prompts."""
        if self.reader is not None:
            self.reader.close()

    def reads_alike(self, card: ModelCard) -> bool:
        """Whether the reader in use reads prompts as this card wants it."""
        mine = self._made_from
        return mine is not None and all(
            getattr(mine, name) == getattr(card, name) for name in _READ_FIELDS
        )

    def keep_reader(self, digest: str) -> None:
        """Use another card that reads alike."""
        self.card = digest

    def use(self, digest: str, card: ModelCard, reader: PromptReader, habits: Habits) -> None:
        """Read prompts as a card says from now on, and forget what the reader before knew."""
        before, self.reader = self.reader, reader
        self.card, self.block_size, self.habits = digest, card.block_size, habits
        self.cards_seen = {digest: True}
        self._made_from = card
        if before is not None:
            before.close()

    def look_at_fleet(self) -> None:
        """Derive anew what follows from the instances' records."""
        lengths = [i.record.max_model_len for i in self.plane.fleet if i.record.max_model_len]
        self.max_model_len = max(lengths, default=None)


class Directory:
    """Models by name.

    Attributes:
        models_max: models known at once: a further one takes the place of the one that has been
            idle longest, and if none is, its records are refused and counted.
        refused: records that were refused.
        forgotten: models that were forgotten, so far.
        learning: what this router waits for before it takes requests; empty once it knows enough.
    """

    def __init__(
        self, router_id: str, epoch: int, config: PlaneConfig, models_max: int = 256
    ) -> None:
        self.models_max = models_max
        self.refused = 0
        self.forgotten = 0
        self._replaced: list[ServedModel] = []
        self.learning = ""
        self._router_id = router_id
        self._epoch = epoch
        self._config = config
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, Resolved] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model: str) -> ServedModel | None:
        """Return a model by its id on the bus."""
        return self._models.get(model)

    def resolve(self, name: str) -> Resolved | None:
        """Return what a name in a request means; an empty name means the only model, if it is."""
        found = self._names.get(name)
        if found is None and not name and len(self._models) == 1:
            (served,) = self._models.values()
            return Resolved(served, None)
        return found

    def some(self) -> Resolved | None:
        """Return some model, for a request that is not about any; None if there is none."""
        return next(iter(self._names.values()), None)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would find an instance that takes it."""
        if self.learning:
            return False
        fleets = [served.plane.fleet for served in self._models.values()]
        return any((fleet.ready & fleet.healthy).any() for fleet in fleets)

    @property
    def names(self) -> list[str]:
        """Every name that requests may use, sorted."""
        return sorted(self._names)

    def of(self, record: InstanceRecord) -> ServedModel | None:
        """Return the model of a record, made known if it is new; None at the bound."""
        served = self._models.get(record.model)
        if served is None:
            if len(self._models) >= self.models_max and not self._replace():
                self.refused += 1
                return None
            rng = random.Random(f"{self._router_id}/{record.model}")
            plane = Plane(record.model, self._router_id, self._epoch, self._config, rng)
            served = self._models[record.model] = ServedModel(record.model, plane)
        return served

    def _replace(self) -> bool:
        """Forget the model that has been idle longest; False if none is."""
        idle = [served for served in self._models.values() if served.idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda served: served.idle_since_s or float("inf"))
        self._replaced.append(self._drop(oldest))
        return True

    def _drop(self, served: ServedModel) -> ServedModel:
        del self._models[served.model]
        self.forgotten += 1
        served.close()
        return served

    def forget(self, now_s: float, after_s: float) -> list[ServedModel]:
        """Forget models that have been idle for `after_s`.

        Returns:
            These, and those that made room for others since this was last asked.
        """
        forgotten, self._replaced = self._replaced, []
        for served in list(self._models.values()):
            if not served.idle:
                served.idle_since_s = None
            elif served.idle_since_s is None:
                served.idle_since_s = now_s
            elif now_s - served.idle_since_s >= after_s:
                forgotten.append(self._drop(served))
        return forgotten

    def rename(self) -> None:
        """Derive the names anew. Call after instances came, changed or went."""
        names: dict[str, Resolved] = {}
        for served in self._models.values():
            served.look_at_fleet()
            if len(served.plane.fleet):
                names[served.model] = Resolved(served, None)
            for instance in served.plane.fleet:
                for alias in instance.record.aliases:
                    names.setdefault(alias, Resolved(served, None))
                for lora in instance.record.loras:
                    names.setdefault(lora, Resolved(served, lora))
        self._names = names

    def each(self, event: Callable[[Plane], list[Effect]]) -> list[Effect]:
        """Tell something to every plane; returns all effects."""
        return [effect for served in self._models.values() for effect in event(served.plane)]
