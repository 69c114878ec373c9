# Targets `bundle` and `gpu_bundle`: one relocatable folder, and a tarball of it, that runs on any Linux
# of the same architecture with the same or a newer glibc and without the packages that the build needed.
#
# Binaries carry RPATH $ORIGIN/../lib, the old tag on purpose. With RUNPATH, the loader would look there only for
# libraries that the binary itself names; with RPATH it does so also for those that its libraries name (Abseil for
# gRPC). So no library has to be changed.
#
# Not of a cross build: what a binary needs is asked of this machine's loader.
if(CMAKE_CROSSCOMPILING OR AWQD_SANITIZE OR NOT TARGET awqd)
  return()
endif()

function(awqd_relocatable)
  foreach(target IN LISTS ARGN)
    set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../lib")
    target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
  endforeach()
endfunction()

# awqd_bundle_target(<target> <folder> <binaries>... ): collects after a build of the binaries.
function(awqd_bundle_target name folder)
  set(files)
  foreach(target IN LISTS ARGN)
    list(APPEND files $<TARGET_FILE:${target}>)
  endforeach()
  add_custom_target(${name}
    COMMAND ${CMAKE_COMMAND} "-DBINARIES=${files}" -DSOURCE=${PROJECT_SOURCE_DIR} -DNAME=${folder}
            -DOUT=${PROJECT_SOURCE_DIR}/out -DSTRIP=${CMAKE_STRIP} -DKIND=${name}
            -DSLOW=$<BOOL:${AWQD_CUDA_FAST_COMPILE}>
            -P ${PROJECT_SOURCE_DIR}/cmake/bundle.cmake
    DEPENDS ${ARGN} VERBATIM COMMENT "Collecting out/${folder}")
endfunction()

# The same with gRPC 1.83, built in a root of Debian 13: root and a Debian mirror are needed.
add_custom_target(newer_grpc_bundle COMMAND ${PROJECT_SOURCE_DIR}/deploy/newer_grpc/folder.sh
  ${PROJECT_BINARY_DIR}/newer-grpc/root VERBATIM USES_TERMINAL)

get_property(gpu_targets GLOBAL PROPERTY AWQD_GPU_BUNDLE_TARGETS)
list(REMOVE_DUPLICATES gpu_targets)
awqd_relocatable(awqd awqctl ${gpu_targets})
# libawqd where it is built.
foreach(target awqd_bench awqd_lease_client)
  if(target IN_LIST gpu_targets)
    set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "$ORIGIN/../kernels/library" "$ORIGIN/../../kernels/library")
  endif()
endforeach()
awqd_bundle_target(bundle awqd-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR} awqd awqctl)
if(gpu_targets)
  awqd_bundle_target(gpu_bundle awqd-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}-gputest awqd awqctl ${gpu_targets})
endif()
