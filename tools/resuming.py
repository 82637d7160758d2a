"""A client of event streams that comes back: it reads on behind its last event, whatever was killed."""

from __future__ import annotations

import http.client
import json
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

PAUSE_S = 0.3
"""Before a broken connection is made anew."""


class StreamLost(Exception):
    """The stream could not be gone on with: what the server said, or that it said nothing for too long."""


class ResumingStream:
    """One streamed chat answer over as many connections as it takes."""

    def __init__(self, url: str, body: Mapping[str, object], patience_s: float = 60.0) -> None:
        """`body` is a request's, without `stream`; `patience_s`: how long it may make no progress."""
        split = urlsplit(url)
        self._address = (split.hostname or "", split.port)
        self._body = json.dumps({**body, "stream": True})
        self._patience_s = patience_s
        self._last_id = ""
        self._pieces: list[str] = []
        self._done = False
        self.resumed = 0
        """Connections after the first that went on with something."""

    def read(self) -> str:
        """The whole text; StreamLost when there is none."""
        progress = time.monotonic()
        while True:
            seen = self._last_id
            try:
                self._connect()
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = "the connection ended early"
            if self._done:
                return "".join(self._pieces)
            if self._last_id != seen:
                progress = time.monotonic()
            if time.monotonic() - progress > self._patience_s:
                raise StreamLost(f"no progress within {self._patience_s:g} s: {reason}")
            time.sleep(PAUSE_S)

    def _connect(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=self._patience_s)
        headers = {"content-type": "application/json", "x-estafet-resumable": "true"}
        if self._last_id:
            headers["last-event-id"] = self._last_id
            self.resumed += 1
        try:
            connection.request("POST", "/v1/chat/completions", self._body, headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read().decode(errors="replace")[:200]
                if response.status in (429, 503) and not self._last_id:
                    return  # not now: it is asked again
                raise StreamLost(f"HTTP {response.status}: {said}")
            fields: dict[str, str] = {}
            for line in response:
                text = line.decode().rstrip("\n")
                if text:
                    name, _, value = text.partition(": ")
                    fields[name] = value
                else:
                    self._take(fields)
                    fields = {}
        finally:
            connection.close()

    def _take(self, fields: dict[str, str]) -> None:
        """One whole event: what was cut off in the middle does not count, and comes again."""
        data = fields.get("data")
        if data == "[DONE]":
            self._done = True
        elif data is not None:
            event = json.loads(data)
            if "error" in event:
                raise StreamLost(event["error"]["message"])
            self._pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        self._last_id = fields.get("id", self._last_id)
