// Fuzzes the parser of requests for products, of both protocols, against the generated parser: the
// same status (except for groups and the number of fields) and the same message for any bytes in
// any split.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "google/protobuf/stubs/logging.h"
#include "tests/server/wire/wire_check.h"

// The first four bytes determine how the rest is split.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer* const silent = new google::protobuf::LogSilencer;
  (void)silent;
  uint32_t seed = 0;
  if (size < sizeof(seed)) return 0;
  std::memcpy(&seed, data, sizeof(seed));
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + sizeof(seed),
                                size - sizeof(seed));
  const std::string difference = awqd::wire::WireDifference(bytes, seed);
  if (difference.empty()) return 0;
  std::fprintf(stderr, "%s\n", difference.c_str());
  std::abort();
}
