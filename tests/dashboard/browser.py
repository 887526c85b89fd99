"""Debian's Chromium without a window, driven by its own protocol: enough of it for these tests."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
_LISTENING = re.compile(rb"DevTools listening on (ws://\S+)")
START_S_MAX = 30.0
CALL_S_MAX = 20.0


def chromium() -> str | None:
    """Return the browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab.

    Attributes:
        problems: errors and warnings of its console, exceptions, and requests that failed.
    """

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._session = session
        self._target = target
        self._loaded = asyncio.Event()

    async def call(self, method: str, seconds: float = CALL_S_MAX, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return await self._browser.call(method, self._session, seconds, **params)

    async def open(self, url: str) -> None:
        """Go to a page."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        # A tab behind others has no focus otherwise.
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), CALL_S_MAX)

    async def close(self) -> None:
        """Close the tab: a browser keeps no more than six connections to a host."""
        await self._browser.call("Target.closeTarget", targetId=self._target)

    async def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Show the page in a window of this size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    async def theme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": name}],
        )

    async def run(self, script: str, seconds: float = CALL_S_MAX) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", seconds, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 10.0) -> Any:
        """Return an expression's value once it is true; fail if it is not in time."""
        waiting = (
            "new Promise((done, fail) => { const began = performance.now(); const look = () => {"
            f" const value = ({script}); if (value) return done(value === Object(value) || value);"
            f" if (performance.now() - began > {1e3 * seconds}) return done(null);"
            " setTimeout(look, 20); }; look(); })"
        )
        value = await self.run(waiting, seconds + CALL_S_MAX)
        if not value:
            text = await self.run("document.body.innerText.slice(0, 1500)")
            raise AssertionError(f"not within {seconds} s: {script}\n{self.problems}\n{text}")
        return value

    async def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        spot = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=spot[0],
                y=spot[1],
                button="left",
                clickCount=1,
            )

    async def press(self, key: str, code: int = 0) -> None:
        """Press a key that has a name, such as `Tab` or `ArrowRight`."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page, as PNG."""
        answer = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Take what the browser says of this tab."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            self.problems.append(f"{params['response']['status']} {params['response']['url']}")


class Browser:
    """A browser process; an async context manager."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def __aenter__(self) -> Browser:
        self._process = await asyncio.create_subprocess_exec(
            self._path,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
            *("--remote-debugging-port=0", f"--user-data-dir={self._folder.name}", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(START_S_MAX):
            url = await self._url()
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(url, max_msg_size=0)
        self._reading = asyncio.create_task(self._read())
        self._draining = asyncio.create_task(self._drain())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._http.close()
        for task in (self._reading, self._draining):
            task.cancel()
        await asyncio.wait([self._reading, self._draining])
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._folder.cleanup()

    async def page(self) -> Page:
        """Open a tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        session = attached["sessionId"]
        page = self._pages[session] = Page(self, session, target["targetId"])
        return page

    async def call(
        self, method: str, session: str = "", seconds: float = CALL_S_MAX, **params: Any
    ) -> dict[str, Any]:
        """Call a method of the protocol, and wait `seconds` for its answer."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        await self._socket.send_json(message)
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise AssertionError(
                f"the browser did not answer {method} within {seconds} s: {params}"
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def _url(self) -> str:
        assert self._process.stderr is not None
        said = b""
        async for line in self._process.stderr:
            said += line
            found = _LISTENING.search(line)
            if found is not None:
                return found[1].decode()
        raise AssertionError(f"the browser did not start: {said.decode(errors='replace')}")

    async def _drain(self) -> None:
        assert self._process.stderr is not None
        async for _ in self._process.stderr:
            continue

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._waiting.pop(data["id"], None)
                if answer is None or answer.done():
                    continue  # too late: nobody waits for it
                if "error" in data:
                    answer.set_exception(AssertionError(str(data["error"])))
                else:
                    answer.set_result(data["result"])
            elif data.get("sessionId") in self._pages:
                self._pages[data["sessionId"]].heard(data["method"], data["params"])
