// Checks and conversions of tensor contents.
#include "server/wire/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "server/wire/status.h"

namespace awqd::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "raw contents are memory order");

constexpr int kMaxRank = 8;

std::string Sub(absl::string_view field, absl::string_view member) {
  return absl::StrCat(field, ".", member);
}

std::string ListNames(DTypeMask mask) {
  std::vector<absl::string_view> names;
  for (const ElementType& type : kElementTypes) {
    if (mask & MaskOf(type.dtype)) names.push_back(v1::DType_Name(type.api));
  }
  return absl::StrJoin(names, ", ");
}

std::optional<DType> FindDType(v1::DType dtype) {
  for (const ElementType& type : kElementTypes) {
    if (type.api == dtype) return type.dtype;
  }
  return std::nullopt;
}

// Zero dimensions do not hide an overflow of the others, so that the order of dimensions does not
// matter.
absl::Status CheckShape(absl::string_view field, TensorInfo* info) {
  const auto wrong = [&](absl::string_view expected) {
    return FieldError(Sub(field, "shape"), ShapeText(info->shape), expected);
  };
  if (info->shape.size() > kMaxRank) {
    return FieldError(Sub(field, "shape"), absl::StrCat("rank ", info->shape.size()),
                      "rank 0 to 8");
  }
  std::optional<int64_t> bytes = SizeOf(info->dtype);
  bool empty = false;
  for (int64_t dim : info->shape) {
    if (dim < 0) return wrong("no negative dimension");
    empty |= dim == 0;
    if (bytes && dim != 0) bytes = CheckedMul(*bytes, dim);
  }
  if (!bytes) return wrong("a tensor of less than 2^63 bytes");
  info->bytes = empty ? 0 : *bytes;
  info->elements = info->bytes / SizeOf(info->dtype);
  return absl::OkStatus();
}

absl::Status CheckContents(const v1::Tensor& tensor, const TensorInfo& info,
                           absl::string_view field, std::optional<int64_t> cut_bytes) {
  const bool floating = IsFloating(info.dtype), raw_only = info.dtype == DType::kE4m3;
  const auto bytes = [&](absl::string_view member, int64_t got,
                         absl::string_view unit) -> absl::Status {
    if (got == info.bytes) return absl::OkStatus();
    return FieldError(
        Sub(field, member), absl::StrCat(got, unit),
        absl::StrCat(info.bytes, " for ", Name(info.dtype), " of shape ", ShapeText(info.shape)));
  };
  const auto values = [&](absl::string_view member, int64_t got, bool suits,
                          absl::string_view others) -> absl::Status {
    if (!suits) {
      return FieldError(Sub(field, member), absl::StrCat(member, " for ", Name(info.dtype)),
                        others);
    }
    if (got == info.elements) return absl::OkStatus();
    return FieldError(Sub(field, member), absl::StrCat(got, " values"),
                      absl::StrCat(info.elements, " for shape ", ShapeText(info.shape)));
  };
  switch (tensor.contents_case()) {
    case v1::Tensor::kRaw:
      return bytes("raw", cut_bytes.value_or(static_cast<int64_t>(tensor.raw().size())), " bytes");
    case v1::Tensor::kSharedMemory:
      if (cut_bytes) return bytes("shared_memory.size", *cut_bytes, "");
      return FieldError(Sub(field, "shared_memory"), "a range", "contents in the message");
    case v1::Tensor::kFloats:
      return values("floats", tensor.floats().values_size(), floating,
                    raw_only ? "raw" : "raw or ints");
    case v1::Tensor::kInts:
      return values("ints", tensor.ints().values_size(), !floating && !raw_only,
                    raw_only ? "raw" : "raw or floats");
    case v1::Tensor::CONTENTS_NOT_SET:
      break;
  }
  if (info.elements == 0) return absl::OkStatus();
  const absl::string_view typed = raw_only ? "" : floating ? ", or floats," : ", or ints,";
  return FieldError(field, "no contents",
                    absl::StrCat("raw", typed, " of ", info.elements, " elements"));
}

// The low bytes of a number.
template <typename T>
void Append(T value, size_t bytes, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), bytes);
}

absl::StatusOr<std::string> RoundFloats(const v1::FloatValues& floats, DType dtype,
                                        absl::string_view field) {
  std::string out;
  out.reserve(floats.values_size() * SizeOf(dtype));
  for (int i = 0; i < floats.values_size(); ++i) {
    const float value = floats.values(i);
    if (dtype == DType::kFp32) {
      Append(value, sizeof(value), &out);
      continue;
    }
    const bool half = dtype == DType::kFp16;
    const uint16_t bits = half ? FloatToHalf(value) : FloatToBf16(value);
    if (std::isfinite(value) && !std::isfinite(half ? HalfToFloat(bits) : Bf16ToFloat(bits))) {
      return FieldError(absl::StrCat(field, ".floats.values[", i, "]"), absl::StrCat(value),
                        absl::StrCat("a value within the range of ", Name(dtype)));
    }
    Append(bits, sizeof(bits), &out);
  }
  return out;
}

