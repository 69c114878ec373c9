"""No kernel is compiled into libawqd twice: in two objects, or in the unnamed namespaces of two. Prints how large it is.

usage: kernels_test.py <libawqd.so> <folder of the objects>
"""
import collections
import pathlib
import re
import subprocess
import sys
import unittest


def without_file(name):
    """A mangled name without the file that nvcc adds to an unnamed namespace: a length, and so many characters."""
    while match := re.search(r"(\d+)(_GLOBAL__N__|_INTERNAL_)", name):
        name = f"{name[:match.start()]}12_GLOBAL__N_1{name[match.end(1) + int(match[1]):]}"
    return name


def run(*command, text=None):
    """Standard output. Constants that are no text are among the strings of an object."""
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True, errors="replace").stdout


def kernels():
    """The objects of each kernel: an object registers kernels by the names that its constant strings are."""
    objects = collections.defaultdict(set)
    for path in pathlib.Path(OBJECTS).rglob("*.cu.o"):
        strings = run("readelf", "-p", ".rodata", "-p", ".rodata.str1.1", "-p", ".rodata.str1.8", path)
        for name in re.findall(r"\]  (_Z\w+)$", strings, re.MULTILINE):
            objects[without_file(name)].add(str(path.relative_to(OBJECTS)))
    names = list(objects)
    demangled = run("c++filt", text="\n".join(names)).splitlines()
    # Variables are registered too, and have no parameters.
    return {text: objects[name] for name, text in zip(names, demangled, strict=True) if text.endswith(")")}


class Kernels(unittest.TestCase):
    def test_each_is_there_once(self):
        found = kernels()
        self.assertGreater(len(found), 100)
        twice = {name: sorted(objects) for name, objects in found.items() if len(objects) > 1}
        self.assertFalse(twice, f"{len(twice)} kernels")
        size = pathlib.Path(LIBRARY).stat().st_size
        sections = {name: int(size, 16) for name, size in
                    re.findall(r"\] (\.\w+) +\w+ +\w+ \w+ (\w+)", run("readelf", "-SW", LIBRARY))}
        print(f"{len(found)} kernels; libawqd has {size / 1e6:.1f} MB, of which kernels {sections['.nv_fatbin'] / 1e6:.1f}")


if __name__ == "__main__":
    OBJECTS, LIBRARY = sys.argv.pop(2), sys.argv.pop(1)
    unittest.main()
