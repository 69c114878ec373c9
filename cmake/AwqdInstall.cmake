# `cmake --install`, in the components server, library, client and dev, and a Debian package of each (cpack -G DEB).
# A cross build has the first alone.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# awqd_install_pc(<name> <component>): cmake/<name>.pc.in. The prefix may be chosen as late as at the installation.
function(awqd_install_pc name component)
  install(CODE "
    set(PROJECT_VERSION ${PROJECT_VERSION})
    set(CMAKE_INSTALL_LIBDIR ${CMAKE_INSTALL_LIBDIR})
    set(CMAKE_INSTALL_INCLUDEDIR ${CMAKE_INSTALL_INCLUDEDIR})
    configure_file(\"${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in\" \"${PROJECT_BINARY_DIR}/${name}.pc\" @ONLY)
  " COMPONENT ${component})
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT ${component})
endfunction()

# --- client: awqctl ---
install(TARGETS awqctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT client)
install(FILES deploy/completion/awqctl.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
        RENAME awqctl COMPONENT client)
install(FILES deploy/completion/_awqctl DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT client)

# --- dev: the client library ---
set(AWQD_INCLUDE_DIR ${CMAKE_INSTALL_INCLUDEDIR}/awqd)
install(TARGETS awqd_client awqd_proto awqd_messages ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
install(FILES client/awqd_client.h client/remove_on_signal.h client/ring.h client/security.h client/shared_memory.h client/tensor.h
        DESTINATION ${AWQD_INCLUDE_DIR}/client COMPONENT dev)
foreach(folder awqd/v1 google/rpc)
  install(DIRECTORY ${PROJECT_BINARY_DIR}/generated/${folder}/ DESTINATION ${AWQD_INCLUDE_DIR}/${folder}
          COMPONENT dev FILES_MATCHING PATTERN "*.pb.h" PATTERN "*_mock.grpc.pb.h" EXCLUDE)
endforeach()
install(DIRECTORY proto/awqd DESTINATION ${CMAKE_INSTALL_DATADIR}/awqd/proto COMPONENT dev)
configure_package_config_file(cmake/awqd-config.cmake.in ${PROJECT_BINARY_DIR}/awqd-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/awqd PATH_VARS CMAKE_INSTALL_LIBDIR AWQD_INCLUDE_DIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/awqd-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/awqd-config.cmake ${PROJECT_BINARY_DIR}/awqd-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/awqd COMPONENT dev)
awqd_install_pc(awqd dev)

# --- server: awqd ---
set(programs awqctl)
if(TARGET awqd)
  list(APPEND programs awqd)
  install(TARGETS awqd RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT server)
  # Beside /usr, not in it; beneath any other prefix.
  install(CODE "
    set(etc \"\${CMAKE_INSTALL_PREFIX}/etc\")
    if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
      set(etc /etc)
    endif()
    file(INSTALL \"${PROJECT_SOURCE_DIR}/deploy/awqd.toml\" DESTINATION \"\${etc}/awqd\")
    file(READ \"${PROJECT_SOURCE_DIR}/deploy/awqd.service\" unit)
    string(REPLACE /usr/bin \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\" unit \"\${unit}\")
    string(REPLACE /etc/awqd \"\${etc}/awqd\" unit \"\${unit}\")
    file(WRITE \"${PROJECT_BINARY_DIR}/awqd.service\" \"\${unit}\")
    file(INSTALL \"${PROJECT_BINARY_DIR}/awqd.service\" DESTINATION \"\${CMAKE_INSTALL_PREFIX}/lib/systemd/system\")
  " COMPONENT server)
  install(FILES deploy/completion/awqd.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
          RENAME awqd COMPONENT server)
  install(FILES deploy/completion/_awqd DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT server)
endif()

# --- library: libawqd, its C header, find_package(libawqd) and libawqd.pc ---
if(TARGET awqd_shared)
  install(TARGETS awqd_shared EXPORT libawqd LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
          NAMELINK_COMPONENT library INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(FILES kernels/library/awqd.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
  install(EXPORT libawqd NAMESPACE awqd:: FILE libawqd-config.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/libawqd
          COMPONENT library)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/libawqd-config-version.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/libawqd-config-version.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/libawqd
          COMPONENT library)
  awqd_install_pc(libawqd library)
endif()

# Manual pages are printed by the programs. dpkg-shlibdeps asks this machine for the libraries that a package depends on, and
# cpack for its architecture.
if(CMAKE_CROSSCOMPILING)
  return()
endif()

# --- manual pages, made of what --help=all prints: target `man`, where help2man is installed ---
find_program(AWQD_HELP2MAN help2man)
if(AWQD_HELP2MAN)
  set(pages)
  set(about_awqd "gRPC server for quantised weights")
  set(about_awqctl "command line of awqd, and tools for checkpoints")
  foreach(program IN LISTS programs)
    set(page ${PROJECT_BINARY_DIR}/man/${program}.1)
    add_custom_command(OUTPUT ${page}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/man
      COMMAND ${AWQD_HELP2MAN} --no-info --help-option=--help=all "--name=${about_${program}}" --output=${page}
              $<TARGET_FILE:${program}>
      DEPENDS ${program} VERBATIM)
    list(APPEND pages ${page})
  endforeach()
  add_custom_target(man DEPENDS ${pages})
endif()
install(FILES ${PROJECT_BINARY_DIR}/man/awqctl.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT client OPTIONAL)
if(TARGET awqd)
  install(FILES ${PROJECT_BINARY_DIR}/man/awqd.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT server OPTIONAL)
endif()

# --- Debian packages: awqd-server, awqd-library, awqd-client, libawqd-dev ---
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME awqd)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "The awqd authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "gRPC server for quantised weights")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_SOURCE_DIR}/out)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_SET_DESTDIR ON)  # as /etc is beside it
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL client dev)
if(TARGET awqd)
  list(APPEND CPACK_COMPONENTS_ALL server library)
endif()
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_SERVER_PACKAGE_NAME awqd-server)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME awqd-library)
set(CPACK_DEBIAN_CLIENT_PACKAGE_NAME awqd-client)
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libawqd-dev)
set(CPACK_DEBIAN_SERVER_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_CLIENT_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libgrpc++-dev, libprotobuf-dev, libabsl-dev")
set(CPACK_DEBIAN_SERVER_PACKAGE_CONTROL_EXTRA ${PROJECT_SOURCE_DIR}/deploy/debian/conffiles)
set(CPACK_DEBIAN_SERVER_DESCRIPTION "gRPC server for quantised weights, with its systemd unit")
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "libawqd: the kernels of awqd behind a C ABI")
set(CPACK_DEBIAN_CLIENT_DESCRIPTION "awqctl: command line of awqd, and tools for checkpoints")
set(CPACK_DEBIAN_DEV_DESCRIPTION "C++ client library of awqd")
include(CPack)
