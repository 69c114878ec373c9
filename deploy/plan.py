#!/usr/bin/env python3
"""How many servers a model takes: replicas and shards, of a bench of one server.

    awqctl bench --weight MODEL/WEIGHT --tokens 1 --concurrency 1,64 --json_file bench.json
    deploy/plan.py --bench bench.json --model_gb 40 --memory_gb 80 --rate 20000 --p99_ms 5

The bench's first point tells what a request takes alone, the fastest one what a server does at most. At the share u of the most

    p99(u) = p99(alone) / (1 - u)

deploy/placement.md says where that comes from and how far it holds.
"""
import argparse
import dataclasses
import json
import math
import pathlib

KEPT_FREE = 0.1  # of a device's memory: activations, staging, what the driver takes
HIGHEST_USE = 0.7  # of a server's most, however patient the callers are: bursts, and one server less


@dataclasses.dataclass
class Measured:
    """One server under the bench's mix of requests; seconds."""
    alone_p99_s: float  # of requests that have the server to themselves
    most_per_s: float  # requests
    request_bytes: float  # sent and answered, on the network

    @staticmethod
    def of(report):
        points = sorted(report["points"], key=lambda point: (point["concurrency"], point["rate"]))
        fastest = max(points, key=lambda point: point["requests_per_s"])
        if len(points) < 2 or points[0]["concurrency"] != 1 or fastest is points[0]:
            raise ValueError("points: expected one of 1 caller, and one of many that is faster: --concurrency 1,64")
        return Measured(points[0]["latency"]["p99_us"] / 1e6, fastest["requests_per_s"], fastest["bytes_per_s"] / fastest["requests_per_s"])

    def p99_s(self, use):
        return self.alone_p99_s / (1 - use)

    def use_within(self, p99_s):
        """The share of the most at which 99 % are answered in time; 0 where not even one alone is."""
        return max(0.0, min(HIGHEST_USE, 1 - self.alone_p99_s / p99_s))


@dataclasses.dataclass
class Plan:
    shards: int  # devices that hold one replica
    replicas: int
    per_replica_per_s: float
    devices: int
    nodes: int  # as many as hold the devices and carry the requests
    network_share: float  # of a node's network


def shards_for(model_bytes, memory_bytes):
    """The fewest devices that hold the model, by --shard=columns or experts."""
    return max(1, math.ceil(model_bytes / (memory_bytes * (1 - KEPT_FREE))))


def plan(measured, rate, p99_s, model_bytes, memory_bytes, devices_per_node, network_bytes_s):
    """The smallest fleet. ValueError where more replicas do not help."""
    use = measured.use_within(p99_s)
    if use == 0:
        raise ValueError(f"p99: got {1000 * p99_s:g} ms, and one request alone takes {1000 * measured.alone_p99_s:.3g}: replicas do not "
                         "help; measure with --shard=columns over more devices, or with fewer tokens a request")
    shards = shards_for(model_bytes, memory_bytes)
    if shards > devices_per_node:
        raise ValueError(f"model: it takes {shards} devices, and a node has {devices_per_node}: a model lies on one node")
    each = use * measured.most_per_s
    replicas = math.ceil(round(rate / each, 6))
    on_node = devices_per_node // shards
    nodes = max(math.ceil(replicas / on_node), math.ceil(rate * measured.request_bytes / network_bytes_s))
    return Plan(shards, replicas, each, replicas * shards, nodes, rate / nodes * measured.request_bytes / network_bytes_s)


def main():
    parser = argparse.ArgumentParser(description="Servers that a model takes, from a bench of one.")
    parser.add_argument("--bench", type=pathlib.Path, required=True, help="awqctl bench --json_file, of 1 caller and of many")
    parser.add_argument("--model_gb", type=float, required=True, help="of weights: device_bytes of awqctl models, or of the files")
    parser.add_argument("--memory_gb", type=float, required=True, help="of one device, or of the machine for the CPU")
    parser.add_argument("--rate", type=float, required=True, help="requests a second, of the bench's kind")
    parser.add_argument("--p99_ms", type=float, required=True)
    parser.add_argument("--devices_per_node", type=int, default=1)
    parser.add_argument("--network_gbit", type=float, default=25, help="of a node")
    options = parser.parse_args()
    try:
        measured = Measured.of(json.loads(options.bench.read_text()))
        rows = [(factor, plan(measured, factor * options.rate, options.p99_ms / 1000, options.model_gb * 1e9, options.memory_gb * 1e9,
                              options.devices_per_node, options.network_gbit * 1e9 / 8)) for factor in (1, 10, 100, 1000)]
    except (ValueError, KeyError, OSError) as error:
        raise SystemExit(f"plan.py: {error}") from error
    use = rows[0][1].per_replica_per_s / measured.most_per_s
    print(f"one server: p99 {1000 * measured.alone_p99_s:.3g} ms alone, at most {measured.most_per_s:.0f} requests a second; planned at "
          f"{100 * use:.0f} % of that, p99 {1000 * measured.p99_s(use):.3g} ms\n")
    print("| load | requests a second | shards | replicas | devices | nodes | of a node's network |\n|---|---|---|---|---|---|---|")
    for factor, row in rows:
        print(f"| {factor}x | {factor * options.rate:.0f} | {row.shards} | {row.replicas} | {row.devices} | {row.nodes} "
              f"| {100 * row.network_share:.0f} % |")


if __name__ == "__main__":
    main()
