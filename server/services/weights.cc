// Looks weights up, and packs inline ones off the threads of the loop.
#include "server/services/weights.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/transport/guard.h"
#include "server/wire/packed_weight.h"

namespace awqd::services {

absl::StatusOr<WeightPtr> FindWeight(const Env& env, const v1::WeightRef& ref) {
  absl::StatusOr<WeightPtr> weight = env.models->FindWeight(ref.model(), ref.weight());
  if (!weight.ok() && absl::IsNotFound(weight.status()) && env.starting.load()) {
    return absl::UnavailableError(absl::StrCat("model \"", ref.model(),
                                               "\": the server is still loading its models; try "
                                               "again when its health is SERVING"));
  }
  return weight;
}

absl::Status PackWeight(const Env& env, const v1::PackedWeight& packed,
                        std::function<absl::Status()> wanted,
                        std::function<void(absl::StatusOr<WeightPtr>)> done) {
  AWQD_RETURN_IF_ERROR(wire::CheckPacked(packed, env.options.max_inline_weight_bytes));
  engine::Engine* engine = env.engine;
  return env.packings->Run([engine, &packed, wanted = std::move(wanted), done = std::move(done)] {
    done(transport::GuardedOr<WeightPtr>([&]() -> absl::StatusOr<WeightPtr> {
      AWQD_RETURN_IF_ERROR(wanted());
      AWQD_ASSIGN_OR_RETURN(const CanonicalWeight weight, wire::DecodePacked(packed));
      return engine->Prepare(weight);
    }));
  });
}

}  // namespace awqd::services
