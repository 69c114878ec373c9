// ReadAhead: a linear is read and decoded while the one before it is written.
#pragma once

#include <cstddef>
#include <future>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/weight.h"

namespace awqd::tools {

// Not thread-safe. The checkpoint outlives it.
class ReadAhead {
 public:
  // Reads `linears` in that order, one further than it was asked for.
  ReadAhead(const model::Checkpoint& checkpoint, std::vector<const model::LinearLocation*> linears)
      : checkpoint_(checkpoint), linears_(std::move(linears)) {}

  // The next one, valid. Errors are those of ReadWeight. Once for each.
  absl::StatusOr<HostWeight> Next();

 private:
  void Begin();

  const model::Checkpoint& checkpoint_;
  const std::vector<const model::LinearLocation*> linears_;
  size_t begun_ = 0;
  std::future<absl::StatusOr<HostWeight>> next_;
};

}  // namespace awqd::tools
