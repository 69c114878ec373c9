# Precompiled headers (AWQD_PRECOMPILE): most of what the compiler does for a file here is to read the headers of gRPC,
# Protocol Buffers, Abseil and GoogleTest. Preset lto goes without, so that a file that forgets to include what it uses does
# not compile there.
#
# One set of headers serves every target of a kind: GCC accepts it only where the flags agree, and a library's
# (-fPIC) are not an executable's (-fPIE). All are compiled for threads, which some targets ask for.
option(AWQD_PRECOMPILE "Precompile the headers that most files include" OFF)

set(awqd_standard_headers
  <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstdio> <cstdlib> <cstring> <filesystem> <fstream>
  <functional> <limits> <map> <memory> <mutex> <optional> <random> <set> <sstream> <string> <thread> <utility> <vector>
  <absl/status/status.h> <absl/status/statusor.h> <absl/strings/match.h> <absl/strings/numbers.h>
  <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/strings/str_join.h> <absl/strings/str_split.h>
  <absl/strings/string_view.h> <absl/time/clock.h> <absl/time/time.h> <absl/types/span.h>)
set(awqd_server_headers
  ${awqd_standard_headers} <grpcpp/grpcpp.h> <awqd/v1/inference.grpc.pb.h>
  <awqd/v1/model_repository.grpc.pb.h> <awqd/v1/server_info.grpc.pb.h>)

# awqd_precompiled(<name> <LIBRARY|TEST> HEADERS ... DEPS ... OPTIONS ...): a target that others take their headers from.
function(awqd_precompiled name kind)
  cmake_parse_arguments(ARG "" "" "HEADERS;DEPS;OPTIONS" ${ARGN})
  set(source ${PROJECT_BINARY_DIR}/${name}.cc)
  file(WRITE ${source} "")
  add_library(${name} OBJECT ${source})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} awqd_flags)
  # Clang's by content alone, not by when a header was written: a compiler cache then serves a new checkout at the same
  # place. At another one it does not, as CMake names the header by its absolute path.
  target_compile_options(${name} PRIVATE -pthread $<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>)
  if(kind STREQUAL "TEST")
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIE ${ARG_OPTIONS})
  endif()
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
endfunction()

# awqd_precompile(<target> <LIBRARY|TEST>): lets a target use the headers of its kind. Folders that must do without
# gRPC (kernels and what tests them) get a set without it.
function(awqd_precompile target kind)
  if(NOT AWQD_PRECOMPILE)
    return()
  endif()
  string(TOLOWER "${kind}" name)
  set(deps absl::statusor absl::strings absl::time)
  if(kind STREQUAL "TEST")
    list(APPEND deps GTest::gmock)
    set(test_headers <gmock/gmock.h> <gtest/gtest.h>)
  endif()
  awqd_does_without_grpc(ground)
  if(ground)
    set(options ${awqd_test_options})
  else()
    set(options ${awqd_server_test_options})
  endif()
  if(AWQD_SERVER AND NOT ground)
    string(APPEND name "_server")
    list(APPEND deps awqd_proto)
    set(headers ${awqd_server_headers} ${test_headers})
  else()
    set(headers ${awqd_standard_headers} ${test_headers})
  endif()
  if(NOT TARGET awqd_headers_${name})
    awqd_precompiled(awqd_headers_${name} ${kind} HEADERS ${headers} DEPS ${deps} OPTIONS ${options})
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-pthread>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC no longer knows what came from a system's header, and takes what it inlines of std::string for ours.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>)
  endif()
  target_precompile_headers(${target} REUSE_FROM awqd_headers_${name})
endfunction()
