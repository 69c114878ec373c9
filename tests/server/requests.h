// Valid requests, of which tests change one field at a time.
#pragma once

#include <string>

#include "awqd/v1/inference.pb.h"

namespace awqd {

inline v1::Tensor RawTensor(v1::DType dtype, std::initializer_list<int64_t> shape, int64_t bytes) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (int64_t dim : shape) tensor.add_shape(dim);
  tensor.set_raw(std::string(bytes, '\0'));
  return tensor;
}

// K = 128, N = 16, one group.
inline v1::PackedWeight GoodPacked() {
  v1::PackedWeight packed;
  *packed.mutable_qweight() = RawTensor(v1::INT32, {128, 2}, 128 * 2 * 4);
  *packed.mutable_qzeros() = RawTensor(v1::INT32, {1, 2}, 8);
  *packed.mutable_scales() = RawTensor(v1::FP16, {1, 16}, 32);
  return packed;
}

inline v1::QuantizedMatmulRequest GoodMatmul(int64_t tokens = 2) {
  v1::QuantizedMatmulRequest request;
  request.mutable_weight()->set_model("tiny");
  request.mutable_weight()->set_weight("layer");
  *request.mutable_activations() = RawTensor(v1::FP16, {tokens, 128}, tokens * 128 * 2);
  return request;
}

inline v1::DequantizeRequest GoodDequantize() {
  v1::DequantizeRequest request;
  request.mutable_weight()->set_model("tiny");
  request.mutable_weight()->set_weight("layer");
  return request;
}

}  // namespace awqd
