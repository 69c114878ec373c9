#!/usr/bin/env python3
"""Adds up what tests/run.sh ran: skips by name, failures with what they said, 'N passed, N failed, N skipped'.

A GoogleTest binary counts case by case, from the XML that it wrote; any other ctest entry, and any part that
run.sh ran itself, counts as one.
"""
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

LINES_SHOWN = 12  # of what a failure said
REPORT_LINES = 36  # of what a sanitizer said
REPORT = re.compile(r"WARNING: ThreadSanitizer|ERROR: (\w+Sanitizer|libFuzzer)|: runtime error: ")


class Tally:
    """Names of what passed, name -> text of what failed, reason -> names of what was skipped."""

    def __init__(self):
        self.passed = []
        self.failed = {}
        self.skipped = collections.defaultdict(list)

    def add(self, name, status, text=""):
        if status == "skipped":
            self.skipped[text or "no reason given"].append(name)
        elif status == "failed":
            self.failed[name] = text
        else:
            self.passed.append(name)


def first_line(text):
    """The reason in a skip message: gtest puts the source line before it."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    if len(lines) > 1 and re.search(r"\.(cc|cu):\d", lines[0]):
        lines = lines[1:]
    return lines[0].removeprefix("Skipped").strip() if lines else ""


def end_of(text, lines=LINES_SHOWN):
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])


def said(output):
    """The first report of a sanitizer, which ends long before the output does, or else the end."""
    report = REPORT.search(output)
    if report is None:
        return end_of(output)
    begin = output.rfind("\n", 0, report.start()) + 1
    return "\n".join([line.rstrip() for line in output[begin:].splitlines() if line.strip()][:REPORT_LINES])


def folded(names):
    """The names, those that differ in a parameter or in the binary alone as one with their number."""
    groups = collections.defaultdict(list)
    for name in names:
        groups[re.sub(r"^[^:]*:(?:[^/]*/)?(.*?)(?:/[^/]*)?$", r"\1", name)].append(name)
    return [group[0] if len(group) == 1 else f"{key} ({len(group)} cases)" for key, group in groups.items()]


def last_line(text):
    return end_of(text, 1).strip()


def add_gtest(tally, path):
    """Returns how many cases of the binary failed."""
    failures = 0
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            name = f"{path.stem}:{case.get('classname')}.{case.get('name')}"
            skip = case.find("skipped")
            failed = case.findall("failure")
            if failed:
                failures += 1
                tally.add(name, "failed", "\n".join(failure.text or failure.get("message", "") for failure in failed))
            elif skip is not None:
                tally.add(name, "skipped", first_line(skip.get("message") or skip.text))
            elif case.get("status") == "run":
                tally.add(name, "passed")
    return failures


def add_ctest(tally, results):
    for entry in ElementTree.parse(results / "ctest.xml").getroot().iter("testcase"):
        name = entry.get("name")
        failed = entry.find("failure") is not None or entry.get("status") == "fail"
        output = entry.findtext("system-out") or ""
        gtest = results / "gtest" / f"{name}.xml"
        if gtest.exists():
            # A binary can fail although its cases passed, for example by a sanitizer's report at exit.
            if add_gtest(tally, gtest) == 0 and failed:
                tally.add(name, "failed", said(output))
        elif failed:
            tally.add(name, "failed", said(output))
        elif entry.find("skipped") is not None or entry.get("status") in ("notrun", "disabled"):
            tally.add(name, "skipped", last_line(output))
        else:
            tally.add(name, "passed")


def add_parts(tally, results):
    for line in (results / "parts.tsv").read_text().splitlines():
        name, status, log = line.split("\t")
        output = pathlib.Path(log).read_text(errors="replace")
        if status == "77":
            tally.add(name, "skipped", last_line(output))
        elif status == "0":
            tally.add(name, "passed")
        else:
            tally.add(name, "failed", said(output))


def main():
    results, ctest_status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    tally = Tally()
    if (results / "ctest.xml").exists():
        add_ctest(tally, results)
    if ctest_status != 0 and not tally.failed:
        tally.add(f"ctest (exit status {ctest_status})", "failed")
    add_parts(tally, results)

    with open(results / "cases.txt", "w", encoding="utf-8") as out:
        out.writelines(f"passed {name}\n" for name in tally.passed)
        out.writelines(f"failed {name}\n" for name in tally.failed)
        out.writelines(f"skipped {name}: {why}\n" for why, names in tally.skipped.items() for name in names)
    print()
    for why, names in sorted(tally.skipped.items()):
        print(f"skipped: {', '.join(folded(names))}: {why}")
    for name, text in tally.failed.items():
        print(f"failed: {name}")
        for line in text.splitlines()[:REPORT_LINES]:
            print(f"    {line}")
    skipped = sum(map(len, tally.skipped.values()))
    print(f"{len(tally.passed)} passed, {len(tally.failed)} failed, {skipped} skipped")
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main())
