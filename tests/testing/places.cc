// Finds the tests' files and binaries. Only this file knows the build's folders, so that a compiler
// cache can serve all other files to another checkout.
#include "tests/testing/places.h"

#include <cstdlib>

namespace awqd {
namespace {

std::string FromEnvironment(const char* name, const std::string& otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

}  // namespace

std::string DataPath(const std::string& name) {
  static const std::string folder =
      FromEnvironment("AWQD_TEST_DATA", AWQD_SOURCE_DIR "/tests/data");
  return folder + "/" + name;
}

std::string BinaryPath(const std::string& name) {
  static const std::string folder = FromEnvironment("AWQD_TEST_BIN", AWQD_BINARY_DIR "/bin");
  return folder + "/" + name;
}

std::string TestDeviceName() { return FromEnvironment("AWQD_TEST_DEVICE", "cpu"); }

}  // namespace awqd
