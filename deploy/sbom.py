#!/usr/bin/env python3
"""Writes what a release consists of as an SPDX 2.3 document, from what dpkg knows of this machine: the files of the
release with their checksums, the packages whose libraries the relocatable folder carries, and those that it was built
with. Needs no packages of Python. The time is SOURCE_DATE_EPOCH, so that the same files make the same document.

usage: sbom.py --version VERSION --libraries FOLDER --packages deploy/packages.txt -o FILE RELEASED_FILE...
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import sysconfig

FIELDS = ["Package", "Version", "Architecture", "source:Package", "source:Version", "Maintainer", "Homepage"]


class SbomError(Exception):
    """What is missing, in one line."""


def dpkg_query(*arguments):
    result = subprocess.run(["dpkg-query", *arguments], capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else ""


def owner(library):
    """The package that owns a shared library of this machine, by its name. Cross compilers have some of other machines."""
    owners = {}
    for line in dpkg_query("-S", f"*/{library}").splitlines():
        packages, path = line.split(": ", 1)
        if path.endswith(f"/{library}"):
            owners[path] = packages.split(",")[0].split(":")[0]
    for path in sorted(owners, key=lambda path: f"/lib/{sysconfig.get_config_var('MULTIARCH')}/" not in path):
        return owners[path]
    raise SbomError(f"library {library}: no package that is installed here owns it")


def build_packages(text):
    """The names of section [build] of deploy/packages.txt, of those that are installed here."""
    section = re.search(r"^\[build\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SbomError("packages: got no section [build]")
    names = re.findall(r"^([a-z0-9][a-z0-9.+-]*)", section.group(1), re.MULTILINE)
    return [name for name in names if dpkg_query("-W", "-f", "${db:Status-Status}", name) == "installed"]


def distribution():
    for line in pathlib.Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        if line.startswith("ID="):
            return line[3:].strip('"')
    return "debian"


def package(name):
    """A package of the distribution, as SPDX has it."""
    values = dpkg_query("-W", "-f", "\\n".join(f"${{{field}}}" for field in FIELDS) + "\\n\\n", name).split("\n")
    found = dict(zip(FIELDS, values))
    if not found.get("Version"):
        raise SbomError(f"package {name}: it is not installed here")
    maintainer = re.match(r"(.*) <(.*)>", found["Maintainer"])
    version = found["Version"].replace(":", "%3A").replace("+", "%2B")
    out = {
        "SPDXID": spdx_id("Package", name),
        "name": name,
        "versionInfo": found["Version"],
        "supplier": "Organization: {} ({})".format(*maintainer.groups()) if maintainer else "NOASSERTION",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "sourceInfo": f"built from the source package {found['source:Package']} {found['source:Version']}",
        "externalRefs": [{
            "referenceCategory": "PACKAGE-MANAGER",
            "referenceType": "purl",
            "referenceLocator": f"pkg:deb/{distribution()}/{name.replace('+', '%2B')}@{version}?arch={found['Architecture']}",
        }],
    }
    if found["Homepage"]:
        out["homepage"] = found["Homepage"]
    return out


def spdx_id(kind, name):
    return f"SPDXRef-{kind}-" + re.sub(r"[^A-Za-z0-9.-]", lambda match: f"-{ord(match.group()):02x}-", name)


def digest(path, algorithm):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def released(path):
    return {
        "SPDXID": spdx_id("File", path.name),
        "fileName": f"./{path.name}",
        "checksums": [{"algorithm": algorithm, "checksumValue": digest(path, algorithm.lower())}
                      for algorithm in ("SHA1", "SHA256")],  # SPDX 2.3 insists on the first
        "licenseConcluded": "NOASSERTION",
        "copyrightText": "NOASSERTION",
    }


def document(version, libraries, built_with, files):
    main = spdx_id("Package", "awqd")
    carried = sorted({owner(library) for library in libraries})
    file_entries = [released(path) for path in sorted(files)]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", main)]
    relations += [(main, "DISTRIBUTION_ARTIFACT", entry["SPDXID"]) for entry in file_entries]
    relations += [(main, "DEPENDS_ON", spdx_id("Package", name)) for name in carried]
    relations += [(spdx_id("Package", name), "BUILD_DEPENDENCY_OF", main) for name in built_with]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", datetime.datetime.now().timestamp()))
    created = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    unique = hashlib.sha256(json.dumps([file_entries, carried, created]).encode()).hexdigest()[:32]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"awqd-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/awqd-{version}-{unique}",
        "creationInfo": {"created": created, "creators": ["Organization: The awqd authors", f"Tool: awqd-sbom-{version}"]},
        "packages": [{
            "SPDXID": main,
            "name": "awqd",
            "versionInfo": version,
            "supplier": "Organization: The awqd authors",
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "licenseConcluded": "Apache-2.0",
            "licenseDeclared": "Apache-2.0",
            "copyrightText": "NOASSERTION",
            "comment": f"for {platform.machine()} with the C library of the machine that it was built on, or a newer one",
        }] + [package(name) for name in sorted({*carried, *built_with})],
        "files": file_entries,
        "relationships": [{"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b}
                          for a, kind, b in relations],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--version", required=True)
    parser.add_argument("--libraries", required=True, type=pathlib.Path, help="folder lib/ of the relocatable folder")
    parser.add_argument("--packages", required=True, type=pathlib.Path)
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    try:
        libraries = sorted(path.name for path in options.libraries.iterdir())
        built_with = build_packages(options.packages.read_text(encoding="utf-8"))
        out = document(options.version, libraries, built_with, options.files)
    except (SbomError, OSError) as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    options.output.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
