"""The body of `/metrics`: gathers the metrics of one application from all nodes, in Prometheus text format.

Each Ray node exports the metrics of its replicas on its own port, which also changes. Scraping the gateway instead
needs only one address and shows only one application.
"""

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOGGER = logging.getLogger("ray.serve")
_PREFIXES = ("ray_moray_", "ray_serve_")
_SECONDS = 3.0
"""Time limit for a node to answer; after it, the node's series are left out, because a scrape has a timeout too."""
_HEADER = re.compile(r"# (HELP|TYPE) (\S+)")


@dataclass
class _Family:
    """All lines about one metric."""

    headers: dict[str, str] = field(default_factory=dict)
    """The HELP and TYPE lines."""
    samples: list[str] = field(default_factory=list)


def of_application(texts: Iterable[str], application: str) -> str:
    """Merge the exports of nodes: keep the samples of one application, grouped by metric as the format requires.

    Args:
        texts: the exports, one per node.
        application: value of the tag `application` that samples must have.
    """
    escaped = application.replace("\\", "\\\\").replace('"', '\\"')
    marks = f'{{application="{escaped}"', f',application="{escaped}"'
    families: dict[str, _Family] = {}
    for text in texts:
        family = None
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header is not None:
                kind, name = header.groups()
                family = families.setdefault(name, _Family()) if name.startswith(_PREFIXES) else None
                if family is not None:
                    family.headers.setdefault(kind, line)
            elif family is not None and any(mark in line for mark in marks):
                family.samples.append(line)
    told = (family for family in families.values() if family.samples)
    return "".join(f"{line}\n" for family in told for line in (*family.headers.values(), *family.samples))


class Exporters(ABC):
    """A source of the published metrics."""

    @abstractmethod
    async def read(self) -> str:
        """Return the metrics of this replica's application.

        Raises:
            ConnectionError: no node answers.
        """


class NoExporters(Exporters):
    """For replicas that are used without Ray."""

    async def read(self) -> str:
        return ""


class RayExporters(Exporters):
    """Reads from all live Ray nodes, leaving out those that do not answer in time."""

    async def read(self) -> str:
        import ray
        from ray import serve

        nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
        urls = [_url(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as client:
            answers = await asyncio.gather(*(_get(client, url) for url in urls), return_exceptions=True)
        texts = [answer for answer in answers if isinstance(answer, str)]
        if len(texts) < len(urls):
            _LOGGER.warning("%d of %d nodes export no metrics at the moment", len(urls) - len(texts), len(urls))
        if not texts:
            raise ConnectionError("no node exports metrics")
        return await asyncio.to_thread(of_application, texts, serve.get_replica_context().app_name)


def _url(address: str, port: int) -> str:
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"


async def _get(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url, raise_for_status=True) as response:
        return await response.text()
