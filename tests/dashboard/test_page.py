"""The page in a real browser over a live plane, and over a thousand pretended instances."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import pytest
import pytest_asyncio

from controlplane.bus import NatsBus
from controlplane.dashboard.server import DashboardServer
from lab.children import Child
from lab.load import run_load
from lab.stack import LocalStack, StackOptions
from schemas import subjects
from schemas.bus import HotspotRaised
from schemas.codec import encode
from tests.audit.load import chats
from tests.dashboard.browser import Browser, Page, chromium
from tests.dashboard.pictures import lived, shown

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Yield a browser."""
    path = chromium()
    assert path is not None, "these tests need a browser: apt-get install -y chromium"
    async with Browser(path) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """Yield a live plane."""
    async with LocalStack(StackOptions(engines=3, routers=1)) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dashboard(stack: LocalStack) -> AsyncIterator[str]:
    """Yield the URL of a dashboard process that follows it."""
    command = [sys.executable, "-m", "controlplane.cli.main", "dashboard"]
    child = Child("dashboard", [*command, "--nats", stack.nats_url, "--port", "0"])
    await child.start()
    yield str(child.ready["dashboard"])
    await child.stop()
    child.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, dashboard: str) -> AsyncIterator[Page]:
    """Yield the page, live; at the end it must have nothing to complain of."""
    tab = await browser.page()
    await tab.resize(1280, 900)
    await tab.open(dashboard)
    await tab.until("document.getElementById('link').dataset.state === 'live'", 20.0)
    yield tab
    await tab.close()
    assert tab.problems == []


async def test_the_page_shows_the_fleet(page: Page) -> None:
    """Every instance is a cell with its name, exact and ready."""
    await page.until("document.querySelectorAll('.cell[data-trust=exact]').length === 3")
    names = await page.run("[...document.querySelectorAll('.cell .name')].map(n => n.textContent)")
    assert names == ["engine-0", "engine-1", "engine-2"]
    assert await page.run("document.getElementById('kpi-exact').textContent") == "3 / 3"
    assert await page.run("document.getElementById('policy').textContent") in ("", "multiplicative")


async def test_a_decision_is_shown_within_a_second(page: Page, stack: LocalStack) -> None:
    """From the router's clock to the row in the list; the best of three on a busy machine."""
    await page.run(
        "window.rows = []; new MutationObserver(() => {"
        " const row = document.querySelector('#list .row');"
        " if (row && !rows.some(([id]) => id === row.dataset.request))"
        " rows.push([row.dataset.request, Date.now() / 1000]); })"
        ".observe(document.getElementById('list'), {childList: true}); true"
    )
    delays = []
    for number in range(3):
        sent_s = time.time()
        await run_load(stack.url, chats(1, 1.0, seed=number))
        await page.until(f"rows.length > {number}")
        delays.append(await page.run(f"rows[{number}][1]") - sent_s)
    assert min(delays) < 1.0, delays
    assert await page.run("Number(document.getElementById('kpi-decisions').textContent) > 0")
    assert await page.until("document.querySelector('.chart .line')")


async def test_a_click_opens_the_story(page: Page, stack: LocalStack) -> None:
    """With every candidate and how it ended; Escape closes it, and a link opens it again."""
    await run_load(stack.url, chats(5, 20.0, seed=9))
    await page.until("document.querySelector('#list li[data-outcome=ok]')")
    row = "document.querySelector('#list li[data-outcome=ok] .row')"
    whole = await page.run(f"{row}.dataset.request")
    assert await page.run(f"{row}.querySelector('code').title") == whole, "its end alone is shown"
    await page.click("#list li[data-outcome=ok] .row")
    assert await page.run("document.getElementById('dialog-title').textContent") == (
        f"Request {whole}"
    )
    await page.until("document.querySelectorAll('#dialog .candidates tbody tr').length === 3")
    text = await page.run("document.getElementById('dialog').innerText")
    assert "chosen" in text
    assert "ok 200" in text
    assert "queued +" in text
    link = await page.run("location.hash")
    assert link.startswith("#request=")
    await page.press("Escape", 27)
    await page.until("!document.getElementById('dialog').open")
    await page.until("location.hash === ''")
    await page.run(f"location.hash = {link!r}")
    await page.until("document.querySelector('#dialog[open] .candidates')")
    await page.click("#close")
    await page.until("!document.getElementById('dialog').open")


