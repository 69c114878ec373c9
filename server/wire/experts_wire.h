// GroupedQuantizedMatmul and GatedMlp: requests -> the engine's works, and their inline weights.
// validation.h has the checks that every product has.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "kernels/weight.h"
#include "server/engine/experts_work.h"
#include "server/wire/packed_weight.h"
#include "server/wire/validation.h"

namespace awqd::wire {

// Choices of a token at most.
inline constexpr int64_t kMaxTopK = 64;
// Experts of a stack in a request at most: more would be more fields than a message may have.
inline constexpr int kMaxInlineExperts = 64;

// By themselves, before their weights are known.
absl::Status CheckRequest(const v1::GroupedQuantizedMatmulRequest& request,
                          std::optional<int64_t> cut_bytes = std::nullopt);
absl::Status CheckRequest(const v1::GatedMlpRequest& request,
                          std::optional<int64_t> cut_bytes = std::nullopt);

using StackPtr = std::shared_ptr<const model::WeightStack>;

// Both move the payload out of a request that passed CheckRequest; work.x stays empty.
// INVALID_ARGUMENT naming the field: an expert that the stack has not, with its place; a shape that
// does not fit the weights, or weights that do not fit each other. RESOURCE_EXHAUSTED when the
// answer is to be sent and would pass `max_send_bytes`.
absl::StatusOr<Job<engine::GroupedMatmulWork>> BuildGroupedMatmul(
    v1::GroupedQuantizedMatmulRequest* request, StackPtr stack, int64_t max_send_bytes,
    std::optional<int64_t> cut_bytes = std::nullopt);

// Stacks of experts and perhaps a shared expert, or of one weight each for a request without ids.
struct MlpStacks {
  StackPtr gate, up, down;
  bool experts = false;
  engine::GatedMlpWork::Stacks shared = {};
};
absl::StatusOr<Job<engine::GatedMlpWork>> BuildGatedMlp(
    v1::GatedMlpRequest* request, MlpStacks stacks, int64_t max_send_bytes,
    std::optional<int64_t> cut_bytes = std::nullopt);

// Whether a request for FP8_AS_DECLARED of these weights can be served.
bool DeclaresFloat8(const model::WeightStack& stack);
bool DeclaresFloat8(const MlpStacks& stacks);

// As CheckPacked of packed_weight.h, for all weights together.
absl::Status CheckPacked(const v1::PackedStack& packed, int64_t max_bytes);
absl::Status CheckPacked(const v1::PackedGatedMlp& packed, int64_t max_bytes);

// As MeasurePacked of packed_weight.h, for all weights together.
absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedStack& packed, const DeviceInfo& device,
                                         absl::string_view field = "packed");
absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedGatedMlp& packed, const DeviceInfo& device,
                                         absl::string_view field = "packed");

// Decodes the weights of a stack, in order. `field`: "packed", or "packed.gate".
absl::StatusOr<std::vector<HostWeight>> DecodePacked(const v1::PackedStack& packed,
                                                     absl::string_view field);

}  // namespace awqd::wire
