"""The pictures in docs/screenshots, of a pretended fleet.

python -m tests.dashboard.pictures          # needs Chromium
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from PIL import Image

from controlplane.bus.memory_bus import MemoryBroker
from controlplane.dashboard.server import DashboardServer
from controlplane.dashboard.service import DashboardService
from tests.dashboard.browser import Browser, Page, chromium
from tests.dashboard.pretend import PretendedFleet

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"
TENANTS = ("acme", "globex", "initech")


async def shown(
    instances: int, seconds: float, per_s: int, tenants: tuple[str, ...] = ()
) -> tuple[DashboardServer, PretendedFleet, DashboardService]:
    """Return a dashboard that has watched a fleet for a while."""
    broker = MemoryBroker()
    service = DashboardService(broker.bus())
    await service.start()
    server = DashboardServer(service, "127.0.0.1", 0)
    await server.start()
    fleet = PretendedFleet(broker, instances, tenants=tenants)
    await fleet.register()
    await asyncio.sleep(0.1)
    await lived(fleet, seconds, per_s)
    return server, fleet, service


async def lived(fleet: PretendedFleet, seconds: float, per_s: int) -> None:
    """Let a fleet serve, in real time."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    step = 0
    while loop.time() < until_s:
        await asyncio.sleep(0.05)
        fleet.step(0.05, fleet.rng.randrange(per_s // 10 + 1))
        step += 1
        if step % 10 == 1:
            fleet.loads()
            fleet.heartbeats(fleet.names[len(fleet.names) // 2])


async def photo(page: Page, name: str) -> None:
    """Take a picture, in as few colours as it needs: repositories keep every version."""
    path = FOLDER / name
    await page.picture(path)
    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
    few.save(path, optimize=True)


async def main() -> int:
    """Take all pictures; returns the exit status."""
    path = chromium()
    if path is None:
        print("there is no Chromium here", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    async with Browser(path) as browser:
        await large(browser)
        await small(browser)
    return 0


async def small(browser: Browser) -> None:
    """A dozen instances: cards, a hotspot, a story, light and dark, and a phone."""
    server, fleet, service = await shown(12, 20.0, 60, TENANTS)
    await fleet.verdicts()
    page = await browser.page()
    url = f"http://127.0.0.1:{server.port}/"
    for theme in ("light", "dark"):
        await page.theme(theme)
        await page.resize(1440, 1080)
        await page.open(url)
        await lived(fleet, 4.0, 60)
        await photo(page, f"dashboard-{theme}.png")
    await hotspots(page, fleet)
    await story(page, fleet)
    await page.resize(390, 844, phone=True)
    await page.theme("light")
    await page.open(url)
    await lived(fleet, 3.0, 60)
    await photo(page, "dashboard-phone.png")
    await server.stop()
    await service.stop()
    assert page.problems == [], page.problems


async def hotspots(page: Page, fleet: PretendedFleet) -> None:
    """The lower part of the page: a hotspot, an operator's orders, and the tenants."""
    await page.theme("light")
    await lived(fleet, 1.0, 60)
    await page.run("document.querySelector('.verdicts').scrollIntoView({block: 'end'})")
    await lived(fleet, 1.0, 60)
    await photo(page, "dashboard-hotspots.png")


async def story(page: Page, fleet: PretendedFleet) -> None:
    """The story of a request that has ended."""
    await page.theme("light")
    await lived(fleet, 3.0, 60)
    await page.until("document.querySelector('#list li[data-outcome=ok] .row')")
    await page.run("document.querySelector('#list li[data-outcome=ok] .row').click()")
    await page.until("document.querySelector('#dialog .candidates')")
    await lived(fleet, 0.5, 30)
    await photo(page, "dashboard-story.png")


async def large(browser: Browser) -> None:
    """A thousand instances, each still a cell of its own."""
    server, fleet, service = await shown(1024, 10.0, 500)
    page = await browser.page()
    await page.theme("dark")
    await page.resize(1440, 1080)
    await page.open(f"http://127.0.0.1:{server.port}/")
    await lived(fleet, 6.0, 500)
    await page.run("document.querySelectorAll('.cell')[333].focus()")
    await lived(fleet, 1.0, 500)
    await photo(page, "dashboard-1024.png")
    await server.stop()
    await service.stop()
    assert page.problems == [], page.problems


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
