"""A headless Chromium, driven over two pipes by its DevTools protocol: no port, no driver package."""

import contextlib
import fcntl
import json
import os
import select
import subprocess
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)
ANSWER_SECONDS = 120.0  # a page of this report takes a second; a Chromium short of memory may never answer
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "Tab": 9}


class Browser:
    """One Chromium that finds no host; use it as a context manager."""

    def __init__(self, executable: str, profile: Path) -> None:
        read_theirs, write_ours = os.pipe()
        read_ours, write_theirs = os.pipe()
        command = [executable, *FLAGS.split(), f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_theirs, write_theirs)]
        launcher = f'exec "$0" "$@" 3<&{far[0]} 4>&{far[1]}'  # the protocol's two descriptors are 3 and 4
        started = ["/bin/bash", "-c", launcher, *command]
        self._process = subprocess.Popen(started, pass_fds=far, stderr=subprocess.DEVNULL)
        for end in (read_theirs, write_theirs, *far):
            os.close(end)
        self._send_end, self._receive_end = write_ours, read_ours
        self._unread, self._last_id = b"", 0
        self.events: deque[dict[str, Any]] = deque()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):  # it may be gone, or hang
            self.call("Browser.close")
            self._process.wait(timeout=20)
        self._process.kill()
        self._process.wait()
        os.close(self._send_end)
        os.close(self._receive_end)

    def answers(self) -> bool:
        """Whether it is still there; one that died or hangs is of no use to the next test."""
        try:
            return bool(self.call("Browser.getVersion"))
        except (AssertionError, OSError):
            return False

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result; events that arrive meanwhile are kept in `events`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._send_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if "method" in answer:
                self.events.append(answer)
            elif answer["id"] == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._receive_end], [], [], ANSWER_SECONDS)
            assert ready, f"Chromium has not answered for {ANSWER_SECONDS:g} s"
            part = os.read(self._receive_end, 1 << 20)
            assert part, "Chromium has gone"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """One page, opened from a file and loaded; `requests` lists every address that it requested."""

    def __init__(self, browser: Browser, file: Path, *, width: int = 1280, dark: bool = False) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.call("Network.enable")
        self.call("Page.enable")
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.as_uri())
        self.evaluate(
            "new Promise((done) => { (function look() {"
            "location.href !== 'about:blank' && document.readyState === 'complete' ? done(1) : setTimeout(look, 20);"
            "})(); })"
        )

    def close(self) -> None:
        """Give its memory back."""
        self._browser.call("Target.closeTarget", targetId=self._target)
        self._browser.events.clear()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key as the keyboard sends it, to whatever has the focus."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    @property
    def requests(self) -> list[str]:
        """Addresses that would leave the file: everything but itself and what is written in it."""
        self.call("Runtime.evaluate", expression="0")
        asked = [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent" and event.get("sessionId") == self._session
        ]
        return [address for address in asked[1:] if not address.startswith(("data:", "blob:"))]
