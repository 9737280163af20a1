"""``Webhook``: alerts posted to an address, off the training thread."""

from __future__ import annotations

import atexit
import json
import logging
import math
import queue
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from auditor.record.actions import Monitored, checked_level, reaches

if TYPE_CHECKING:
    from auditor.measure.grading import Alert

log = logging.getLogger("auditor")

QUEUE_ALERTS: Final = 64
"""Alerts that may wait to be posted; beyond it they are dropped and counted."""

FORMATS: Final = ("json", "slack")


class Webhook:
    """Post alerts as JSON, and afterwards that they are over.

    A daemon thread posts, so that a slow server never holds up training. What fails is counted in
    ``failures`` and not tried again; what does not fit on the queue, in ``dropped``. When Python
    exits, waiting alerts are given ``timeout_s`` to be posted. An address often is a secret: only
    its scheme and host are ever logged.

    Args:
        url: http or https, without credentials. Redirects are not followed.
        format: ``json`` posts the alert's fields, ``slack`` ``{"text": message}``.
        at: the level from which to post, watch or danger.
        timeout_s: of the connection, and of every wait for the server.

    Raises:
        ValueError: an argument is out of range, or the address is none that can be posted to.
    """

    def __init__(
        self, url: str, format: str = "json", at: str = "danger", timeout_s: float = 5.0
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        self._url, self.place = url, _place_of(url)
        self._format = format
        self._at = checked_level(at)
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[bytes] = queue.Queue(QUEUE_ALERTS)
        self._thread: threading.Thread | None = None
        self._raised: set[str] = set()  # signals whose alerts were posted and are not over
        self.posted = self.failures = self.dropped = 0

    def __repr__(self) -> str:
        return f"Webhook({self.place})"

    def __call__(self, alert: Alert, monitor: Monitored) -> None:
        if reaches(alert, self._at):
            self._raised.add(alert.signal)
        elif alert.level == "recovered" and alert.signal in self._raised:
            self._raised.discard(alert.signal)
        else:
            return
        body = {"text": f"auditor: {alert.message}"} if self._format == "slack" else _fields(alert)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="auditor-webhook", daemon=True)
            self._thread.start()
            atexit.register(self.flush, self._timeout_s)
        try:
            self._waiting.put_nowait(json.dumps(body).encode())
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("auditor: alerts for %s are dropped and counted", self.place)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until nothing is left to post; False when it took too long."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, timeout_s
            )

    def _work(self) -> None:
        opener = urllib.request.build_opener(_NoRedirects)
        while True:
            body = self._waiting.get()
            try:
                request = urllib.request.Request(
                    self._url, data=body, headers={"Content-Type": "application/json"}
                )
                with opener.open(request, timeout=self._timeout_s):
                    self.posted += 1
            except Exception as error:
                self._failed(error)
            finally:
                self._waiting.task_done()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures > 1:
            return
        # Not the error's own text, which may quote the address.
        what = type(error).__name__
        if isinstance(error, urllib.error.HTTPError):
            what = f"status {error.code}"
        elif isinstance(error, urllib.error.URLError):
            what = f"{what} ({type(error.reason).__name__})"
        log.warning(
            "auditor: posting an alert to %s failed and is counted from now on; training is not "
            "affected: %s",
            self.place,
            what,
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the alert to an address that nobody chose."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _place_of(url: str) -> str:
    """Scheme and host of an address; raises ``ValueError``, which does not quote the rest of it."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        raise ValueError("url cannot be read as an address") from None
    if scheme not in ("http", "https") or not host:
        raise ValueError("url must be an http or https address with a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"url must not hold credentials (host {host})")
    return f"{scheme}://{host}" + (f":{port}" if port is not None else "")


def _fields(alert: Alert) -> dict[str, Any]:
    return {
        "step": alert.step,
        "level": alert.level,
        "grade": alert.grade,
        "ratio": alert.ratio if math.isfinite(alert.ratio) else None,
        "layer": alert.layer,
        "signal": alert.signal,
        "message": alert.message,
    }
