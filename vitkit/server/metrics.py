"""The Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one app; each has its own registry, so that one process can run several apps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitkit_requests", "Requests answered.", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "vitkit_request_seconds",
            "Time from the start of a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge("vitkit_requests_in_progress", "Requests in progress.", registry=self.registry)
        self.batch_size = Histogram(
            "vitkit_batch_size", "Images per batch.", ["work"], buckets=SIZES, registry=self.registry
        )
        self.batch_seconds = Histogram(
            "vitkit_batch_seconds", "Time the model takes per batch.", ["work"], buckets=SECONDS, registry=self.registry
        )
        self.waiting = Gauge(
            "vitkit_images_waiting", "Images accepted and not yet answered.", ["work"], registry=self.registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
