"""A manager's counters for Prometheus, and the way back from its text to rows (needs prometheus-client).

from prometheus_client import REGISTRY, start_http_server
REGISTRY.register(Collector(manager))
start_http_server(9400)                     # then: qkv stats http://localhost:9400/metrics
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as Base

from qkv.account import account
from qkv.errors import InputError
from qkv.manager import KVManager

_STATES = ("free", "held", "evictable", "kept")
_COUNTERS = {
    "queries": "Lookups by name.",
    "query_tokens": "Tokens that lookups asked for.",
    "hit_tokens": "Tokens that lookups found.",
    "hit_blocks": "Blocks that lookups found.",
    "refused": "Lookups or publications that met an equal key of other content.",
    "duplicates": "Blocks not published because an equal one already was.",
    "over_quota": "Blocks not published because their namespace's quota was used up.",
    "evictions": "Published blocks that gave up their place.",
    "regretted": "Evicted blocks that were asked for again.",
}


class Collector(Base):
    """What `manager` holds and has done, at every scrape. Takes no lock but the pool's, for microseconds.

    name   label `cache` of every sample; model: as for `qkv.account.account`
    """

    def __init__(self, manager: KVManager, name: str = "default", model: Any = None) -> None:
        self._manager, self._name, self._model = manager, name, model

    def collect(self) -> Iterator[Metric]:
        """One family a measurement."""
        pool, used = self._manager.pool.stats(), self._manager.stats()
        told = asdict(pool)
        blocks = GaugeMetricFamily("qkv_blocks", "Blocks by state.", labels=("cache", "state"))
        for state in _STATES:
            blocks.add_metric((self._name, state), told[state])
        yield blocks
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"qkv_{name}", text, labels=("cache",))
            counter.add_metric((self._name,), told[name])
            yield counter
        for name, text, value in (
            ("published_blocks", "Blocks that can be found by name.", pool.published),
            ("pinned_blocks", "Published blocks that may not be evicted.", pool.pinned),
            ("hit_rate", "Share of all tokens asked for that were found.", pool.hit_rate),
            ("sequences", "Open sequences.", used.sequences),
            ("checkpoints", "Places that sequences can go on from.", used.checkpoints),
            ("tokens", "Tokens of all open sequences.", used.tokens),
            ("fragmentation", "Share of the token places in use that hold nothing.", used.fragmentation),
        ):
            gauge = GaugeMetricFamily(f"qkv_{name}", text, labels=("cache",))
            gauge.add_metric((self._name,), value)
            yield gauge
        memory = GaugeMetricFamily("qkv_memory_bytes", "Bytes by kind.", labels=("cache", "kind", "how", "place"))
        for line in account(self._manager, self._model):
            if line.bytes is not None:
                memory.add_metric((self._name, line.what, line.how, line.place), line.bytes)
        yield memory


@dataclass(frozen=True)
class Sample:
    """One value read back; labels without `cache`."""

    cache: str
    name: str
    labels: Mapping[str, str]
    value: float


def read(text: str) -> list[Sample]:
    """The qkv samples in Prometheus text. Raises InputError if there are none, or it is not such text."""
    found = []
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name.startswith("qkv_") and not sample.name.endswith("_created"):
                    labels = {key: value for key, value in sample.labels.items() if key != "cache"}
                    found.append(Sample(sample.labels.get("cache", ""), sample.name, labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"metrics: got text that Prometheus cannot read ({error}); wanted what /metrics gives"
        ) from error
    if not found:
        raise InputError("metrics: got no qkv_ sample; register qkv.metrics.Collector(manager) in that process")
    return found
