"""The language of the detector's scenarios: what happens in, what the detector says out.

    # What the scenario shows.
    config requests_min=3 window_s=10
    at 0 other                          a request of no class
    at 1 x3 every 0.5 hot/4 1:8 100|900    three requests, from 1 s on
        raised hot/4: …                 what that changed: written by the detector

A class is a name and a depth in blocks; a request names its classes from short to long, each with
`holders:fleet` and the best scores `inside|outside` (`-` where there is none). Further words of a
request: `by POLICY`, `retry`, `on INSTANCE*HIT,…` (its candidates). Other lines: `tick`, `lead`,
`follow`, `lost`, `adopt CLASS holders:fleet`, `forget CLASS`, and `show`, which prints the state.

    python -m tests.golden.detector_script          # writes the scenarios anew; then read the diff
"""

from __future__ import annotations

import sys
from pathlib import Path
from zlib import crc32

import msgspec

from controlplane.core.candidates import Candidates
from controlplane.core.detector import Change, DetectorConfig, HotspotDetector
from controlplane.core.detector_trouble import TroubleConfig
from schemas.bus import ClassCoverage, HotspotRaised, Routed
from tests.core.candidate_helpers import candidates

FOLDER = Path(__file__).parent / "detector"
_INDENT = "    "


def key_of(name: str) -> int:
    """Return the class key that stands for a name and a depth, `hot/4`."""
    return crc32(name.encode()) << 8 | 1


class Script:
    """Plays one scenario.

    Attributes:
        lines: the scenario as it should be: its own lines, and what the detector said.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.detector = HotspotDetector(DetectorConfig(requests_min=3), 0.0, leading=True)
        self._names: dict[int, str] = {}
        self._now_s = 0.0

    def play(self, text: str) -> str:
        """Return the scenario with what the detector says now in place of what it said."""
        for line in text.splitlines():
            if line.startswith(_INDENT):
                continue
            self.lines.append(line)
            words = line.split()
            if words and not line.startswith("#"):
                self._do(words)
                self.detector.check()
        return "\n".join(self.lines) + "\n"

    def _do(self, words: list[str]) -> None:
        if words[0] == "config":
            self._configure(dict(word.split("=") for word in words[1:]))
            return
        assert words[0] == "at", f"a line begins with a time: {' '.join(words)}"
        at_s, words = float(words[1]), words[2:]
        times, every_s = 1, 0.0
        if words[0].startswith("x"):
            times, every_s, words = int(words[0][1:]), float(words[2]), words[3:]
        for number in range(times):
            self._now_s = at_s + number * every_s
            self._say(self._event(words))

    def _configure(self, values: dict[str, str]) -> None:
        names = TroubleConfig.__struct_fields__
        trouble = {name: value for name, value in values.items() if name in names}
        rest = {name: value for name, value in values.items() if name not in names}
        config = msgspec.convert({**rest, "trouble": trouble}, DetectorConfig, strict=False)
        self.detector = HotspotDetector(config, 0.0, leading=True)

    def _event(self, words: list[str]) -> list[Change]:
        verb, detector, now_s = words[0], self.detector, self._now_s
        if verb == "tick":
            return detector.tick(now_s, now_s)
        if verb in ("lead", "follow"):
            detector.leading = verb == "lead"
        elif verb == "lost":
            detector.lost(now_s)
        elif verb == "adopt":
            holders, fleet = map(int, words[2].split(":"))
            depth = int(words[1].partition("/")[2])
            key = self._key(words[1])
            verdict = HotspotRaised(key, depth, [], 0, 0.0, 15.0, (0, 0), holders, fleet)
            detector.adopt(verdict, now_s)
        elif verb == "forget":
            detector.forget(self._key(words[1]))
        elif verb == "show":
            self._show()
        else:
            event, seen = self._routed(words)
            return detector.routed(event, now_s, now_s, lambda: seen)
        return []

    def _routed(self, words: list[str]) -> tuple[Routed, Candidates | None]:
        classes: list[ClassCoverage] = []
        seen: Candidates | None = None
        fields: dict[str, object] = {"fleet": 0}
        waiting = words[1:] if words[0] == "other" else list(words)
        while waiting:
            word = waiting.pop(0)
            if word == "by":
                fields["policy"] = waiting.pop(0)
            elif word == "retry":
                fields["attempt"] = 1
            elif word == "on":
                hits = dict(each.split("*") for each in waiting.pop(0).split(","))
                seen = candidates(list(hits), hits=[int(hit) for hit in hits.values()])
            else:
                holders, fleet = map(int, waiting.pop(0).split(":"))
                inside, outside = waiting.pop(0).split("|")
                depth = int(word.partition("/")[2])
                best = _score(inside), _score(outside)
                classes.append(ClassCoverage(self._key(word), depth, holders, *best))
                fields["fleet"] = fleet
        event = Routed("r", "i", 0.0, classes=classes, **fields)  # type: ignore[arg-type]
        return event, seen

    def _key(self, name: str) -> int:
        key = key_of(name)
        self._names[key] = name
        return key

    def _say(self, changes: list[Change]) -> None:
        for change in changes:
            verb = "raised" if isinstance(change, HotspotRaised) else "cleared"
            on = ""
            if isinstance(change, HotspotRaised) and change.instances:
                on = f" on {','.join(change.instances)}"
            name = self._names[change.key]
            self.lines.append(f"{_INDENT}{self._now_s:g} s: {verb} {name}{on}: {change.reason}")

    def _show(self) -> None:
        names, detector = self._names, self.detector
        counts = {names[key]: detector.window.count(key) for key in names}
        held = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
        alarms = ", ".join(
            f"{names[key]} (streak {alarm.streak})" for key, alarm in detector.alarms.items()
        )
        standing = ", ".join(names[key] for key in detector.standing)
        for title, text in (("counts", held), ("alarmed", alarms), ("standing", standing)):
            total = f" of {detector.window.total}" if title == "counts" else ""
            self.lines.append(f"{_INDENT}{title}: {text or 'none'}{total}")


def _score(text: str) -> float | None:
    return None if text == "-" else float(text)


def main() -> int:
    """Write every scenario anew."""
    for path in sorted(FOLDER.glob("*.txt")):
        before = path.read_text(encoding="utf-8")
        after = Script().play(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{path.name} changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
