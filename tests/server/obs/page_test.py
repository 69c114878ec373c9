#!/usr/bin/env python3
"""The page in a headless browser: what it shows of a server's answers, on a wide screen and on a phone. Status 77 is a skip.

usage: page_test.py [folder for screenshots]
"""
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = ROOT / "server/obs/page"
FILES = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
         "/favicon.ico": ("icon.svg", "image/svg+xml")}
POLICY = re.search(r'"Content-Security-Policy", "([^"]+)"', (ROOT / "server/obs/http_server.cc").read_text()).group(1)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
NOW_MS = 1_700_000_000_000


def status():
    """An answer of /api/status, with some of everything."""
    def model(name, **more):
        return {"name": name, "state": "ready", "message": "", "loaded_share": 1, "format": "awq", "version": 1, "weights": 72,
                "unserved_weights": 0, "requests": 12345, "failed": 0, "lost": 0, "not_computed": 0, "tokens": 98765, "bytes": {"cpu": 5 << 30},
                "kernels": ["cpu/qmatmul_a16", "cpu/dense"], **more}

    def quantile(ms, sign=""):
        return {"ms": ms, "sign": sign}

    history = []
    for i in range(100):
        busy = i not in range(30, 40)  # nobody calls for 50 s
        history.append({
            "t": NOW_MS - (100 - i) * 5000, "requests_per_s": 200 + i if busy else 0, "tokens_per_s": 9000 if busy else 0,
            "failed_per_s": 3 if i == 70 else 0, "in_time_per_s": 180, "lost_per_s": 20 if i > 90 else 0,
            "refused_per_s": 60 if i > 90 else 0, "p50": quantile(2.5 if busy else None),
            "p99": quantile(900 if i == 50 else 20, "≤") if busy else quantile(None), "batch_tokens": 300 if busy else None,
            "queue_ms": 0.03 if busy else None, "queued": i % 7, "in_flight_bytes": 1 << 20, "resident_bytes": 6 << 30,
            "device_bytes": 5 << 30})
    failed = model("broken-" + "b" * 60, state="failed", format="", weights=0, bytes={}, kernels=[], requests=0, tokens=0,
                   message="config.json: byte 1: expected a string; " + "x" * 300)
    return {"version": "0.1.0", "ready": True, "time_ms": NOW_MS, "uptime_s": 98765, "in_flight_bytes": 0,
            "in_flight_limit_bytes": 0, "queue_limit_requests": 1024, "resident_bytes": 6 << 30, "threads": 9,
            "models": [failed, model("all-MiniLM-L6-v2-awq", lost=3, not_computed=4), model("qwen", state="loading", loaded_share=0.4)],
            "leases": [{"model": "qwen", "device": "cpu", "version": 7, "client": "ana, user 1000, process 4711", "bytes": 5 << 30,
                        "age_s": 93780}],
            "devices": [{"id": "cpu", "name": "Some CPU @ 2.70GHz", "healthy": True, "memory_bytes": 64 << 30, "free_bytes": 30 << 30,
                         "used_bytes": 5 << 30, "weights_bytes": 5 << 30, "staging_bytes": 1 << 20, "queued": 3, "batches": 99,
                         "tokens": 98765, "requests": 12345,
                         "kernels": [{"kernel": "cpu/qmatmul_a16,cpu/dense", "batches": 99, "compute_s": 1.5}]}],
            "methods": [{"method": "awqd.v1.QuantizedInference/QuantizedMatmul", "started": 9, "codes": {"OK": 8, "NOT_FOUND": 1},
                         "p50": quantile(1.5), "p99": quantile(20, "≤")}],
            "history": history}