std::pair<int64_t, int64_t> ValueRange(DType dtype) {
  if (dtype == DType::kInt8) return {-128, 127};
  if (dtype == DType::kUint8) return {0, 255};
  return {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
}

absl::StatusOr<std::string> NarrowInts(const v1::IntValues& ints, DType dtype,
                                       absl::string_view field) {
  const auto [min, max] = ValueRange(dtype);
  std::string out;
  out.reserve(ints.values_size() * SizeOf(dtype));
  for (int i = 0; i < ints.values_size(); ++i) {
    const int64_t value = ints.values(i);
    if (value < min || value > max) {
      return FieldError(absl::StrCat(field, ".ints.values[", i, "]"), absl::StrCat(value),
                        absl::StrCat(min, " to ", max, " for ", Name(dtype)));
    }
    Append(value, SizeOf(dtype), &out);
  }
  return out;
}

}  // namespace

absl::StatusOr<DType> ParseDType(v1::DType dtype, DTypeMask allowed, absl::string_view field) {
  const std::optional<DType> known = FindDType(dtype);
  if (known && (allowed & MaskOf(*known))) return *known;
  const std::string got = known ? v1::DType_Name(dtype)
                          : dtype == v1::DTYPE_UNSPECIFIED
                              ? "nothing"
                              : absl::StrCat("the unknown value ", static_cast<int>(dtype));
  return FieldError(field, got, ListNames(allowed));
}

v1::DType ToProto(DType dtype) {
  for (const ElementType& type : kElementTypes) {
    if (type.dtype == dtype) return type.api;
  }
  return v1::DTYPE_UNSPECIFIED;  // a type of scales, which no tensor of the API has
}

// The text is bounded: a refused tensor may claim thousands of dimensions.
std::string ShapeText(absl::Span<const int64_t> shape) {
  const bool cut = shape.size() > kMaxRank;
  return absl::StrCat("[", absl::StrJoin(shape.subspan(0, kMaxRank), ", "), cut ? ", ..." : "",
                      "]");
}

absl::StatusOr<TensorInfo> CheckTensor(const v1::Tensor& tensor, DTypeMask allowed,
                                       absl::string_view field, std::optional<int64_t> cut_bytes) {
  TensorInfo info;
  const std::optional<DType> dtype = FindDType(tensor.dtype());
  if (!dtype || (allowed & MaskOf(*dtype)) == 0) {
    return ParseDType(tensor.dtype(), allowed, Sub(field, "dtype")).status();
  }
  info.dtype = *dtype;
  info.shape.assign(tensor.shape().begin(), tensor.shape().end());
  AWQD_RETURN_IF_ERROR(CheckShape(field, &info));
  AWQD_RETURN_IF_ERROR(CheckContents(tensor, info, field, cut_bytes));
  return info;
}

absl::StatusOr<std::string> TypedBytes(const v1::Tensor& tensor, const TensorInfo& info,
                                       absl::string_view field) {
  if (tensor.has_floats()) return RoundFloats(tensor.floats(), info.dtype, field);
  if (tensor.has_ints()) return NarrowInts(tensor.ints(), info.dtype, field);
  return std::string();  // shared memory never: whoever allows it reads it there
}

absl::StatusOr<std::string> TakeBytes(v1::Tensor* tensor, const TensorInfo& info,
                                      absl::string_view field) {
  if (tensor->has_raw()) return std::move(*tensor->mutable_raw());
  return TypedBytes(*tensor, info, field);
}

std::vector<float> FloatsFromBytes(absl::string_view bytes, DType dtype) {
  std::vector<float> out(bytes.size() / SizeOf(dtype));
  if (dtype == DType::kFp32) {
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
    return out;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
    out[i] = dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
  }
  return out;
}

int64_t EncodedBytes(int64_t elements, DType dtype, v1::Encoding encoding) {
  if (encoding != v1::VALUES) return elements * SizeOf(dtype);
  return elements * (IsFloating(dtype) ? static_cast<int64_t>(sizeof(float)) : kMostEncodedBytes);
}

void FillTensor(absl::string_view bytes, DType dtype, absl::Span<const int64_t> shape,
                v1::Encoding encoding, v1::Tensor* out) {
  out->set_dtype(ToProto(dtype));
  out->mutable_shape()->Add(shape.begin(), shape.end());
  if (encoding != v1::VALUES) return;
  auto* const ints = IsFloating(dtype) ? nullptr : out->mutable_ints()->mutable_values();
  if (dtype == DType::kInt32) {
    std::vector<int32_t> wide(bytes.size() / sizeof(int32_t));
    if (!wide.empty()) std::memcpy(wide.data(), bytes.data(), bytes.size());
    ints->Add(wide.begin(), wide.end());
    return;
  }
  if (ints != nullptr) {
    // A char has no sign on aarch64.
    for (const char c : bytes) {
      ints->Add(dtype == DType::kUint8 ? static_cast<uint8_t>(c) : static_cast<int8_t>(c));
    }
    return;
  }
  const std::vector<float> values = FloatsFromBytes(bytes, dtype);
  out->mutable_floats()->mutable_values()->Add(values.begin(), values.end());
}

}  // namespace awqd::wire
