// Checks and conversions of tensor contents.
#include "server/wire/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
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
constexpr DType kAllDTypes[] = {DType::kFp16, DType::kBf16,  DType::kFp32,
                                DType::kInt8, DType::kUint8, DType::kInt32};

std::string Sub(absl::string_view field, absl::string_view member) {
  return absl::StrCat(field, ".", member);
}

std::string NamesOf(DTypeMask mask) {
  std::vector<absl::string_view> names;
  for (DType dtype : kAllDTypes) {
    if (mask & MaskOf(dtype)) names.push_back(Name(dtype));
  }
  return absl::StrJoin(names, ", ");
}

std::optional<DType> FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::FP16:
      return DType::kFp16;
    case v1::BF16:
      return DType::kBf16;
    case v1::FP32:
      return DType::kFp32;
    case v1::INT8:
      return DType::kInt8;
    case v1::UINT8:
      return DType::kUint8;
    case v1::INT32:
      return DType::kInt32;
    default:
      return std::nullopt;
  }
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

absl::Status CheckCount(absl::string_view field, int64_t got, const TensorInfo& info) {
  if (got == info.elements) return absl::OkStatus();
  return FieldError(field, absl::StrCat(got, " values"),
                    absl::StrCat(info.elements, " for shape ", ShapeText(info.shape)));
}

absl::Status CheckContents(const v1::Tensor& tensor, const TensorInfo& info,
                           absl::string_view field, std::optional<int64_t> cut_bytes) {
  const int64_t raw_bytes = cut_bytes.value_or(static_cast<int64_t>(tensor.raw().size()));
  const bool floating = IsFloating(info.dtype);
  switch (tensor.contents_case()) {
    case v1::Tensor::kRaw:
      if (raw_bytes == info.bytes) return absl::OkStatus();
      return FieldError(
          Sub(field, "raw"), absl::StrCat(raw_bytes, " bytes"),
          absl::StrCat(info.bytes, " for ", Name(info.dtype), " of shape ", ShapeText(info.shape)));
    case v1::Tensor::kSharedMemory:
      if (!cut_bytes) {
        return FieldError(Sub(field, "shared_memory"), "a range", "contents in the message");
      }
      if (*cut_bytes == info.bytes) return absl::OkStatus();
      return FieldError(
          Sub(field, "shared_memory.size"), absl::StrCat(*cut_bytes),
          absl::StrCat(info.bytes, " for ", Name(info.dtype), " of shape ", ShapeText(info.shape)));
    case v1::Tensor::kFloats:
      if (!floating) {
        return FieldError(Sub(field, "floats"), absl::StrCat("floats for ", Name(info.dtype)),
                          "raw or ints");
      }
      return CheckCount(Sub(field, "floats"), tensor.floats().values_size(), info);
    case v1::Tensor::kInts:
      if (floating) {
        return FieldError(Sub(field, "ints"), absl::StrCat("ints for ", Name(info.dtype)),
                          "raw or floats");
      }
      return CheckCount(Sub(field, "ints"), tensor.ints().values_size(), info);
    case v1::Tensor::CONTENTS_NOT_SET:
      break;
  }
  if (info.elements == 0) return absl::OkStatus();
  return FieldError(
      field, "no contents",
      absl::StrCat("raw, or ", floating ? "floats" : "ints", ", of ", info.elements, " elements"));
}

