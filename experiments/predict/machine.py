"""Speeds of devices for computing, moving and sending bytes, and the time of a collective."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jdistadam.core.arguments import check_count, is_real, out_of_range
from jdistadam.core.collectives import Axes
from jdistadam.distributed.mesh_axes import DataParallel
from jdistadam.errors import HyperparameterError

DIRECT = "all-to-all"
"""The operation that sends every part directly to its destination; others run in a ring."""


def check_positive(name: str, value: Any, unit: str) -> None:
    """Raises HyperparameterError unless ``value`` is a finite number above 0."""
    if not is_real(value) or not math.isfinite(value) or value <= 0:
        raise out_of_range(name, value, f"a finite number of {unit}, above 0")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds of one device and of its links, in bytes per second and seconds.

    Measured figures are better than those of data sheets: ``jdistadam bench`` prints the first.

    Attributes:
      memory_bandwidth: Reads plus writes of a device's memory.
      link_bandwidth: Bytes that collectives, or copies, send from a device to others of its node,
        in one direction.
      network_bandwidth: Bytes that a device sends to other nodes in one direction; None: there is
        one node.
      devices_per_node: How many devices a node has. Devices fill the nodes in the mesh's order.
      latency: Start of a collective. This default and the next two are NCCL's estimates for rings
        with its protocol "Simple".
      link_hop: One hop between devices of a node.
      network_hop: One hop between nodes.

    Raises:
      HyperparameterError: A number is non-finite or not above 0 (hops and latency: below 0).

    Example:
      >>> machine = Machine(4.2e12, 200e9, network_bandwidth=50e9, latency=0, link_hop=0,
      ...                   network_hop=0)
      >>> machine.seconds("all-gather", 7e9, devices=8, per_node=8)
      0.035
      >>> machine.seconds("all-gather", 15e9, devices=16, per_node=8)  # 8 rings leave a node
      0.075
      >>> machine.seconds("all-to-all", 15e9, devices=16, per_node=8)  # 8 of 15 parts leave it
      0.16
    """

    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float | None = None
    devices_per_node: int = 8
    latency: float = 8.4e-6
    link_hop: float = 3.4e-6
    network_hop: float = 9.6e-6

    def __post_init__(self) -> None:
        """Checks every number."""
        check_count("devices_per_node", self.devices_per_node)
        for name in ("memory_bandwidth", "link_bandwidth"):
            check_positive(name, getattr(self, name), "bytes per second")
        if self.network_bandwidth is not None:
            check_positive("network_bandwidth", self.network_bandwidth, "bytes per second")
        for name in ("latency", "link_hop", "network_hop"):
            if getattr(self, name) != 0:
                check_positive(name, getattr(self, name), "seconds, or 0")

    def seconds(
        self, op: str, sent: float, *, devices: int, per_node: int, messages: int = 1
    ) -> float:
        r"""Returns the time of a collective alone and without congestion.

        A device sends :math:`S` bytes. There are :math:`N` devices, :math:`m` per node, on
        :math:`K = N / m` nodes, with bandwidths :math:`b` of links and :math:`w` of the network::

            ring      S max(1 / b, 1 / (m w)) + M (t + r ((N - K) h + (K - 1) v))
            direct    max(S (m - 1) / (N - 1) / b, S (N - m) / (N - 1) / w) + M (t + h or v)

        A ring crosses the network once per node, over the network of all its m devices at once; it
        passes twice, r = 2, in an all-reduce. Each of M messages starts in :math:`t` and takes
        :math:`h` per hop in a node and :math:`v` per hop between nodes.

        Args:
          op: As in ``Collective.op``.
          sent: Bytes that a device sends in all messages.
          devices: How many take part.
          per_node: How many of them share a node.
          messages: The number of messages.
        """
        if devices == 1:
            return 0.0
        network = self._network(devices) if devices > per_node else float("inf")
        nodes = -(-devices // per_node)
        if op == DIRECT:
            there = sent * (devices - per_node) / (devices - 1)
            hop = self.link_hop if nodes == 1 else self.network_hop
            moving = max((sent - there) / self.link_bandwidth, there / network)
            return moving + messages * (self.latency + hop)
        passes = 2 if op == "all-reduce" else 1
        hops = (devices - nodes) * self.link_hop + (nodes - 1) * self.network_hop
        slowest = min(self.link_bandwidth if per_node > 1 else network, per_node * network)
        return sent / slowest + messages * (self.latency + passes * hops)

    def _network(self, devices: int) -> float:
        if self.network_bandwidth is None:
            raise HyperparameterError(
                "network_bandwidth: not given, and some devices are in other nodes: "
                f"got None for {devices} devices and devices_per_node {self.devices_per_node}, "
                "expected bytes per second that a device sends to other nodes. "
                "Pass network_bandwidth, or ask for no more devices than a node has."
            )
        return self.network_bandwidth


def members_per_node(parallel: DataParallel, axes: Axes, devices_per_node: int) -> int:
    """Returns how many devices of a collective over ``axes`` share a node, at the least.

    Devices fill the nodes in the mesh's order, the last axis first.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(np.arange(32).reshape(4, 8), ("replica", "data"))
      >>> parallel = DataParallel(mesh, ("data",), ("replica",))
      >>> [members_per_node(parallel, axes, 8) for axes in [("data",), ("replica",)]]
      [8, 1]
    """
    mesh = parallel.mesh
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    group = places[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    _, counts = np.unique(group.ravel() // devices_per_node, return_counts=True)
    return int(counts.min())