async def test_a_hotspot_is_shown_while_it_stands(page: Page, stack: LocalStack) -> None:
    """Its card, with shares and time left, and a mark on the instances that it bars."""
    bus = await NatsBus.connect(stack.nats_url, name="detector")
    bucket = await bus.bucket(subjects.VERDICTS)
    hot = HotspotRaised(
        7, 4, ["engine-1"], 1, time.time(), 60.0, (30, 40), 1, 3, reason="30 of 40 requests"
    )
    await bucket.put(subjects.key("tiny", "hotspot-007"), encode(hot))
    await page.until("document.querySelector('.card.hotspot_raised')")
    card = await page.run("document.querySelector('.card.hotspot_raised').innerText")
    await page.until("document.getElementById('kpi-hotspots').textContent === '1'")
    for part in ("0000000000000007", "75% of requests", "33% of instances", "s left", "engine-1"):
        assert part in card
    assert await page.until("document.querySelector('.cell[data-id=engine-1]').dataset.hot === '1'")
    await bucket.delete(subjects.key("tiny", "hotspot-007"))
    await page.until("!document.querySelector('.card.hotspot_raised')")
    await page.until("document.querySelector('.cell[data-id=engine-1]').dataset.hot === '0'")
    await bus.close()


async def test_a_hotspot_that_the_detector_finds_is_shown(page: Page, stack: LocalStack) -> None:
    """A real detector over real traffic that keeps asking the one holder of a prompt."""
    bus = await NatsBus.connect(stack.nats_url, name="test")
    told = asyncio.Event()
    await bus.subscribe(subjects.all_of("hotspot"), lambda *_: told.set())
    command = [sys.executable, "-m", "controlplane.cli.main", "detector"]
    flags = ["--nats", stack.nats_url, "--requests-min", "3", "--log-level", "warning"]
    detector = Child("detector", [*command, *flags])
    await detector.start()
    try:
        # One after the other, so that the holder is always idle, and so always the best; and no
        # more of them than it takes, as each one after the verdict makes a copy: with the third
        # the hotspot is over.
        for planned in chats(60, 1.0, seed=5, hot=1.0):
            (answer,) = await run_load(stack.url, [msgspec.structs.replace(planned, at_s=0.0)])
            assert answer.ok
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), 1.0)
                break
        await page.until("document.querySelector('.card.hotspot_raised .reason')", 20.0)
        assert await page.run("document.querySelectorAll('.cell[data-hot=\"1\"]').length") == 1
    finally:
        await detector.stop()
        detector.close()
        await bus.close()


async def test_all_of_it_can_be_done_with_the_keyboard(page: Page) -> None:
    """The skip link, the map by arrows, an instance by Enter, and back to where one was."""
    await page.press("Tab", 9)
    assert await page.run("document.activeElement.className") == "skip"
    await page.run("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    await page.press("ArrowRight", 39)
    assert await page.run("document.activeElement.dataset.id") == "engine-1"
    await page.until("document.getElementById('inspect').innerText.includes('engine-1')")
    await page.press("Enter", 13)
    await page.until("document.getElementById('dialog').open")
    assert await page.run("document.getElementById('dialog-title').textContent") == "engine-1"
    await page.until("document.querySelector('#dialog .facts')")
    await page.press("Escape", 27)
    await page.until("!document.getElementById('dialog').open")
    assert await page.run("document.activeElement.dataset.id") == "engine-1"
    await page.press("End", 35)
    assert await page.run("document.activeElement.dataset.id") == "engine-2"


async def test_instances_are_coloured_by_what_is_chosen(page: Page) -> None:
    """Batch, queue, KV use, hits or trust; the legend says which."""
    await page.click("label[for=metric-trust]")
    assert await page.until("document.getElementById('cells').dataset.metric === 'trust'")
    assert "resyncing" in await page.run("document.getElementById('legend').textContent")
    await page.click("label[for=metric-kv]")
    assert "100%" in await page.until("document.getElementById('legend').textContent")


async def test_decisions_can_be_filtered_and_held(page: Page, stack: LocalStack) -> None:
    """By words of any kind; while paused, what is newer is counted and not shown."""
    await run_load(stack.url, chats(4, 20.0, seed=3))
    await page.until("document.querySelectorAll('#list .row').length >= 4")
    await page.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'no such thing';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    assert await page.run("document.querySelectorAll('#list .row').length") == 0
    assert await page.run("!document.getElementById('empty').hidden")
    await page.run(
        "(() => { const f = document.getElementById('filter'); f.value = 'engine-';"
        " f.dispatchEvent(new Event('input')); })()"
    )
    assert await page.run("document.querySelectorAll('#list .row').length") >= 4
    await page.click("#pause")
    newest = "document.querySelector('#list .row').dataset.request"
    before = await page.run(newest)
    await run_load(stack.url, chats(2, 20.0, seed=4))
    await page.until("document.getElementById('held').textContent === '2 newer'")
    assert await page.run(newest) == before
    await page.click("#pause")
    await page.until(f"{newest} !== {before!r}")
    assert await page.run("document.getElementById('held').hidden")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (820, 1180), (390, 844), (320, 640)])
