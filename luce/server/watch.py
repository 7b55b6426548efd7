"""Says what the server tells of itself: metrics for Prometheus, and what its log says of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from luce.decode.stats import Stats
from luce.server.log import Log, noted

if TYPE_CHECKING:
    from luce.server.models import Models

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
MAX_UNKNOWN, MAX_NAME = 256, 64  # So many unknown fields are told of, with so many letters of their names.
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass
class Usage:
    """These are the tokens of a request. `cached` counts those of its prompt that were not read again, and `again`
    those that were, although an earlier prompt began with them too. Beside `prompt` `left_out` tokens of it were not
    read at all; None: all are. Of its `images` as many were `encoded`: the rows of the others were kept."""

    prompt: int = 0
    cached: int = 0
    again: int = 0
    completion: int = 0
    reasoning: int = 0
    left_out: int | None = None
    images: int = 0
    encoded: int = 0


class Watch:
    """Counts what happens. `form` is that of the log on stderr."""

    def __init__(self, form: str = "text"):
        self.log = Log(form)
        self._unknown = set[tuple[str, str]]()  # These fields of paths were told of.
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"luce:{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"luce:{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"luce:{name}", what, buckets=buckets, registry=registry)

        self._running = gauge("num_requests_running", "Requests that have a sequence.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a sequence.")
        self._processing = gauge("requests_processing", "Requests that have a sequence.")
        self._deferred = gauge("requests_deferred", "Requests that wait for a sequence.")
        self._replica_running = gauge("replica_requests_running", "Requests that have a sequence.", "model", "replica")
        self._replica_waiting = gauge("replica_requests_waiting", "Requests that wait.", "model", "replica")
        self._replica_failed = gauge("replica_failed", "1 where its device has failed, else 0.", "model", "replica")
        self._pages = gauge("kv_cache_usage_perc", "Part of the KV pages that is taken, 0..1.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were not read again.")
        self._cache_bytes = gauge("prefix_cache_bytes", "Bytes of kept beginnings.", "place")
        self._cache_entries = gauge("prefix_cache_entries", "Beginnings that are kept.", "place")
        self._experts = gauge("expert_reads", "Experts that rows of steps have read, by where they lay.", "place")
        self._moved = gauge("expert_moves", "Experts that were moved to a slot on the device.")
        self._first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._between = histogram("inter_token_latency_seconds", "Between tokens of a request.", _BETWEEN)
        self._waited = histogram("request_queue_time_seconds", "From the request to its start.", _SECONDS)
        self._latency = histogram("e2e_request_latency_seconds", "From the request to its end.", _SECONDS)
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        self._requests = counter("requests", "Requests that ended, by why.", "finished_reason")

    def refused(self) -> None:
        """Counts a request that was turned away since the queue is full."""
        self._requests.labels("refused").inc()

    def unknown_fields(self, path: str, names: Sequence[str]) -> None:
        """Writes a line for each field that was unknown at a path, once."""
        for name in names:
            at = path[:MAX_NAME], name[:MAX_NAME]
            if at not in self._unknown and len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(at)
                self.log.message(2, f"{at[0]} has no field {at[1]!r}: it is ignored")

    def started(self, waited: float, prompt: int, cached: int) -> None:
        """Counts a request that has a sequence, and the tokens of its prompt that need not be read again."""
        self._waited.observe(waited)
        self._queries.inc(prompt)
        self._hits.inc(cached)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens(self, n: int, seconds: float) -> None:
        """Counts n tokens that came together, so many seconds after those before them."""
        for _ in range(n):
            self._between.observe(seconds / n)

    def ended(
        self,
        usage: Usage,
        stats: Stats | None,
        reason: str,
        seconds: float,
        first: float | None,
        model: str,
        replica: str | None = None,
    ) -> None:
        """Counts an answer that is over, and tells of it in its request's line. The `replica` is named where its
        model has several."""
        self._requests.labels(reason if len(reason) < 20 else "failed").inc()
        self._latency.observe(seconds)
        self._prompt.inc(usage.prompt)
        self._generated.inc(usage.completion)
        if stats:
            self._drafted.inc(stats.drafted)
            self._accepted.inc(stats.accepted)
        if record := noted():
            record.add(
                {
                    "model": model,
                    "prompt": usage.prompt,
                    "cached": usage.cached,
                    "again": usage.again,
                    "prefill_s": stats.prefill_s if stats else None,
                    "generated": usage.completion,
                    "tok_per_s": stats.tok_per_s if stats else None,
                    "accepted_length": stats.mean_accepted_length if stats else None,
                    "first_token_s": first,
                    "reason": reason,
                }
                | ({} if usage.left_out is None else {"left_out": usage.left_out})
                | ({} if replica is None else {"replica": replica})
                | ({"images": usage.images, "encoded": usage.encoded} if usage.images else {})
            )

    def scrape(self, models: Models) -> bytes:
        """Returns all metrics as Prometheus reads them."""
        served = [(name, slot.served) for name, slot in models.slots.items() if slot.served]
        replicas = [(name, each) for name, model in served for each in model.replicas.all]
        for gauge in (self._replica_running, self._replica_waiting, self._replica_failed):
            gauge.clear()  # Those of models that are not loaded now are told of no more.
        for name, each in replicas:
            self._replica_running.labels(name, each.name).set(each.loaded.scheduler.running)
            self._replica_waiting.labels(name, each.name).set(each.loaded.scheduler.waiting)
            self._replica_failed.labels(name, each.name).set(bool(each.failed))
        loaded = [each.loaded for _, each in replicas]
        running = sum(each.scheduler.running for each in loaded)
        waiting = sum(each.scheduler.waiting for each in loaded)
        for gauge, value in ((self._running, running), (self._processing, running),
                             (self._waiting, waiting), (self._deferred, waiting)):  # fmt: skip
            gauge.set(value)
        pages = sum(each.info.n_pages for each in loaded)
        free = sum(each.scheduler.pages_free for each in loaded)
        self._pages.set((pages - free) / pages if pages else 0.0)
        caches = [each.cache for each in loaded if each.cache]
        for place in ("device", "host", "disk"):
            sizes = [cache.sizes()[place] for cache in caches]
            self._cache_entries.labels(place).set(sum(count for count, _ in sizes))
            self._cache_bytes.labels(place).set(sum(size for _, size in sizes))
        uses = [each.engine.experts.use for each in loaded if each.engine.experts]
        if uses:
            hits = sum(use.hits for use in uses)
            self._experts.labels("device").set(hits)
            self._experts.labels("host").set(sum(use.read for use in uses) - hits)
            self._moved.set(sum(use.moved for use in uses))
        return generate_latest(self.registry)
