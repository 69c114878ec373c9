# Toolchain of preset aarch64: Debian's cross compiler, and qemu-user to run what it makes.
#
# The arm64 libraries lie in AWQD_SYSROOT (deploy/arm64_sysroot.sh collects them). Where that folder does not exist they are
# those that the system installed beside its own (dpkg --add-architecture arm64). protoc and grpc_cpp_plugin are this machine's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

set(AWQD_SYSROOT ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-sysroot CACHE PATH "Folder with the arm64 packages")
# CMake's own tests of the compiler read this file too.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES AWQD_SYSROOT)
set(awqd_emulator_options)
if(IS_DIRECTORY ${AWQD_SYSROOT})
  file(REAL_PATH ${AWQD_SYSROOT} CMAKE_SYSROOT)
  set(awqd_emulator_options -L ${CMAKE_SYSROOT})
  # gRPC's CMake files ask pkg-config for RE2: the sysroot's, not this machine's.
  set(ENV{PKG_CONFIG_SYSROOT_DIR} ${CMAKE_SYSROOT})
  set(ENV{PKG_CONFIG_LIBDIR} ${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${CMAKE_SYSROOT}/usr/share/pkgconfig)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

find_program(AWQD_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(AWQD_QEMU)
  # "max" has every extension that the emulator knows; the bodies choose theirs as on a machine.
  set(CMAKE_CROSSCOMPILING_EMULATOR ${AWQD_QEMU} -cpu max ${awqd_emulator_options})
endif()
