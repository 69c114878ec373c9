#!/usr/bin/env python3
"""Renders the chart to the plain manifests beside it, for those who do not use Helm.

Usage: render.py [--out DIR]    needs helm-python-sdk (PyPI), which is Helm's library

`helm template awqd deploy/kubernetes/awqd --namespace awqd -f examples/NAME.yaml` gives the same.
"""
import argparse
import pathlib

import helm_python
import yaml

HERE = pathlib.Path(__file__).resolve().parent
NAMESPACE = "awqd"


def render(values):
    """The manifests as one text, in the order of their files."""
    with helm_python.Chart.load(str(HERE / "awqd")) as chart:
        files = chart.render(values, name="awqd", namespace=NAMESPACE)
    texts = [text.strip() for name, text in sorted(files.items()) if not name.endswith(".txt") and text.strip()]
    return "\n---\n".join(texts) + "\n"


def examples():
    """Name -> values of each file in examples/."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((HERE / "examples").glob("*.yaml"))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "manifests")
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    for name, values in examples().items():
        head = f"# Rendered from the chart with examples/{name}.yaml by render.py; do not edit.\n"
        (folder / f"{name}.yaml").write_text(head + render(values))
