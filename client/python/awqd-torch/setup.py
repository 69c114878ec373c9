"""Puts a libawqd that was built into the wheel: LIBAWQD=build/cuda/kernels/library/libawqd.so python -m build --wheel"""
import os
import pathlib
import shutil

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        library = os.environ.get("LIBAWQD", "")
        if not os.path.isfile(library):
            raise SystemExit(f"LIBAWQD: got {library!r}, expected the path of a libawqd.so")
        shutil.copyfile(library, pathlib.Path(self.build_lib) / "awqd_torch" / "libawqd.so.1")


class WheelOfThisMachine(bdist_wheel):
    """Any Python 3, as ctypes loads the library, but this system and processor."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelOfThisMachine})
