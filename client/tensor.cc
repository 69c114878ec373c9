// Tensor conversions: floats to and from the bytes that travel.
#include "client/tensor.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/half.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes are little-endian");

constexpr size_t kMaxRank = 8;

template <typename Stored, typename Encode>
std::string Pack(absl::Span<const float> values, Encode encode) {
  std::string bytes(values.size() * sizeof(Stored), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const Stored stored = encode(values[i]);
    std::memcpy(bytes.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
  return bytes;
}

template <typename Stored, typename Decode>
std::vector<float> Unpack(absl::string_view bytes, Decode decode) {
  std::vector<float> values(bytes.size() / sizeof(Stored));
  for (size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    values[i] = decode(stored);
  }
  return values;
}

}  // namespace

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case v1::FP16:
    case v1::BF16:
      return 2;
    case v1::FP32:
    case v1::INT32:
      return 4;
    case v1::INT8:
    case v1::UINT8:
    case v1::FP8_E4M3:
      return 1;
    default:
      return 0;
  }
}

absl::string_view Name(DType dtype) { return v1::DType_Name(dtype); }

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  DType dtype;
  const std::string upper = absl::AsciiStrToUpper(name);
  if (v1::DType_Parse(upper, &dtype) && SizeOf(dtype) > 0) return dtype;
  return Invalid("dtype: got '", name,
                 "', expected fp16, bf16, fp32, int8, uint8, int32 or fp8_e4m3");
}

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxRank) {
    return Invalid("shape: got rank ", shape.size(), ", expected at most ", kMaxRank);
  }
  int64_t count = 1;
  bool empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0) {
      return Invalid("shape: got ", ShapeString(shape), ", expected no negative dimension");
    }
    if (dim == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(count, dim, &count)) {
      return Invalid("shape: got ", ShapeString(shape), ", expected a product below 2^63");
    }
  }
  return empty ? 0 : count;
}

std::string ShapeString(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status Tensor::Check() const {
  const int64_t size = SizeOf(dtype);
  if (size == 0) return Invalid("dtype: not set");
  AWQD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(shape));
  int64_t expected = 0;
  if (__builtin_mul_overflow(count, size, &expected) ||
      bytes.size() != static_cast<uint64_t>(expected)) {
    return Invalid("got ", bytes.size(), " bytes for ", Name(dtype), " ", ShapeString(shape),
                   ", expected ", count, " x ", size);
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> Tensor::FromFloats(DType dtype, std::vector<int64_t> shape,
                                          absl::Span<const float> values) {
  AWQD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(shape));
  if (static_cast<uint64_t>(count) != values.size()) {
    return Invalid("got ", values.size(), " values for shape ", ShapeString(shape), ", expected ",
                   count);
  }
  Tensor tensor{dtype, std::move(shape), ""};
  switch (dtype) {
    case v1::FP16:
      tensor.bytes = Pack<uint16_t>(values, FloatToHalf);
      return tensor;
    case v1::BF16:
      tensor.bytes = Pack<uint16_t>(values, FloatToBf16);
      return tensor;
    case v1::FP32:
      tensor.bytes = Pack<float>(values, [](float value) { return value; });
      return tensor;
    default:
      return Invalid("dtype: got ", Name(dtype), ", expected FP16, BF16 or FP32");
  }
}

absl::StatusOr<std::vector<float>> Tensor::ToFloats() const {
  AWQD_RETURN_IF_ERROR(Check());
  switch (dtype) {
    case v1::FP16:
      return Unpack<uint16_t>(bytes, HalfToFloat);
    case v1::BF16:
      return Unpack<uint16_t>(bytes, Bf16ToFloat);
    case v1::FP32:
      return Unpack<float>(bytes, [](float value) { return value; });
    case v1::INT8:
      return Unpack<int8_t>(bytes, [](int8_t value) { return static_cast<float>(value); });
    case v1::UINT8:
      return Unpack<uint8_t>(bytes, [](uint8_t value) { return static_cast<float>(value); });
    default:
      return Invalid("dtype: got ", Name(dtype), ", which floats cannot hold exactly");
  }
}

absl::StatusOr<Tensor> Convert(const Tensor& tensor, DType dtype) {
  if (tensor.dtype == dtype) return tensor;
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> values, tensor.ToFloats());
  return Tensor::FromFloats(dtype, tensor.shape, values);
}

v1::Tensor ToProto(Tensor tensor) {
  v1::Tensor proto;
  proto.set_dtype(tensor.dtype);
  proto.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  *proto.mutable_raw() = std::move(tensor.bytes);
  return proto;
}

absl::StatusOr<Tensor> FromProto(v1::Tensor proto) {
  if (proto.contents_case() != v1::Tensor::kRaw && proto.contents_case() != 0) {
    return absl::InternalError("the server sent a tensor as values, expected raw bytes");
  }
  Tensor tensor{proto.dtype(), {proto.shape().begin(), proto.shape().end()}, ""};
  tensor.bytes = std::move(*proto.mutable_raw());
  if (absl::Status status = tensor.Check(); !status.ok()) {
    return absl::InternalError(
        absl::StrCat("the server sent a malformed tensor: ", status.message()));
  }
  return tensor;
}

}  // namespace awqd::client
