"""The page that stands at the demo's address while the model and the real page are loaded."""

from __future__ import annotations

import html
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The real page lacks this header, so the browser knows when to load it.
_MARK = "X-Vlmserve-Starting"
_PAGE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>vlmserve: starting</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto 0; max-width: 34rem; padding: 0 1rem; }}
  progress {{ width: 100%; }}
</style>
<h1>vlmserve</h1>
<p id="doing">{doing} ({seconds:.0f} s so far)</p>
<progress></progress>
<p>The page appears here by itself. Errors are shown on the terminal.</p>
<script>
  let silent = 0;
  async function look() {{
    try {{
      const reply = await fetch(location.href, {{cache: "no-store"}});
      if (!reply.headers.has("{mark}")) return location.reload();
      const there = new DOMParser().parseFromString(await reply.text(), "text/html");
      document.getElementById("doing").textContent = there.getElementById("doing").textContent;
      silent = 0;
    }} catch {{
      if (++silent > 20) document.getElementById("doing").textContent = "It has ended; the terminal says why.";
    }}
    setTimeout(look, 500);
  }}
  setTimeout(look, 500);
</script>
<noscript><meta http-equiv="refresh" content="2"></noscript>
</html>
"""


class WaitingPage(ThreadingHTTPServer):
    """Answers every request with a page that shows the current activity. A context manager.

    listener: a bound socket. It is closed at the end, and the address is free then.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, doing: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_activate()
        self.doing = doing
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the page."""
        seconds = time.monotonic() - self._started
        return _PAGE.format(doing=html.escape(self.doing), seconds=seconds, mark=_MARK)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    server: WaitingPage

    def do_GET(self) -> None:
        content = self.server.text().encode()
        self.send_response(503)
        self.send_header(_MARK, "1")
        self.send_header("Retry-After", "1")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
