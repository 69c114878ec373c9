#!/usr/bin/env python3
"""One peer of cpu_peers.py in a process of its own: cpu_worker.py PEER THREADS

Reads a JSON line for each command from stdin and answers a line each on stdout:
  (started)                          {"version": "1.2", "kinds": ["fp32"]} or {"skipped": why}
  {"weight": [k, n, group]}          {"kinds": {"fp32": {"activations": "FP32"}, "int8": {"skipped": why}}}
  {"time": "fp32", "m": 16}          {"us": 12.3, "error": 1e-7}
"""
import json
import os
import sys
import time

HOT_TOKENS = 256  # from here on a product takes so long that reading its weight does not count: two copies do
SECONDS, LEAST, MOST = 0.4, 5, 400  # of samples, as awqd_bench takes them


def time_of(run, copies):
    """Microseconds of the fastest call: other programs only ever add."""
    samples, begin = [], time.perf_counter()
    while len(samples) < LEAST or (time.perf_counter() - begin < SECONDS and len(samples) < MOST):
        start = time.perf_counter()
        run(len(samples) % copies)
        samples.append(time.perf_counter() - start)
    return min(samples) * 1e6


class Worker:
    def __init__(self, peer):
        self.peer, self.products, self.errors = peer, {}, {}

    def weight(self, k, n, group):
        import cpu_weight
        self.products, self.errors, said = {}, {}, {}
        weight = cpu_weight.Weight(k, n, group)
        for kind, prepare in self.peer.kinds().items():
            try:
                product = self.products[kind] = prepare(weight)
                said[kind] = {"activations": product.activations, "settings": product.settings}
            except Exception as why:  # whatever a library raises: the others go on
                said[kind] = {"skipped": f"{type(why).__name__}: {why}"}
        return {"kinds": said}

    def time(self, kind, m):
        import cpu_weight
        product = self.products[kind]
        copies = product.copies if m < HOT_TOKENS else 2
        given = product.bind(cpu_weight.activations(m, product.weight.k))
        if (kind, m) not in self.errors:
            # A library may prepare something for each copy and M.
            for i in reversed(range(copies)):
                product.run(i)
            got = product.result()[:, product.weight.columns]
            self.errors[kind, m] = cpu_weight.error(got, given, product.checked)
        else:
            product.run(0)
        return {"us": time_of(product.run, copies), "error": self.errors[kind, m]}


def answer(worker, command):
    if "weight" in command:
        return worker.weight(*command["weight"])
    try:
        return worker.time(command["time"], command["m"])
    except Exception as why:  # whatever a library raises: the others go on
        return {"skipped": f"{type(why).__name__}: {why}"}


def main():
    name, threads = sys.argv[1], int(sys.argv[2])
    # Output that libraries print goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what):
        print(json.dumps(what), file=out, flush=True)
    try:
        import cpu_products
        worker = Worker(cpu_products.PEERS[name](threads))
    except ImportError as why:
        say({"skipped": str(why)})
        return
    say({"version": cpu_products.version(name), "kinds": list(worker.peer.kinds())})
    for line in sys.stdin:
        say(answer(worker, json.loads(line)))


if __name__ == "__main__":
    main()
