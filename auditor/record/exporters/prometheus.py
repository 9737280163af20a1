"""The latest metrics for a Prometheus server to scrape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from auditor.record.exporting import PER_STEP, required


class Prometheus:
    """Serve the latest metrics over HTTP, at ``/metrics``.

    A metric is a gauge of its name, with ``_`` for ``/``; the block is a label:
    ``auditor/probe/token_rank/raw/layer_03`` becomes
    ``auditor_probe_token_rank_raw{layer="3"}``. ``auditor_step`` is the step of the latest point.
    Metrics of the latest sampled step only are shown, so that none outlives its signal.

    The endpoint has no authentication. By default it is reachable from this machine alone. While
    the port is in use by another process, each point is a counted failure.

    Args:
        port: the port, 0 for any free one; the attribute ``port`` is the one in use.
        host: the address to listen on.

    Raises:
        ImportError: prometheus-client is not installed.
    """

    def __init__(self, port: int = 9464, host: str = "127.0.0.1") -> None:
        self._client = required("prometheus_client", extra="prometheus")
        self.port = port
        self._host = host
        # Each is replaced and never changed: a scrape reads them from another thread.
        self._step: dict[str, float] = {}
        self._sampled: dict[str, float] = {}
        self._server: Any = None

    def export(self, step: int, values: Mapping[str, float]) -> None:
        if values.keys() <= PER_STEP:
            self._step = {**self._step, **values, "auditor/step": step}
        else:
            self._sampled = dict(values)
            self._step = {**self._step, "auditor/step": step}
        if self._server is None:
            registry = self._client.CollectorRegistry()
            registry.register(self)
            self._server, _ = self._client.start_http_server(self.port, self._host, registry)
            self.port = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """The gauges, for the registry."""
        gauges: dict[str, Any] = {}
        for metric, value in {**self._step, **self._sampled}.items():
            place, layer = _place_and_layer(metric)
            name = re.sub(r"[^a-zA-Z0-9_]", "_", place)
            if name not in gauges:
                gauges[name] = self._client.Metric(name, place, "gauge")
            gauges[name].add_sample(name, {} if layer is None else {"layer": layer}, value)
        yield from gauges.values()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _place_and_layer(metric: str) -> tuple[str, str | None]:
    found = re.fullmatch(r"(.*)/layer_(\d+)", metric)
    return (metric, None) if found is None else (found[1], str(int(found[2])))
