#!/usr/bin/env python3
"""summarize.py on results written by hand: what it counts, what it says of failures, its exit status."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SUMMARIZE = pathlib.Path(__file__).with_name("summarize.py")
CASES = """<testsuites><testsuite name="Limits">
<testcase classname="Limits" name="Good" status="run"/>
<testcase classname="Limits" name="Bad" status="run">
<failure message="short"><![CDATA[limits.cc:74
Which is: 14]]></failure><failure message="short"><![CDATA[limits.cc:80
Which is: 2]]></failure></testcase>
<testcase classname="Limits" name="OnGpu" status="run"><skipped message="limits.cc:9&#10;no GPU"/></testcase>
</testsuite></testsuites>"""


class SummarizeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name)
        (self.results / "gtest").mkdir()
        self.write("parts.tsv", "")

    def write(self, name, text):
        (self.results / name).write_text(text)
        return self.results / name

    def summarize(self, entries, ctest_status):
        self.write("ctest.xml", f"<testsuite>{entries}</testsuite>")
        done = subprocess.run([sys.executable, SUMMARIZE, self.results, str(ctest_status)], text=True,
                              capture_output=True, check=False)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout.strip().splitlines()

    def test_counts_cases_and_quotes_failures(self):
        self.write("gtest/limits_test.xml", CASES)
        status, lines = self.summarize('<testcase name="limits_test" status="fail"><failure/></testcase>', 8)
        self.assertEqual(status, 1)
        self.assertEqual(lines, [
            "skipped: limits_test:Limits.OnGpu: no GPU", "failed: limits_test:Limits.Bad", "    limits.cc:74",
            "    Which is: 14", "    limits.cc:80", "    Which is: 2", "1 passed, 1 failed, 1 skipped"])
        self.assertIn("passed limits_test:Limits.Good\n", (self.results / "cases.txt").read_text())

    def test_parameters_and_binaries_of_what_was_skipped_are_counted(self):
        cases = "".join(f'<testcase classname="Rows/{suite}" name="{name}" status="run"><skipped message="a.cc:9&#10;no GPU"/>'
                        "</testcase>" for suite, name in (("Op", "Agrees/k32"), ("Op", "Agrees/k64"), ("Op", "Rounds/k32")))
        for binary in ("one", "two"):
            self.write(f"gtest/{binary}.xml", f"<testsuites><testsuite name='Rows'>{cases}</testsuite></testsuites>")
        status, lines = self.summarize('<testcase name="one" status="run"/><testcase name="two" status="run"/>'
                                       '<testcase name="other" status="run"/>', 0)
        self.assertEqual((status, lines), (0, ["skipped: Op.Agrees (4 cases), Op.Rounds (2 cases): no GPU",
                                               "1 passed, 0 failed, 6 skipped"]))
        self.assertIn("skipped two:Rows/Op.Agrees/k64: no GPU\n", (self.results / "cases.txt").read_text())

    def test_a_binary_may_fail_after_its_cases_passed(self):
        self.write("gtest/limits_test.xml", CASES.replace("failure", "ignored"))
        status, lines = self.summarize('<testcase name="limits_test" status="fail"><failure/>'
                                       "<system-out>passed\nLeakSanitizer: 8 bytes\n</system-out></testcase>", 8)
        self.assertEqual(status, 1)
        self.assertEqual(lines[1:], ["failed: limits_test", "    passed", "    LeakSanitizer: 8 bytes",
                                     "2 passed, 1 failed, 1 skipped"])

    def test_a_sanitizers_report_is_quoted_from_its_beginning(self):
        output = "\n".join(["before", "=====", "WARNING: ThreadSanitizer: data race (pid=1)", "  Write of size 8",
                            *(f"  frame {i}" for i in range(90))])
        status, lines = self.summarize(
            f'<testcase name="race_test" status="fail"><failure/><system-out>{output}</system-out></testcase>', 8)
        self.assertEqual(status, 1)
        self.assertEqual(lines[:4], ["failed: race_test", "    WARNING: ThreadSanitizer: data race (pid=1)",
                                     "      Write of size 8", "      frame 0"])
        self.assertEqual(len(lines), 1 + 36 + 1)

    def test_parts_fail_with_the_end_of_their_logs(self):
        log = self.write("fuzz.log", "\n".join(f"run {i}" for i in range(100)))
        self.write("parts.tsv", f"fuzz\t1\t{log}\ndocker\t77\t{self.write('docker.log', 'no buildah')}\n")
        status, lines = self.summarize('<testcase name="other" status="run"/>', 0)
        self.assertEqual(status, 1)
        self.assertEqual(lines[:3], ["skipped: docker: no buildah", "failed: fuzz", "    run 88"])
        self.assertEqual(lines[-2:], ["    run 99", "1 passed, 1 failed, 1 skipped"])

    def test_nothing_run_is_a_failure(self):
        self.assertEqual(self.summarize("", 0), (1, ["0 passed, 0 failed, 0 skipped"]))
        self.assertEqual(self.summarize("", 8),
                         (1, ["failed: ctest (exit status 8)", "0 passed, 1 failed, 0 skipped"]))

    def test_all_well(self):
        self.assertEqual(self.summarize('<testcase name="other" status="run"/>', 0),
                         (0, ["1 passed, 0 failed, 0 skipped"]))


if __name__ == "__main__":
    unittest.main()
