#!/usr/bin/env bash
# awqd with gRPC 1.83 (deploy/newer_grpc) in a root of Debian 13: server and client are built there, the tests of what is
# closest to gRPC run, and so do hostile peers. Status 77 is a skip; the last line says why.
# usage: newer_grpc_test.sh <build directory> <source directory>
set -euo pipefail
[[ -n "${AWQD_TEST_LONG:-}" ]] || { echo "it takes most of an hour (tests/run.sh --long)"; exit 77; }
# shellcheck disable=SC2016  # expanded in the root
"$2/deploy/newer_grpc/in_root.sh" "$1/newer-grpc/root" bash -euo pipefail -c '
  ROOT=/src/awqd; source deploy/lib.sh
  install_packages test
  configure cpu
  tests=(server_wire_test server_transport_test server_security_test server_services_test client_test client_credentials_test
    connection_e2e_test acceptor_e2e_test security_e2e_test)
  build cpu awqd awqctl "${tests[@]}"
  [[ "$(ldd build/cpu/bin/awqd)" == *libgrpc++.so.1.83* ]] || die "awqd is not linked with gRPC 1.83"
  ctest --test-dir build/cpu --output-on-failure --no-tests=error -R "^($(IFS="|"; echo "${tests[*]}"))\$"
  tests/attack/run.sh build/cpu attack_test.py'
echo "newer gRPC test: ok"
