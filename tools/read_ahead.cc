// One thread for each linear, one at a time.
#include "tools/read_ahead.h"

#include <cstdint>
#include <system_error>

#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

absl::StatusOr<HostWeight> ReadValid(const model::Checkpoint& checkpoint,
                                     const model::LinearLocation& linear) {
  std::vector<uint8_t> scratch;
  AWQD_ASSIGN_OR_RETURN(HostWeight weight, checkpoint.Read(linear, &scratch));
  AWQD_RETURN_IF_ERROR(Validate(weight));
  return weight;
}

}  // namespace

absl::StatusOr<HostWeight> ReadAhead::Next() {
  if (!next_.valid()) Begin();
  absl::StatusOr<HostWeight> out = next_.get();
  Begin();
  return out;
}

void ReadAhead::Begin() {
  if (begun_ == linears_.size()) return;
  const model::LinearLocation* const linear = linears_[begun_++];
  const auto read = [this, linear] { return ReadValid(checkpoint_, *linear); };
  try {
    next_ = std::async(std::launch::async, read);
  } catch (const std::system_error&) {  // the process may start no thread: when it is asked for
    next_ = std::async(std::launch::deferred, read);
  }
}

}  // namespace awqd::tools