async def test_nothing_sticks_out_on_any_screen(page: Page, width: int, height: int) -> None:
    """From a desktop to a small phone there is nothing to scroll sideways."""
    await page.resize(width, height, phone=width < 500)
    await page.until(f"innerWidth === {width}")
    assert await page.run("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_texts_can_be_read_in_both_themes(page: Page, theme: str) -> None:
    """Plain, muted, marked and warning texts, and those in cells, have a contrast of 4.5."""
    await page.theme(theme)
    await page.until("document.querySelector('.cell')")
    ratios = await page.run(CONTRASTS)
    assert min(ratios.values()) >= 4.5, ratios


CONTRASTS = """(() => {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (colour) => {
    probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);  // over what was there
    const parts = [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const style = getComputedStyle(document.documentElement);
  const cell = document.querySelector('.cell');
  cell.style.transition = 'none';
  cell.style.setProperty('--v', 1);
  const [ink, ground] = [cell, cell].map((node, which) =>
    getComputedStyle(node)[which ? 'backgroundColor' : 'color']);
  const small = Number(getComputedStyle(cell.querySelector('.note')).opacity);
  const value = (name) => light(style.getPropertyValue(name).trim());
  const pairs = [['--text', '--surface'], ['--text', '--bg'], ['--muted', '--surface'],
    ['--muted', '--bg'], ['--muted', '--sunken'], ['--accent', '--surface'],
    ['--accent', '--accent-soft'], ['--warm', '--warm-soft'], ['--bad', '--surface'],
    ['--text', '--cell']];
  const ratio = (x, y) => (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  const found = pairs.map(([front, back]) =>
    [`${front} on ${back}`, ratio(value(front), value(back))]);
  probe.globalAlpha = 1;
  const under = light(ground);
  probe.globalAlpha = small;
  found.push(['small text on the fullest cell', ratio(light(ink), under)]);
  return Object.fromEntries(found);
})()"""


async def test_the_theme_can_be_chosen_and_is_remembered(page: Page, dashboard: str) -> None:
    """A button switches; the next visit has the same theme."""
    await page.theme("light")
    await page.click("#theme")
    assert await page.run("document.documentElement.dataset.theme") == "dark"
    await page.open(dashboard)
    await page.until("document.documentElement.dataset.theme === 'dark'")
    await page.run("localStorage.clear()")


async def test_a_lost_bus_is_said(browser: Browser) -> None:
    """The page says so, and says when it is back."""
    server, fleet, service = await shown(3, 0.5, 20)
    tab = await browser.page()
    await tab.open(f"http://127.0.0.1:{server.port}/")
    await tab.until("document.getElementById('link').dataset.state === 'live'")
    service._bus.cut()  # type: ignore[attr-defined]
    await tab.until("document.getElementById('link').textContent === 'the bus is lost'")
    service._bus.heal()  # type: ignore[attr-defined]
    await tab.until("document.getElementById('link').dataset.state === 'live'")
    assert tab.problems == []
    await tab.close()
    await server.stop()
    await service.stop()
    del fleet


async def test_a_thousand_instances_are_each_a_cell(browser: Browser) -> None:
    """They fit on a screen, and the page keeps up with them."""
    server, fleet, service = await shown(1024, 1.0, 100)
    tab = await browser.page()
    await tab.resize(1280, 900)
    await tab.open(f"http://127.0.0.1:{server.port}/")
    await lived(fleet, 2.0, 100)
    assert await tab.run("document.querySelectorAll('.cell').length") == 1024
    height, side = await tab.run(
        "[document.getElementById('cells').offsetHeight,"
        " document.querySelector('.cell').offsetWidth]"
    )
    assert height < 800
    assert side >= 12
    frames = await tab.run(
        "new Promise((done) => { let n = 0; const began = performance.now(); const step = () => {"
        " n += 1; if (performance.now() - began > 500) done(n); else requestAnimationFrame(step);"
        " }; step(); })"
    )
    assert frames > 2
    await lived(fleet, 1.0, 100)
    assert await tab.run("document.getElementById('link').dataset.state") == "live"
    assert tab.problems == []
    await tab.close()
    await server.stop()
    await service.stop()


async def test_the_page_survives_a_restart_of_the_dashboard(browser: Browser) -> None:
    """It says that it is cut off, and goes on by itself."""
    server, _, service = await shown(3, 0.1, 20)
    tab = await browser.page()
    await tab.open(f"http://127.0.0.1:{server.port}/")
    await tab.until("document.querySelectorAll('.cell').length === 3", 20.0)
    await server.stop()
    await tab.until("document.getElementById('link').dataset.state === 'lost'", 20.0)
    again = DashboardServer(service, "127.0.0.1", server.port)
    await again.start()
    await tab.until("document.getElementById('link').dataset.state === 'live'", 30.0)
    await tab.close()
    await again.stop()
    await service.stop()
