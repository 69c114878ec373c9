// Finds the tests' files and binaries: in the build or, if the environment says so, in the folder
// of a bundle on another machine.
#pragma once

#include <string>

namespace awqd {

// A file of tests/data; AWQD_TEST_DATA names another folder.
std::string DataPath(const std::string& name);

// A binary of the build; AWQD_TEST_BIN names another folder.
std::string BinaryPath(const std::string& name);

// The device that AWQD_TEST_DEVICE names; "cpu" if it is not set.
std::string TestDeviceName();

}  // namespace awqd
