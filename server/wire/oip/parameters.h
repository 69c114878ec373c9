// Parameters of requests, inputs and outputs of the inference protocol: named values of any type.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/oip/name.h"

namespace awqd::wire::oip {

using ParameterMap = google::protobuf::Map<std::string, inference::InferParameter>;

// The parameters of a request; each as the field of awqd.v1 of that name.
struct Parameters {
  int32_t priority = 0;  // as awqd.v1 has it: larger is served first
  absl::Duration timeout = absl::InfiniteDuration();
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  v1::Path path = v1::AUTO;
  v1::ActivationFunction activation_function = v1::NONE;
  v1::ActivationParameters activation;  // "activation_limit" and so on
  std::optional<v1::Router> router;     // without tensors; none of its fields: nothing
  std::string shared_expert;
  v1::ActivationQuantization activation_quantization = v1::ACTIVATIONS_AS_SENT;
  v1::Range rows, columns;
  bool execution = false;       // the answer says what ran
  bool final_response = false;  // the answer says that no other follows it, which is always so
};

// Levels of priority that a request can name, 1 is served first, and the one of a request that
// names none.
inline constexpr int64_t kPriorityLevels = 9;
inline constexpr int64_t kDefaultPriority = 5;

// INVALID_ARGUMENT about "parameters[NAME]": one that is not known, or not of this kind, a value of
// another type or out of range.
absl::Status ReadParameters(const ParameterMap& map, Kind kind, Parameters* out);

// Reads the place of an input or an output in shared memory, as a region; none: the tensor is in
// the message. `field` is its path in the request. INVALID_ARGUMENT as above.
absl::Status ReadRegionRange(const ParameterMap& map, absl::string_view field,
                             v1::SharedMemory* out);

// Writes the range of an answer.
void FillRegionRange(const v1::SharedMemory& range, ParameterMap* out);

}  // namespace awqd::wire::oip
