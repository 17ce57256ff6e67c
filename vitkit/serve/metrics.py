"""What a server counts, in Prometheus' words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counters of one app; each app has its own registry, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitkit_requests", "Requests answered.", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "vitkit_request_seconds",
            "Time from a request's first byte to its last answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.inside = Gauge("vitkit_requests_inside", "Requests that are being answered.", registry=self.registry)
        self.batch_size = Histogram(
            "vitkit_batch_size", "Images in a batch.", ["work"], buckets=SIZES, registry=self.registry
        )
        self.batch_seconds = Histogram(
            "vitkit_batch_seconds", "Time of the model for a batch.", ["work"], buckets=SECONDS, registry=self.registry
        )
        self.waiting = Gauge(
            "vitkit_images_waiting", "Images accepted and not yet answered.", ["work"], registry=self.registry
        )

    def batch(self, work: str, size: int, seconds: float) -> None:
        """Count one batch.

        Args:
            work: what was done (`predict`, `embed`, `explain`).
            size: its images.
            seconds: its time.
        """
        self.batch_size.labels(work).observe(size)
        self.batch_seconds.labels(work).observe(seconds)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)
