// Where tests find files and binaries: beside what they were built from or, if the environment says
// so, in the folder of a bundle on another machine.
#pragma once

#include <cstdlib>
#include <string>

namespace awqd {

inline std::string FromEnvironment(const char* name, const std::string& otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// A file of tests/data.
inline std::string DataPath(const std::string& name) {
  static const std::string folder =
      FromEnvironment("AWQD_TEST_DATA", std::string(AWQD_SOURCE_DIR) + "/tests/data");
  return folder + "/" + name;
}

}  // namespace awqd
