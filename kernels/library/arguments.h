// Arguments of the products of awqd.h, and the workspace.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/kernels.h"
#include "kernels/library/objects.h"

namespace awqd::library {

inline constexpr int64_t kAlign = 256;  // of a workspace and its parts

// Enumerations of awqd.h. `name`: the argument, for messages.
absl::StatusOr<DType> ToDType(absl::string_view name, int32_t dtype);
absl::StatusOr<DType> ToFloating(absl::string_view name, int32_t dtype);
absl::StatusOr<ActivationFunction> ToActivation(int32_t activation);
// One that is not of gated MLPs alone.
absl::StatusOr<ActivationFunction> ToSingleActivation(int32_t activation);
absl::StatusOr<ActivationQuantization> ToQuantization(int32_t quantization);
// The path of AWQD_PATH_AUTO, by the number of tokens.
Path ChoosePath(const DeviceWeight& weight, int64_t m, ActivationQuantization quantization);
absl::StatusOr<Path> ToPath(int32_t path, const DeviceWeight& weight, int64_t m,
                            ActivationQuantization quantization);
absl::Status CheckTokens(int64_t m);

// The activation function of a gated MLP, and its constants.
template <typename MlpArgs>
absl::StatusOr<GateArgs> ReadGate(const MlpArgs& args) {
  GateArgs out;
  AWQD_ASSIGN_OR_RETURN(out.activation, ToActivation(args.activation));
  if (args.limit > 0) out.parameters.limit = args.limit;
  out.parameters.alpha = args.alpha;
  out.parameters.beta = args.beta;
  out.parameters.linear_beta = args.linear_beta;
  return out;
}

// Bytes of the workspace of a product on this path of ToPath, and of one with fewer tokens.
int64_t BytesOf(const MatmulArgs& args, Path path);

// A workspace begins with the words by which the blocks of a kernel synchronise, zero before and
// after each kernel (StreamView::counters).
int64_t CounterBytes(const Device& device);
// The checks that each call makes before it enqueues, and its stream. `bytes`: of the workspace
// behind the counters.
absl::StatusOr<StreamView> Begin(const Device& device, const awqd_workspace& workspace,
                                 int64_t bytes, void* stream);
void* Behind(const Device& device, const awqd_workspace& workspace);

}  // namespace awqd::library