class Site(http.server.ThreadingHTTPServer):
    """The page's files and an answer that tests may change, under the server's own policy."""

    def __init__(self):
        self.status = status()
        self.asked = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):

            def do_GET(self):
                site.asked.append(self.path)
                if self.path == "/api/status" and site.status is not None:
                    self.answer(200, "application/json", json.dumps(site.status).encode())
                elif self.path in FILES:
                    name, kind = FILES[self.path]
                    self.answer(200, kind, (PAGE / name).read_bytes())
                else:
                    self.answer(500 if self.path == "/api/status" else 404, "text/plain", b"")

            def answer(self, code, kind, body):
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", POLICY)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *unused):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Browser:
    """One page of a headless Chromium, driven through its pipe by the DevTools protocol."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(prefix="awqd-page-")
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()

        def move():
            """The browser reads descriptor 3 and writes to 4."""
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             "--no-proxy-server", f"--user-data-dir={self.profile.name}"],
            preexec_fn=move, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.rest, self.number, self.session, self.complaints = b"", 0, None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                data = os.read(self.read, 1 << 20)
                assert data, "the browser ended"
                self.rest += data
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.number:
                assert "result" in answer, answer
                return answer["result"]
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(answer["params"])

    def value(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression, seconds=20):
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} did not come true"
            time.sleep(0.05)

    def open(self, url, width, height=900, dark=False):
        self.complaints.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.send("Page.navigate", url=url)
        self.wait("document.readyState == 'complete' && document.querySelectorAll('#methods tr').length == 2")

    def screenshot(self, name):
        if SCREENSHOTS:
            import base64
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1})["data"]
            (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(data))

    def close(self):
        self.send("Browser.close")
        self.process.wait(20)
        os.close(self.write)
        os.close(self.read)
        self.profile.cleanup()


class Page(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.site = Site()
        self.addCleanup(self.site.server_close)
        self.addCleanup(self.site.shutdown)

    def open(self, width=1280, **more):
        self.browser.open(self.site.url, width, **more)

    def text(self, selector):
        return self.browser.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def plot(self, title):
        """The figure of a title, as an expression."""
        return f"[...document.querySelectorAll('figure')].find(f => f.querySelector('b').textContent == {title!r})"

    def test_failed_models_have_a_row_with_their_reason(self):
        self.open()
        row = self.text("#models tr.failed")
        self.assertIn("broken-", row)
        self.assertIn("FAILED", row)
        self.assertIn("config.json: byte 1: expected a string", row)
        self.assertIn("1 of 3 models has failed", self.text("#problems"))
        self.assertIn("Overloaded: 25 % of the requests of the last minute were refused or answered too late", self.text("#problems"))
        self.assertEqual(self.browser.value("document.querySelectorAll('#models tr.failed').length"), 1)
        self.assertEqual(self.browser.value("document.title"), "(!) awqd")
        self.assertIn("7", self.text("#models td[data-label=Failed] .bad"))

    def test_nothing_is_missing_and_the_policy_holds(self):
        self.open()
        self.browser.wait("document.querySelectorAll('figure').length == 8")
        # An earlier test's server may be gone before its icon came.
        urls = [one.get("entry", {}).get("url", self.site.url) for one in self.browser.complaints]
        self.assertEqual([one for one, url in zip(self.browser.complaints, urls) if url.startswith(self.site.url)], [])
        self.assertLessEqual(set(self.site.asked), {*FILES, "/api/status"})

    def test_fits_a_phone_and_a_screen(self):
        for width in (1280, 960, 768, 390, 320):
            for dark in (False, True):
                self.open(width, dark=dark)
                with self.subTest(width=width, dark=dark):
                    self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), width)
                    self.browser.screenshot(f"{width}-{'dark' if dark else 'light'}")
        # Each cell has its column's name beside it there.
        self.open(390)
        label = self.browser.value("getComputedStyle(document.querySelector('#devices td:nth-child(4)'), '::before').content")
        self.assertEqual(label, '"Held"')

    def test_quantiles_of_few_calls_are_bounds(self):
        self.open()
        self.assertRegex(self.text("#methods"), r"1\.50 ms\s+≤ 20\.0 ms")
        legend = self.browser.value(f"{self.plot('Latency')}.querySelector('figcaption').innerText")
        self.assertIn("median 2.50 ms", legend)
        self.assertIn("99 % ≤ 20.0 ms", legend)

    def test_times_have_a_log_axis_and_gaps_without_calls(self):
        self.open()
        marks = self.browser.value(f"[...{self.plot('Latency')}.querySelectorAll('text')].map(t => t.textContent)")
        for mark in ("1 ms", "10 ms", "100 ms", "1 s"):
            self.assertIn(mark, marks)
        lines = self.browser.value(f"{self.plot('Latency')}.querySelector('path.first').getAttribute('d')")
        self.assertEqual(lines.count("M"), 2, "before and after the gap")
        marks = self.browser.value(f"[...{self.plot('Time in the queue')}.querySelectorAll('text')].map(t => t.textContent)")
        self.assertIn("10 µs", marks)
        # Equal factors are equal distances.
        places = self.browser.value("[1, 10, 100].map(makeAxis('log', [2, 300]).place)")
        self.assertAlmostEqual(places[2] - places[1], places[1] - places[0])

    def test_values_under_the_pointer(self):
        self.open()
        box = self.browser.value(f"(b => [b.left, b.top, b.width, b.height])({self.plot('Throughput')}.querySelector('svg').getBoundingClientRect())")
        # The point of 250 s ago, the 50th of 100.
        x = box[0] + box[2] * (48 + 328 * (1 - 250 / 900)) / 380
        self.browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=box[1] + box[3] / 2)
        self.assertIn("requests 250/s", self.browser.value(f"{self.plot('Throughput')}.innerText"))
        self.assertIn("99 % ≤ 900 ms", self.browser.value(f"{self.plot('Latency')}.innerText"), "all plots show the same time")
        self.assertEqual(self.browser.value("document.querySelectorAll('svg .cursor').length"), 8)
        self.browser.screenshot("pointer")
        self.browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
        self.assertIn("requests 299/s", self.browser.value(f"{self.plot('Throughput')}.innerText"))

    def test_is_grey_while_the_server_is_gone(self):
        self.open()
        self.assertEqual(self.text("#ready"), "ready")
        self.site.status = None
        self.browser.value("void refresh()")
        self.browser.wait("document.body.classList.contains('gone')")
        self.assertIn("grayscale", self.browser.value("getComputedStyle(document.querySelector('main')).filter"))
        self.assertIn("No answer: the server answered 500. All below is of", self.text("#error"))
        self.assertEqual(self.text("#ready"), "", "nobody knows")
        self.browser.screenshot("gone")
        self.site.status = status()
        self.browser.value("void refresh()")
        self.browser.wait("!document.body.classList.contains('gone')")
        self.assertEqual((self.text("#error"), self.text("#ready")), ("", "ready"))

    def test_leases(self):
        self.open()
        cells = self.browser.value("[...document.querySelectorAll('#leases tr:nth-child(2) td')].map(cell => cell.innerText)")
        self.assertEqual(cells, ["qwen", "7", "ana, user 1000, process 4711", "cpu", "1 d 2 h 3 min", "5.0 GiB"])
        self.site.status["leases"] = []
        self.open()
        self.assertIn("nobody has one", self.text("#leases"))
        del self.site.status["leases"]  # a server without --lend
        self.open()
        self.assertEqual(self.browser.value("document.querySelector('#lent').getBoundingClientRect().height"), 0)

    def test_memory_is_that_of_the_process(self):
        self.open()
        self.assertIn("held by awqd 5.0 GiB", self.browser.value(f"{self.plot('Device memory')}.innerText"))
        self.assertEqual(self.text("#devices td[data-label=Held]"), "5.0 GiB")


if __name__ == "__main__":
    if BROWSER is None:
        print("no chromium")
        sys.exit(77)
    unittest.main()
