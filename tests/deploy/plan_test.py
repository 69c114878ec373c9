"""deploy/plan.py: replicas, shards, and what it refuses."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))
import plan  # noqa: E402  (a script of the folder above)

GB = 10**9


def point(callers, p50_us, p99_us, rate):
    return {"concurrency": callers, "rate": 0, "requests_per_s": rate, "bytes_per_s": 1000 * rate, "latency": {"p50_us": p50_us, "p99_us": p99_us}}


MEASURED = plan.Measured.of({"points": [point(64, 9000, 20000, 10000), point(1, 1000, 2000, 900)]})


def planned(rate=100, p99_s=0.006, model=10 * GB, memory=80 * GB, devices=8):
    return plan.plan(MEASURED, rate, p99_s, model, memory, devices, 3 * GB)


class PlanTest(unittest.TestCase):

    def test_reads_a_bench(self):
        self.assertEqual((MEASURED.alone_p99_s, MEASURED.most_per_s, MEASURED.request_bytes), (0.002, 10000, 1000))
        for points in ([point(1, 1, 1, 1)], [point(2, 1, 1, 1), point(4, 1, 1, 2)], [point(1, 1, 1, 5), point(4, 1, 1, 2)]):
            with self.assertRaisesRegex(ValueError, "expected one of 1 caller"):
                plan.Measured.of({"points": points})

    def test_the_share_is_the_one_that_meets_the_limit(self):
        for p99_s in (0.003, 0.005, 0.006):
            self.assertAlmostEqual(MEASURED.p99_s(MEASURED.use_within(p99_s)), p99_s)
        self.assertEqual(MEASURED.use_within(10), plan.HIGHEST_USE)
        self.assertEqual(MEASURED.use_within(0.002), 0)

    def test_replicas_follow_the_rate(self):
        self.assertEqual((planned().shards, planned().replicas, planned().nodes), (1, 1, 1))
        more = planned(rate=100000)
        self.assertAlmostEqual(more.per_replica_per_s, 10000 * 2 / 3)
        self.assertEqual((more.replicas, more.devices, more.nodes), (15, 15, 2))
        self.assertAlmostEqual(more.network_share, 50000 * 1000 / 3e9)

    def test_nodes_carry_the_requests(self):
        heavy = plan.Measured(0.002, 10000, 1e6)
        row = plan.plan(heavy, 10000, 0.006, GB, 80 * GB, 8, 3 * GB)
        self.assertEqual((row.replicas, row.nodes), (2, 4))
        self.assertAlmostEqual(row.network_share, 10 / 12)

    def test_a_model_larger_than_a_device_is_sharded(self):
        large = planned(rate=100000, model=200 * GB)
        self.assertEqual((large.shards, large.replicas, large.devices, large.nodes), (3, 15, 45, 8))
        with self.assertRaisesRegex(ValueError, "it takes 14 devices, and a node has 8"):
            planned(model=1000 * GB)

    def test_what_replicas_cannot_do_is_refused(self):
        with self.assertRaisesRegex(ValueError, "one request alone takes 2: replicas do not help"):
            planned(p99_s=0.0015)


if __name__ == "__main__":
    unittest.main()
