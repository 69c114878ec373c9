# Functions that every room uses, so that warnings, sanitizers and include folders are stated once.

# Flags of our own code only: generated and third-party code never gets them.
add_library(awqd_flags INTERFACE)
target_compile_options(awqd_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-Wno-missing-field-initializers>)
if(AWQD_CUDA)
  target_compile_options(awqd_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall;--expt-relaxed-constexpr;-Werror=all-warnings>)
endif()

# Every operation of ours rounds, whatever the machine and the compiler: no fused multiply-add in place of two roundings, but
# where a body asks for one. Of CUDA files this is their host code, which on x86-64 has none to use.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffp-contract=off>)
endif()

# Instruction sets that the CPU backend has bodies for here, besides the portable ones; the last one includes the others.
set(awqd_cpu_isas)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(awqd_cpu_isas avx2 avx512 avx512vnni)
  # Machines with more may lack AVX-VNNI: tests would run AVX2's bodies again.
  file(STRINGS /proc/cpuinfo awqd_has_avxvnni REGEX "^flags.* avx_vnni" LIMIT_COUNT 1)
  if(awqd_has_avxvnni)
    list(INSERT awqd_cpu_isas 1 avxvnni)
  endif()
  file(STRINGS /proc/cpuinfo awqd_has_amx REGEX "^flags.* amx_int8" LIMIT_COUNT 1)
  if(awqd_has_amx)
    list(APPEND awqd_cpu_isas amx)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(awqd_cpu_isas neon neondot)
endif()

# Compilers collect garbage while they compile, and walk the precompiled headers each time. Without it a file takes a tenth
# less time and 50 MB more memory.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=1048576>")
endif()

# Two hundred tests are linked, each with the whole server: lld takes a third of the time. A cross build has a sysroot that
# was tried with its own linker alone.
if(AWQD_TESTS AND NOT CMAKE_CROSSCOMPILING)
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=lld AWQD_HAS_LLD)
  if(AWQD_HAS_LLD)
    add_link_options($<$<LINK_LANGUAGE:CXX>:-fuse-ld=lld>)
  endif()
endif()

# For code that runs once or waits for people: command lines, options, generated messages.
set(awqd_cold_options $<$<COMPILE_LANGUAGE:CXX>:-O1>)

# Sanitizers go to everything compiled here, so that no half-instrumented object hides a race.
if(AWQD_SANITIZE)
  # Undefined behaviour ends the program, otherwise a test could print a report and pass.
  set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -fsanitize=${AWQD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1")
  add_link_options(-fsanitize=${AWQD_SANITIZE})
  # For code that must know: GCC has macros for it, clang has others.
  if(AWQD_SANITIZE MATCHES "address")
    add_compile_definitions(AWQD_ADDRESS_SANITIZER)
  elseif(AWQD_SANITIZE MATCHES "thread")
    add_compile_definitions(AWQD_THREAD_SANITIZER)
  endif()
endif()
if(AWQD_FUZZ)
  set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -fsanitize=fuzzer-no-link")
endif()

# Up to half of a test's compile time is optimisation that pays nothing back; what it tests keeps its own. Tests of the
# server and the client, which compute little themselves, go without any.
set(awqd_test_options $<$<COMPILE_LANGUAGE:CXX>:-O1>)
set(awqd_server_test_options $<$<COMPILE_LANGUAGE:CXX>:-O0>)
# Checks of undefined behaviour double the compile time of a test. They belong in what it tests.
if(AWQD_SANITIZE MATCHES "undefined")
  list(APPEND awqd_test_options -fno-sanitize=undefined)
  list(APPEND awqd_server_test_options -fno-sanitize=undefined)
endif()

# awqd_does_without_grpc(<variable>): whether this folder uses neither gRPC nor Protocol Buffers: kernels, client/tools, the
# rooms of the server behind its services, and what tests them.
function(awqd_does_without_grpc variable)
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE folder)
  set(${variable} FALSE PARENT_SCOPE)
  if(folder MATCHES
     "^(kernels|client/tools|tests/(architecture|conformance|testing)|(tests/)?(kernels|client/tools|server/(batching|engine|model|obs|repository|security)))(/|$)")
    set(${variable} TRUE PARENT_SCOPE)
  endif()
endfunction()
include(AwqdPrecompile)

# AWQD_UNITY compiles the rooms of the server and the client and the tests several files at a time, which halves the time of
# the whole and makes that of one changed file longer. Files of a kernel room repeat each other's names, so they are left as
# they are.
option(AWQD_UNITY "Compile several files of the server, the client and the tests at a time" OFF)
function(awqd_unite target)
  if(AWQD_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()

# awqd_library(name SRCS ... DEPS ...): one room (or part of one) as a static library.
function(awqd_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE awqd_flags)
  awqd_precompile(${name} LIBRARY)
  if(CMAKE_CURRENT_SOURCE_DIR MATCHES "^${PROJECT_SOURCE_DIR}/(server|client|kernels/checkpoint)(/|$)")
    awqd_unite(${name})
  endif()
endfunction()

# awqd_own_results(entry variable): the environment that gives one of several entries of an executable a file of
# results to itself. GoogleTest's own choice, <executable>_<n>.xml, is not safe when they run side by side.
function(awqd_own_results entry variable)
  set(${variable} "GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/results/gtest/${entry}.xml" PARENT_SCOPE)
endfunction()

# awqd_gpu_bundle(target ...): puts executables into the folder that travels to a bare GPU machine (AwqdBundle).
function(awqd_gpu_bundle)
  set_property(GLOBAL APPEND PROPERTY AWQD_GPU_BUNDLE_TARGETS ${ARGN})
endfunction()

# awqd_test(name SRCS ... DEPS ... LABELS ... [TIMEOUT s]): one GoogleTest binary, one ctest entry. A test labelled
# gpu also travels in the GPU bundle.
function(awqd_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS;ENV" ${ARGN})
  if(AWQD_SANITIZE MATCHES "thread" AND "awqd_failing_new" IN_LIST ARG_DEPS)
    return()  # clang's ThreadSanitizer has an operator new of its own that no other can replace
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  awqd_does_without_grpc(ground)
  if(ground)
    target_compile_options(${name} PRIVATE ${awqd_test_options})
  else()
    target_compile_options(${name} PRIVATE ${awqd_server_test_options})
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} awqd_places GTest::gmock_main awqd_flags)
  awqd_precompile(${name} TEST)
  awqd_unite(${name})
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(AWQD_SANITIZE MATCHES "thread")
    list(APPEND ARG_ENV "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp:history_size=7")
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       ENVIRONMENT "${ARG_ENV}")
  if("gpu" IN_LIST ARG_LABELS)
    awqd_gpu_bundle(${name})
  endif()
endfunction()
