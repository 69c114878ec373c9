// One thread for each linear, one at a time.
#include "client/tools/read_ahead.h"

#include <cstdint>
#include <system_error>

#include "client/tools/elements.h"

namespace awqd::tools {

absl::StatusOr<HostWeight> ReadAhead::Next() {
  if (!next_.valid()) Begin();
  absl::StatusOr<HostWeight> out = next_.get();
  Begin();
  return out;
}

void ReadAhead::Begin() {
  if (begun_ == linears_.size()) return;
  const model::LinearLocation* const linear = linears_[begun_++];
  const auto read = [this, linear] { return ReadWeight(checkpoint_, *linear); };
  try {
    next_ = std::async(std::launch::async, read);
  } catch (const std::system_error&) {  // the process may start no thread: when it is asked for
    next_ = std::async(std::launch::deferred, read);
  }
}

}  // namespace awqd::tools
