// Warm-up: products of zeros.
#include "server/engine/warm_up.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/base/status.h"
#include "server/engine/matmul_work.h"

namespace awqd::engine {
namespace {

// One token a work, so that the buffer in which small requests are gathered comes up as well.
absl::StatusOr<batching::Batch> Tokens(const std::shared_ptr<const model::PlacedWeight>& weight,
                                       int64_t tokens, Path path, StagingPool& staging) {
  MatmulWork work;
  work.weight = weight;
  work.rows = 1;
  work.path = path;
  const int64_t row_bytes = weight->shape.k * SizeOf(work.x_dtype);
  AWQD_ASSIGN_OR_RETURN(const Payload x, staging.Get(tokens * row_bytes));
  std::memset(x.data(), 0, x.size());
  batching::Batch batch = {.tokens = tokens};
  for (int64_t token = 0; token < tokens; ++token) {
    work.x = x.Slice(token * row_bytes, row_bytes);
    batch.tasks.push_back(std::make_unique<MatmulWork>(work));
  }
  return batch;
}

}  // namespace

absl::Status RunWarmUp(const std::shared_ptr<const model::PlacedWeight>& weight, int64_t max_tokens,
                       StagingPool& staging,
                       absl::FunctionRef<absl::Status(const batching::Batch& batch)> run) {
  for (const PlanEntry& entry : weight->parts.front().weight->plan.matmul) {
    if (entry.min_m > max_tokens) continue;
    const int64_t end = entry.max_m < 0 ? max_tokens : std::min(entry.max_m, max_tokens);
    for (int64_t tokens : std::set<int64_t>{std::max<int64_t>(1, entry.min_m), end}) {
      AWQD_ASSIGN_OR_RETURN(const batching::Batch batch,
                            Tokens(weight, tokens, entry.path, staging));
      AWQD_RETURN_IF_ERROR(run(batch));
    }
  }
  return absl::OkStatus();
}

}  // namespace awqd::engine
