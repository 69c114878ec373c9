"""libawqd exports the functions of its header, by the version of its ABI, and nothing else."""
import pathlib
import re
import subprocess
import sys
import unittest

HEADER = pathlib.Path(__file__).resolve().parents[3] / "kernels/library/awqd.h"


class Symbols(unittest.TestCase):
    def test_exports_are_the_header(self):
        text = HEADER.read_text()
        declared = set(re.findall(r"^AWQD_API .*?\b(awqd_\w+)\(", text, re.MULTILINE))
        version = re.search(r"#define AWQD_ABI_VERSION (\d+)", text).group(1)
        table = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", LIBRARY],
                               check=True, capture_output=True, text=True).stdout
        exported = {line.split()[-1] for line in table.splitlines() if line.split()[-2] != "A"}
        self.assertGreater(len(declared), 15)
        self.assertEqual(exported, {f"{name}@@AWQD_{version}" for name in declared})


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    unittest.main()
