// Inputs and outputs of a weight, a stack and an MLP, as one list for all that tell of them.
#include "server/services/oip/metadata.h"

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/services/oip/found.h"
#include "server/wire/oip/decode.h"

namespace awqd::services::oip {
namespace {

using wire::oip::Kind;
using TensorMetadata = inference::ModelMetadataResponse::TensorMetadata;

constexpr char kPlatform[] = "awqd";
constexpr int64_t kAnySize = -1;

struct TensorShape {
  absl::string_view name;
  absl::string_view datatype;
  std::vector<int64_t> dims;
  bool optional = false;
};

// x is FP16 here because that is what most send; it may be BF16 or FP32 as well.
std::vector<TensorShape> InputsOf(const Found& found) {
  if (found.name.kind == Kind::kDequantize) return {};
  std::vector<TensorShape> out = {{"x", "FP16", {kAnySize, found.k}}};
  if (found.experts) {
    out.push_back({"ids", "INT32", {kAnySize, kAnySize}});
    out.push_back({"router_weights", "FP32", {kAnySize, kAnySize}, true});
  }
  if (found.name.kind == Kind::kProduct) {
    out.push_back({"bias", "FP32", {found.n}, true});
    out.push_back({"activation_scales", "FP32", {kAnySize}, true});
  }
  return out;
}

// Without router weights, each choice of a token has a row of its own.
TensorShape OutputOf(const Found& found) {
  const absl::string_view name = wire::oip::OutputName(found.name.kind);
  if (found.name.kind == Kind::kDequantize) return {name, "FP16", {found.k, found.n}};
  if (found.experts) return {name, "FP16", {kAnySize, kAnySize, found.n}};
  return {name, "FP16", {kAnySize, found.n}};
}

void Fill(const TensorShape& tensor, TensorMetadata* out) {
  out->set_name(std::string(tensor.name));
  out->set_datatype(std::string(tensor.datatype));
  out->mutable_shape()->Add(tensor.dims.begin(), tensor.dims.end());
}

}  // namespace

absl::Status IsModelReady(const Env& env, const inference::ModelReadyRequest& request,
                          inference::ModelReadyResponse* response) {
  const wire::oip::ModelName name = wire::oip::SplitName(request.name());
  const absl::Status found =
      name.path.empty() ? FindModel(env, request.name(), request.version(), "name").status()
                        : FindNamed(env, request.name(), request.version()).status();
  response->set_ready(found.ok());
  // What is wrong with the question is an error, what is not there is not ready.
  return absl::IsInvalidArgument(found) ? found : absl::OkStatus();
}

absl::Status DescribeServer(const Env& env, const inference::ServerMetadataRequest&,
                            inference::ServerMetadataResponse* response) {
  (void)env;
  response->set_name(kPlatform);
  response->set_version(AWQD_VERSION);
  return absl::OkStatus();
}

absl::Status DescribeModel(const Env& env, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response) {
  AWQD_ASSIGN_OR_RETURN(const Found found, FindNamed(env, request.name(), request.version()));
  response->set_name(request.name());
  response->add_versions(absl::StrCat(found.version));
  response->set_platform(kPlatform);
  for (const TensorShape& input : InputsOf(found)) {
    if (!input.optional) Fill(input, response->add_inputs());
  }
  Fill(OutputOf(found), response->add_outputs());
  return absl::OkStatus();
}

}  // namespace awqd::services::oip
