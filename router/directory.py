"""The models a router serves: a plane and a prompt reader for each, found by any of its names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from controlplane.core.effects import Effect
from controlplane.core.plane import Plane, PlaneConfig
from router.tokens import PromptReader
from schemas.bus import InstanceRecord


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
        card: digest of the card that `reader` was made from; empty before there is one.
        block_size: tokens a block, as that card says.
        reader: None until the card has come; requests are routed by load until then.
    """

    def __init__(self, model: str, plane: Plane) -> None:
        self.model = model
        self.plane = plane
        self.card = ""
        self.block_size = 0
        self.reader: PromptReader | None = None

    @property
    def max_model_len(self) -> int | None:
        """The longest context that any instance takes; None if none says."""
        lengths = [i.record.max_model_len for i in self.plane.fleet if i.record.max_model_len]
        return max(lengths, default=None)


class Directory:
    """Models by name.

    Attributes:
        models_max: models served at once; records of further ones are refused and counted.
        refused: records that were refused.
    """

    def __init__(
        self, router_id: str, epoch: int, config: PlaneConfig, models_max: int = 256
    ) -> None:
        self.models_max = models_max
        self.refused = 0
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

    @property
    def names(self) -> list[str]:
        """Every name that requests may use, sorted."""
        return sorted(self._names)

    def of(self, record: InstanceRecord) -> ServedModel | None:
        """Return the model of a record, made known if it is new; None at the bound."""
        served = self._models.get(record.model)
        if served is None:
            if len(self._models) >= self.models_max:
                self.refused += 1
                return None
            rng = random.Random(f"{self._router_id}/{record.model}")
            plane = Plane(record.model, self._router_id, self._epoch, self._config, rng)
            served = self._models[record.model] = ServedModel(record.model, plane)
        return served

    def rename(self) -> None:
        """Derive the names anew. Call after instances came, changed or went."""
        names: dict[str, Resolved] = {}
        for served in self._models.values():
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
