# SPDX-License-Identifier: Apache-2.0
"""flash3 for Conan 2, from the sources around this file: conan create packaging/conan"""
import pathlib
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir
from conan.tools.system.package_manager import Apt


class Flash3(ConanFile):
    name = "flash3"
    description = "Exact attention for NVIDIA Hopper GPUs and CPUs"
    license = "Apache-2.0"
    topics = ("attention", "cuda", "simd")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    # hopper: the GPU backend; AUTO has it where there is a CUDA compiler. cli: the program.
    options = {"shared": [True, False], "hopper": ["AUTO", "ON", "OFF"], "cli": [True, False]}
    default_options = {"shared": False, "hopper": "AUTO", "cli": False}

    @property
    def _root(self):
        return pathlib.Path(self.recipe_folder).parents[1]

    def set_version(self):
        header = load(self, self._root / "include/flash3/version.h")
        self.version = re.search(r'FLASH3_VERSION_STRING "(.+)"', header)[1]

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "NOTICE", "cmake/*", "include/*", "src/*", "tools/*"):
            copy(self, pattern, self._root, self.export_sources_folder)

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"os = {self.settings.os}; flash3 builds on Linux alone")

    def system_requirements(self):  # headers, compiled in; the second line is the program's
        Apt(self).install(["libhwy-dev"])
        if self.options.cli:
            Apt(self).install(["libcli11-dev", "libfmt-dev", "nlohmann-json3-dev"])

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables.update({
            "FLASH3_HOPPER": str(self.options.hopper), "FLASH3_SHARED": bool(self.options.shared),
            "FLASH3_CLI": bool(self.options.cli), "FLASH3_EXAMPLES": False, "FLASH3_TESTS": False, "FLASH3_PYTHON": "OFF",
            "FLASH3_TVM_FFI": "OFF"})
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, pathlib.Path(self.package_folder, "licenses"))
        copy(self, "NOTICE", self.source_folder, pathlib.Path(self.package_folder, "licenses"))
        rmdir(self, pathlib.Path(self.package_folder, "lib/pkgconfig"))  # Conan's generator writes one

    def package_info(self):
        # flash3's own CMake package, with all its targets, serves.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/flash3"]
        self.cpp_info.set_property("pkg_config_name", "flash3")
        self.cpp_info.libs = ["flash3"]
        if not self.options.shared:
            if pathlib.Path(self.package_folder, "lib/libflash3_cudart.a").is_file():
                self.cpp_info.libs.append("flash3_cudart")
            self.cpp_info.system_libs = ["stdc++", "m", "pthread", "dl", "rt"]