template <typename T>
void Append(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

absl::StatusOr<std::string> RoundFloats(const v1::FloatValues& floats, DType dtype,
                                        absl::string_view field) {
  std::string out;
  out.reserve(floats.values_size() * SizeOf(dtype));
  for (int i = 0; i < floats.values_size(); ++i) {
    const float value = floats.values(i);
    float stored = value;
    if (dtype == DType::kFp32) {
      Append(value, &out);
    } else if (dtype == DType::kFp16) {
      const uint16_t bits = FloatToHalf(value);
      stored = HalfToFloat(bits);
      Append(bits, &out);
    } else {
      const uint16_t bits = FloatToBf16(value);
      stored = Bf16ToFloat(bits);
      Append(bits, &out);
    }
    if (std::isfinite(value) && !std::isfinite(stored)) {
      return FieldError(absl::StrCat(field, ".floats.values[", i, "]"), absl::StrCat(value),
                        absl::StrCat("a value within the range of ", Name(dtype)));
    }
  }
  return out;
}

struct IntRange {
  int64_t min;
  int64_t max;
};

IntRange RangeOf(DType dtype) {
  if (dtype == DType::kInt8) return {-128, 127};
  if (dtype == DType::kUint8) return {0, 255};
  return {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
}

absl::StatusOr<std::string> NarrowInts(const v1::IntValues& ints, DType dtype,
                                       absl::string_view field) {
  const IntRange range = RangeOf(dtype);
  std::string out;
  out.reserve(ints.values_size() * SizeOf(dtype));
  for (int i = 0; i < ints.values_size(); ++i) {
    const int64_t value = ints.values(i);
    if (value < range.min || value > range.max) {
      return FieldError(absl::StrCat(field, ".ints.values[", i, "]"), absl::StrCat(value),
                        absl::StrCat(range.min, " to ", range.max, " for ", Name(dtype)));
    }
    if (SizeOf(dtype) == 1) {
      out.push_back(static_cast<char>(value));
    } else {
      Append(static_cast<int32_t>(value), &out);
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<DType> ParseDType(v1::DType dtype, DTypeMask allowed, absl::string_view field) {
  const std::optional<DType> known = FromProto(dtype);
  if (known && (allowed & MaskOf(*known))) return *known;
  const std::string got = known ? std::string(Name(*known))
                          : dtype == v1::DTYPE_UNSPECIFIED
                              ? "nothing"
                              : absl::StrCat("the unknown value ", static_cast<int>(dtype));
  return FieldError(field, got, NamesOf(allowed));
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return v1::FP16;
    case DType::kBf16:
      return v1::BF16;
    case DType::kFp32:
      return v1::FP32;
    case DType::kInt8:
      return v1::INT8;
    case DType::kUint8:
      return v1::UINT8;
    case DType::kInt32:
      return v1::INT32;
  }
  return v1::DTYPE_UNSPECIFIED;
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
  const std::optional<DType> dtype = FromProto(tensor.dtype());
  if (!dtype || (allowed & MaskOf(*dtype)) == 0) {
    return ParseDType(tensor.dtype(), allowed, Sub(field, "dtype")).status();
  }
  info.dtype = *dtype;
  info.shape.assign(tensor.shape().begin(), tensor.shape().end());
  AWQD_RETURN_IF_ERROR(CheckShape(field, &info));
  AWQD_RETURN_IF_ERROR(CheckContents(tensor, info, field, cut_bytes));
  return info;
}

absl::StatusOr<std::string> TakeBytes(v1::Tensor* tensor, const TensorInfo& info,
                                      absl::string_view field) {
  switch (tensor->contents_case()) {
    case v1::Tensor::kFloats:
      return RoundFloats(tensor->floats(), info.dtype, field);
    case v1::Tensor::kInts:
      return NarrowInts(tensor->ints(), info.dtype, field);
    case v1::Tensor::kRaw:
      return std::move(*tensor->mutable_raw());
    case v1::Tensor::kSharedMemory:  // never: whoever allows it reads it there
    case v1::Tensor::CONTENTS_NOT_SET:
      break;
  }
  return std::string();
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
  return elements * (encoding == v1::VALUES ? static_cast<int64_t>(sizeof(float)) : SizeOf(dtype));
}

void FillTensor(absl::string_view bytes, DType dtype, absl::Span<const int64_t> shape,
                v1::Encoding encoding, v1::Tensor* out) {
  out->set_dtype(ToProto(dtype));
  out->mutable_shape()->Add(shape.begin(), shape.end());
  if (encoding != v1::VALUES) return;
  const std::vector<float> values = FloatsFromBytes(bytes, dtype);
  out->mutable_floats()->mutable_values()->Add(values.begin(), values.end());
}

}  // namespace awqd::wire
