# cmake -P script behind the targets of AwqdBundle.cmake: copies BINARIES, the shared libraries that they need and
# the documents into OUT/NAME, and packs OUT/NAME.tar.gz, or with the GPU tests OUT/NAME.tar.xz.
cmake_minimum_required(VERSION 3.25)

if(SLOW AND KIND STREQUAL "gpu_bundle")
  message(FATAL_ERROR "got a build with AWQD_CUDA_FAST_COMPILE, whose kernels are slow, expected -DAWQD_CUDA_FAST_COMPILE=OFF")
elseif(SLOW)
  message(WARNING "AWQD_CUDA_FAST_COMPILE is on: this folder's kernels are slow")
endif()

# Left to the machine that runs the bundle: the C library, because it must match the kernel and the loader, and
# the GPU's driver and cuBLAS, because they belong to the GPU.
set(system_libraries
  "^ld-linux" "^libc\\.so" "^libm\\.so" "^libdl\\.so" "^librt\\.so" "^libpthread\\.so" "^libresolv\\.so"
  "^libutil\\.so" "^libanl\\.so" "^libmvec\\.so" "^libcuda\\.so" "^libnvidia" "^libcublas")

set(dir ${OUT}/${NAME})
file(REMOVE_RECURSE ${dir})
file(MAKE_DIRECTORY ${dir}/bin ${dir}/lib ${dir}/licenses ${dir}/models)

foreach(binary IN LISTS BINARIES)
  file(COPY ${binary} DESTINATION ${dir}/bin)
  cmake_path(GET binary FILENAME name)
  execute_process(COMMAND ${STRIP} ${dir}/bin/${name} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${BINARIES}
     RESOLVED_DEPENDENCIES_VAR libraries UNRESOLVED_DEPENDENCIES_VAR missing
     PRE_EXCLUDE_REGEXES ${system_libraries})
if(missing)
  message(FATAL_ERROR "bundle: shared libraries not found: ${missing}")
endif()
find_program(dpkg dpkg-query)
foreach(library IN LISTS libraries)
  # Copied under the name that binaries ask for, not the name behind the symbolic link.
  cmake_path(GET library FILENAME name)
  file(REAL_PATH ${library} real)
  file(COPY_FILE ${real} ${dir}/lib/${name})
  # Each library travels with the licence text of the package that it came from.
  if(dpkg)
    execute_process(COMMAND ${dpkg} -S ${real} OUTPUT_VARIABLE owner ERROR_QUIET)
    if(NOT owner)  # merged /usr: packages may own the path without the prefix
      string(REGEX REPLACE "^/usr" "" unmerged ${real})
      execute_process(COMMAND ${dpkg} -S ${unmerged} OUTPUT_VARIABLE owner ERROR_QUIET)
    endif()
    string(REGEX REPLACE ":.*" "" package "${owner}")
    if(package AND EXISTS /usr/share/doc/${package}/copyright)
      file(COPY_FILE /usr/share/doc/${package}/copyright ${dir}/licenses/${package})
    endif()
  endif()
endforeach()

file(COPY ${SOURCE}/README.md ${SOURCE}/LICENSE ${SOURCE}/NOTICE DESTINATION ${dir})
# The drawings and documents that README.md links to, where it looks for them.
file(READ ${SOURCE}/README.md readme)
string(REGEX MATCHALL "\\([A-Za-z0-9_./-]+[#)]" links "${readme}")
foreach(link IN LISTS links)
  string(REGEX REPLACE "[(#)]" "" link "${link}")
  if(EXISTS ${SOURCE}/${link} AND NOT IS_DIRECTORY ${SOURCE}/${link})
    cmake_path(GET link PARENT_PATH folder)
    file(COPY ${SOURCE}/${link} DESTINATION ${dir}/${folder})
  endif()
endforeach()
file(GLOB models RELATIVE ${SOURCE}/tests/data/awq ${SOURCE}/tests/data/awq/*/config.json)
foreach(model IN LISTS models)
  cmake_path(GET model PARENT_PATH model)
  file(COPY ${SOURCE}/tests/data/awq/${model} DESTINATION ${dir}/models)
endforeach()
if(KIND STREQUAL "gpu_bundle")
  file(COPY ${SOURCE}/tests/gpu ${SOURCE}/tests/data DESTINATION ${dir}/tests)
  file(COPY ${SOURCE}/tests/interop/server.py DESTINATION ${dir}/tests/interop)
  file(COPY ${SOURCE}/tests/client/python DESTINATION ${dir}/tests/client FILES_MATCHING PATTERN "*.py")
  file(COPY ${SOURCE}/tests/bench/peer ${SOURCE}/tests/bench/make_checkpoint.py ${SOURCE}/tests/bench/serving.sh
            ${SOURCE}/tests/bench/serving_report.py ${SOURCE}/tests/bench/soak.sh
            ${SOURCE}/tests/bench/lease_soak.py ${SOURCE}/tests/bench/gpu_report.py
            ${SOURCE}/tests/bench/load.py ${SOURCE}/tests/bench/generate.py
            ${SOURCE}/tests/bench/random_model.py ${SOURCE}/tests/bench/pairs.py DESTINATION ${dir}/tests/bench)
  foreach(binary IN LISTS BINARIES)
    cmake_path(GET binary PARENT_PATH folder)
    if(EXISTS ${folder}/awqd.protoset AND NOT EXISTS ${dir}/bin/awqd.protoset)
      file(COPY ${folder}/awqd.protoset DESTINATION ${dir}/bin)
    endif()
  endforeach()
endif()

# The GPU tests are a dozen binaries with the same kernels. A compression window longer than one binary packs their
# 630 MiB into 25.
find_program(xz xz)
if(KIND STREQUAL "gpu_bundle" AND xz)
  set(archive ${NAME}.tar.xz)
  execute_process(COMMAND ${CMAKE_COMMAND} -E tar cf ${NAME}.tar ${NAME} WORKING_DIRECTORY ${OUT}
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${xz} --force --threads=1 --lzma2=preset=1,dict=192MiB ${NAME}.tar
                  WORKING_DIRECTORY ${OUT} COMMAND_ERROR_IS_FATAL ANY)
else()
  set(archive ${NAME}.tar.gz)
  execute_process(COMMAND ${CMAKE_COMMAND} -E tar czf ${archive} ${NAME} WORKING_DIRECTORY ${OUT}
                  COMMAND_ERROR_IS_FATAL ANY)
endif()
file(SIZE ${OUT}/${archive} size)
math(EXPR size "${size} / 1048576")
message(STATUS "bundle: out/${archive}, ${size} MiB")
