"""The report of cpu_peers.py: chooses the peer that awqd is compared with, and prints the tables.

A record is one product of one case: {"by": "awqd" or a package, "product": its name in the tables, "k", "n", "group", "m",
"activations": "FP16", "us", "error"}, of awqd's also "row", and "stream_us" for 1 token. A case is (group, k, n, m).
"""

# Errors within this factor are equal: awqd_bench measures 24 elements of a result, which scatters by some 15 %.
EQUAL = 1.25


def case_of(record):
    return record["group"], record["k"], record["n"], record["m"]


def fastest(records):
    return min(records, key=lambda record: record["us"], default=None)


def fastest_as_exact(ours, peers):
    """The fastest peer of equal or smaller error, whatever its activations are; None without one."""
    return fastest(peer for peer in peers if peer["error"] <= EQUAL * ours["error"])


def fastest_quantised(ours, peers):
    """The fastest peer that quantises activations to INT8 and whose error is no smaller; None without one."""
    return fastest(peer for peer in peers if peer["activations"] == "INT8" and peer["error"] >= ours["error"] / EQUAL)


def merge(rounds):
    """One record for each product and case, with the least time of its records; the error is the same in each."""
    best = {}
    for record in rounds:
        key = record["product"], case_of(record)
        if key not in best:
            best[key] = dict(record)
        for time in ("us", "stream_us"):
            if time in record:
                best[key][time] = min(best[key].get(time, record[time]), record[time])
    return list(best.values())


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def names(records, ours):
    """Products in the order of the records, awqd's or the peers'."""
    return list(dict.fromkeys(record["product"] for record in records if (record["by"] == "awqd") == ours))


def cases(records):
    """{case: {product: record}}, by group, then K, N and M."""
    out = {case: {} for case in sorted({case_of(record) for record in records})}
    for record in records:
        out[case_of(record)][record["product"]] = record
    return out


def first_cells(case):
    group, k, n, m = case
    return [f"{k} x {n}, w4g{group}z", str(m)]


def times(records):
    """Microseconds and, in brackets, the relative error of every product."""
    def cell(record):
        return f"{record['us']:.0f} ({record['error']:.1e})" if record else "-"
    columns = names(records, True) + names(records, False)
    rows = [first_cells(case) + [cell(products.get(name)) for name in columns] for case, products in cases(records).items()]
    return table(["K x N", "M", *columns], rows)


def against(ours, peer):
    return f"{ours['us'] / peer['us']:.2f} ({peer['product']})" if peer else "none"


def ratios(records):
    """awqd's time by that of the fastest peer as exact, by product; of INT8 also by that of the fastest as coarse."""
    columns = names(records, True)
    rows = []
    for case, products in cases(records).items():
        peers = [record for record in products.values() if record["by"] != "awqd"]
        row = first_cells(case)
        for name in columns:
            row.append(against(products[name], fastest_as_exact(products[name], peers)) if name in products else "-")
        coarse = [record for record in products.values() if record["by"] == "awqd" and record["activations"] == "INT8"]
        row += [against(record, fastest_quantised(record, peers)) for record in coarse] or ["-"]
        rows.append(row)
    return table(["K x N", "M", *columns, "INT8, to an INT8 peer of no smaller error"], rows)


def streams(records):
    """awqd's time for 1 token by that of reading the packed weight; None without such a record."""
    columns = names(records, True)
    rows = []
    for case, products in cases(records).items():
        floors = {name: record["stream_us"] for name, record in products.items() if "stream_us" in record}
        if floors:
            floor = min(floors.values())
            rows.append(first_cells(case)[:1] + [f"{floor:.0f}"] +
                        [f"{products[name]['us'] / floor:.2f}" if name in floors else "-" for name in columns])
    return table(["K x N, 1 token", "reading, us", *columns], rows) if rows else None
