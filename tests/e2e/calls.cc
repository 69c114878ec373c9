// Products of "layer", and error norms.
#include "tests/e2e/calls.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"

namespace awqd {

client::MatmulCall OneToken(const std::string& model, int64_t k) {
  return {
      .weight = client::WeightName{model, "layer"},
      .activations = *client::Tensor::FromFloats(v1::FP16, {1, k}, std::vector<float>(k, 0.5f))};
}

client::MatmulCall LayerCall(int64_t tokens, int64_t k, v1::DType dtype) {
  std::vector<float> values(static_cast<size_t>(tokens * k));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 2654435761u % 1000) / 500 - 1;
  }
  return {.weight = client::WeightName{"m", "layer"},
          .activations = *client::Tensor::FromFloats(dtype, {tokens, k}, values),
          .path = v1::FUSED};
}

v1::QuantizedMatmulRequest ProductOfZeros(int64_t tokens, int64_t k) {
  v1::QuantizedMatmulRequest request;
  request.mutable_weight()->set_model("m");
  request.mutable_weight()->set_weight("layer");
  request.mutable_activations()->set_dtype(v1::FP16);
  request.mutable_activations()->add_shape(tokens);
  request.mutable_activations()->add_shape(k);
  request.mutable_activations()->set_raw(std::string(tokens * k * 2, '\0'));
  return request;
}

client::Tensor ReadTensor(const std::string& npy) {
  return *client::ToTensor(*client::ReadNpy(npy));
}

double RelativeError(const client::Tensor& got, const std::vector<double>& expected) {
  const std::vector<float> values = *got.ToFloats();
  if (values.size() != expected.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

std::string Fnv1a64(const std::string& bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

}  // namespace awqd
