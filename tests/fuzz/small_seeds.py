"""Seeds of the fuzz targets whose inputs are texts: names, the config file, identities and certificates, HTTP requests."""
import base64
import hashlib
import shutil
import subprocess

EVERY, EXACT, CONTAINS, REGEX = b"\0", b"\1", b"\2", b"\3"  # ModulePattern::Kind
LAYER = b"model.layers.0.mlp.up_proj"
TOKEN = "metrics-token"  # of fuzz_metrics_http.cc

NAMES = {  # a name, a path, patterns
    "model": [b"m", b"m/config.json", EVERY],
    "hub": [b"models--O--N", b"models--O--N/refs/main", EXACT + LAYER],
    "hub-name": [b"O--N", b"O--N/config.json"],
    "link": [b"link", b"link/config.json", CONTAINS + b"mlp"],
    "link-up": [b"m", b"m/up/m/up/link/deep/config.json"],
    "link-out": [b"out", b"out/config.json"],
    "link-absolute": [b"absolute", b"absolute/config.json"],
    "loop": [b"loop", b"loop/config.json"],
    "climb": [b"..", b"../outside/config.json"],
    "climb-within": [b".m", b"m/../m/config.json"],
    "controls": [b"a\nb\x1b[2J", "a\u202eb\u2028c\x85".encode(), CONTAINS + b"\x1b"],
    "nul": [b"m\0", b"m\0/config.json"],
    "long": [b"a" * 129, b"a" * 300 + b"/config.json"],
    "expert": [b"m", b"model.layers.0.mlp.experts.12.up_proj", EXACT + LAYER, REGEX + rb".*experts\.\d+\.up_proj"],
    "experts": [b"m", b"model.layers.0.mlp.experts.up_proj", REGEX + b"model.layers.[0-9]+.*"],
    "expert-last": [b"m", b"model.layers.0.mlp.experts.up_proj.12"],
    "exps": [b"m", b"blk.0.ffn_up_exps", CONTAINS + b"_exps"],
    "tensor": [b"m", LAYER + b".qweight", REGEX + b"(a|aa)+$"],
    "bad-regex": [b"m", LAYER, REGEX + b"(?!lm_head)"],
    "protocol": [b"m/" + LAYER + b":dequantize", LAYER],
    "protocol-mlp": [b"m/model.layers.0.mlp:gated_mlp", b"a"],
    "protocol-stack": [b"m/model.experts.*.up_proj", b"experts.*"],
}
CONFIGS = {
    "lists": 'load_model = ["a", "b"]\npin = []\nlanes = 2\nbatch_invariant = true\nslow_call_s = 0.5\n',
    "table": "[models]\na = 1\n",
    "date": "lanes = 1979-05-27T07:32:00Z\n",
    "nested": "a = [[[1]]]\nb = {c = 1}\n",
    "dotted": 'a.b."c d" = \'x\'\n',
    "multiline": 'a = """\nx\\\n  y"""\nb = \'\'\'z\'\'\'\n',
    "numbers": "a = 0x1F\nb = -1e300\nc = inf\nd = nan\ne = 1_000\nf = 9223372036854775807\n",
    "twice": "a = 1\na = 2\n",
    "bytes": "a = \"\\u0000\\U0010FFFF\"\n",
}


def identities():
    one, other = (hashlib.sha256(token.encode()).hexdigest() for token in ("one", "other"))
    return {
        "tokens": f"# one\nalice infer,read sha256:{one}\n\tbob admin\tsha256:{other.upper()}\r\n",
        "names": "probe metrics cert:dns:probe.example.org\nx@y read cert:cn:x\nz infer cert:uri:spiffe://a/b\n",
        "twice": f"a infer sha256:{one}\nb infer sha256:{one}\n",
        "roles": f"a root sha256:{one}\n",
        "token-for-digest": f"a infer sha256:{base64.urlsafe_b64encode(bytes(range(32))).decode()}\n",
        "token-for-roles": f"a {base64.urlsafe_b64encode(bytes(range(32))).decode()} sha256:{one}\n",
        "token-for-name": f"{base64.b64encode(bytes(range(200, 232))).decode()} infer sha256:{one}\n",
    }


def requests():
    basic = base64.b64encode(f"any:{TOKEN}".encode()).decode()
    def get(path, *headers, method="GET"):
        return "".join(line + "\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: a", *headers, ""))
    return {
        "metrics": get("/metrics", f"Authorization: Bearer {TOKEN}"),
        "metrics-basic": get("/metrics", f"Authorization: Basic {basic}"),
        "metrics-wrong": get("/metrics", "Authorization: Bearer other"),
        "metrics-two": get("/metrics", f"Authorization: Bearer {TOKEN}", "authorization: Bearer other"),
        "status": get("/api/status?x=%2e", f"Authorization: bearer {TOKEN}"),
        "page": get("/", f"Authorization: Bearer {TOKEN}"),
        "livez": get("/livez"),
        "readyz": get("/readyz", method="HEAD"),
        "post": get("/metrics", "Content-Length: 3", method="POST") + "abc",
        "chunked": get("/livez", "Transfer-Encoding: chunked") + "3\r\nabc\r\n0\r\n\r\n",
        "escapes": get("/%6detrics/../%00%0a"),
        "old": "GET /livez HTTP/1.0\r\n\r\n",
        "folded": "GET /livez HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n",
        "no-http": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    }


def write(folder, seeds):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in seeds.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def pem():
    """A key and its certificate, other ones every time."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "9",
            "-subj", "/CN=a", "-keyout", "-", "-out", "-"]
    return subprocess.run(make, check=True, capture_output=True).stdout


def write_all(corpus, root):
    """The seeds of each target into its folder beneath `corpus`; `root` is that of the sources."""
    write(corpus / "fuzz_names", {name: b"\xff".join(parts) for name, parts in NAMES.items()})
    write(corpus / "fuzz_config_file", {**CONFIGS, "shipped": (root / "deploy" / "awqd.toml").read_bytes()})
    write(corpus / "fuzz_security_files", {**identities(), "pem": pem()})
    write(corpus / "fuzz_metrics_http", requests())
