// Shared checks of tensors. Sizes are computed with care: a shape may be any numbers.
#include "kernels/formats/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/float8.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd {
namespace {

// 0 for types that no format here has.
int64_t ElementBytes(absl::string_view dtype) {
  if (dtype == "I32" || dtype == "U32" || dtype == "F32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "I64") return 8;
  if (dtype == "F8_E4M3" || dtype == "F8_E8M0") return 1;
  return dtype == "U8" || dtype == "I8" ? 1 : 0;
}

// Bytes that the shape asks for, or nothing when that overflows.
std::optional<int64_t> BytesOf(const TensorView& tensor) {
  std::optional<int64_t> bytes = ElementBytes(tensor.dtype);
  for (int64_t dim : tensor.shape) {
    if (bytes) bytes = CheckedMul(*bytes, dim);
  }
  return bytes;
}

// Whether a float has a magnitude beyond infinity. Of signed numbers, which SSE2 compares, and without
// an end before the last, so that a compiler makes vectors of it.
template <typename Signed>
bool HasNan(absl::Span<const uint8_t> floats, Signed infinity) {
  constexpr Signed kMagnitude = std::numeric_limits<Signed>::max();
  const int64_t count = static_cast<int64_t>(floats.size() / sizeof(Signed));
  Signed beyond = 0;
  for (int64_t i = 0; i < count; ++i) {
    Signed bits;
    std::memcpy(&bits, floats.data() + i * sizeof(bits), sizeof(bits));
    beyond |= static_cast<Signed>(-static_cast<Signed>((bits & kMagnitude) > infinity));
  }
  return beyond != 0;
}

bool HasNan(absl::Span<const uint8_t> floats, DType type) {
  if (type == DType::kFp32) return HasNan<int32_t>(floats, 0x7f800000);
  return HasNan<int16_t>(floats, type == DType::kFp16 ? 0x7c00 : 0x7f80);
}

}  // namespace

absl::Status BadTensor(absl::string_view name, absl::string_view got, absl::string_view expected) {
  return BadValue(absl::StrCat("tensor \"", name, "\""), got, expected);
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

const TensorView* FindTensor(const LinearTensors& tensors, absl::string_view name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

absl::StatusOr<const TensorView*> NeedTensor(const LinearTensors& tensors, absl::string_view name,
                                             absl::string_view expected) {
  const TensorView* tensor = FindTensor(tensors, name);
  if (tensor == nullptr) return BadTensor(name, "nothing", expected);
  return tensor;
}

absl::Status CheckTensor(absl::string_view name, const TensorView& tensor,
                         std::initializer_list<absl::string_view> dtypes, size_t rank) {
  if (!absl::c_linear_search(dtypes, tensor.dtype)) {
    return BadTensor(name, absl::StrCat("dtype ", tensor.dtype), OneOf(dtypes));
  }
  const auto bad_shape = [&](absl::string_view expected) {
    return BadTensor(name, absl::StrCat("shape ", ShapeText(tensor.shape)), expected);
  };
  if (tensor.shape.size() != rank) return bad_shape(absl::StrCat("rank ", rank));
  if (absl::c_any_of(tensor.shape, [](int64_t dim) { return dim < 1; })) {
    return bad_shape("dimensions of at least 1");
  }
  const std::optional<int64_t> bytes = BytesOf(tensor);
  if (!bytes) return bad_shape("a size below 2^63 bytes");
  if (static_cast<int64_t>(tensor.bytes.size()) != *bytes) {
    return BadTensor(name, absl::StrCat(tensor.bytes.size(), " bytes"),
                     absl::StrCat(*bytes, " for ", tensor.dtype, " ", ShapeText(tensor.shape)));
  }
  return absl::OkStatus();
}

absl::Status CheckShape(absl::string_view name, const TensorView& tensor,
                        std::initializer_list<int64_t> expected, absl::string_view because) {
  if (absl::c_equal(tensor.shape, expected)) return absl::OkStatus();
  return BadTensor(name, absl::StrCat("shape ", ShapeText(tensor.shape)),
                   absl::StrCat(ShapeText(expected), " (", because, ")"));
}

absl::StatusOr<DType> CheckScales(absl::string_view name, const TensorView& tensor, size_t rank,
                                  bool fp32) {
  AWQD_RETURN_IF_ERROR(fp32 ? CheckTensor(name, tensor, {"F16", "BF16", "F32"}, rank)
                            : CheckTensor(name, tensor, {"F16", "BF16"}, rank));
  const DType type = FloatType(tensor);
  if (!HasNan(tensor.bytes, type)) return type;
  int64_t at = 0;
  while (!std::isnan(LoadElement(tensor.bytes.data(), type, at))) ++at;
  return BadTensor(name, absl::StrCat("NaN at element ", at), "numbers");
}

absl::Status CheckByteScales(absl::string_view name, const TensorView& tensor, DType type,
                             size_t rank) {
  AWQD_RETURN_IF_ERROR(
      CheckTensor(name, tensor, {type == DType::kE4m3 ? "F8_E4M3" : "F8_E8M0", "U8"}, rank));
  const auto nan = absl::c_find_if(tensor.bytes, [&](uint8_t bits) {
    return type == DType::kE4m3 ? (bits & 0x7f) == 0x7f : bits == 0xff;
  });
  if (nan == tensor.bytes.end()) return absl::OkStatus();
  return BadTensor(name, absl::StrCat("NaN at element ", nan - tensor.bytes.begin()), "numbers");
}

absl::StatusOr<float> ReadNumber(absl::string_view name, const TensorView& tensor) {
  const size_t rank = std::min<size_t>(tensor.shape.size(), 1);
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(name, tensor, rank, true));
  if (rank == 1) AWQD_RETURN_IF_ERROR(CheckShape(name, tensor, {1}, "one number"));
  return LoadElement(tensor.bytes.data(), type, 0);
}

int64_t LoadInteger(const TensorView& tensor, int64_t index) {
  if (tensor.dtype != "I64") return static_cast<int32_t>(LoadWord(tensor.bytes.data(), index));
  int64_t value;
  std::memcpy(&value, tensor.bytes.data() + index * sizeof(value), sizeof(value));
  return value;
}

DType FloatType(const TensorView& tensor) {
  if (tensor.dtype == "F32") return DType::kFp32;
  return tensor.dtype == "F16" ? DType::kFp16 : DType::kBf16;
}

absl::StatusOr<std::vector<float>> ToFloats(absl::string_view name, const TensorView& tensor) {
  AWQD_RETURN_IF_ERROR(CheckTensor(name, tensor, {"U8", "I8", "I32", "F16", "BF16", "F32"},
                                   tensor.shape.size() == 1 ? 1 : 2));
  constexpr int32_t kMostInteger = 1 << 24;  // FP32 holds every integer up to here
  std::vector<float> out(tensor.bytes.size() / ElementBytes(tensor.dtype));
  for (size_t i = 0; i < out.size(); ++i) {
    if (tensor.dtype == "U8") {
      out[i] = tensor.bytes[i];
    } else if (tensor.dtype == "I8") {
      out[i] = static_cast<int8_t>(tensor.bytes[i]);
    } else if (tensor.dtype == "I32") {
      const auto value = static_cast<int32_t>(LoadWord(tensor.bytes.data(), i));
      if (value < -kMostInteger || value > kMostInteger) {
        return BadTensor(name, absl::StrCat(value, " at element ", i), "-2^24 to 2^24");
      }
      out[i] = static_cast<float>(value);
    } else {
      out[i] = LoadElement(tensor.bytes.data(), FloatType(tensor), static_cast<int64_t>(i));
      if (!std::isfinite(out[i])) {
        return BadTensor(name, absl::StrCat(out[i], " at element ", i), "finite numbers");
      }
    }
  }
  return out;
}

absl::StatusOr<int64_t> GroupRows(int64_t said, int64_t k, int64_t groups, absl::string_view scales,
                                  bool ragged) {
  const auto bad_groups = [&](absl::string_view expected) {
    return BadTensor(scales, absl::StrCat(groups, " groups"), expected);
  };
  if (said == 0) {
    if (k % groups == 0) return k / groups;
    return bad_groups(absl::StrCat("a divisor of K = ", k, ragged ? ", or a group_size" : ""));
  }
  const int64_t size = said == -1 ? k : said;
  if (size < 1 || size > k || (!ragged && k % size != 0)) {
    return BadValue(
        "group_size", said,
        absl::StrCat("-1 or ", ragged ? "1 to" : "a divisor of", " K = ", k, " (in features)"));
  }
  if (CeilDiv(k, size) == groups) return size;
  return bad_groups(absl::StrCat(CeilDiv(k, size), " (K = ", k, " in groups of ", size, ")"));
}

absl::StatusOr<std::vector<float>> DecodeBias(const LinearTensors& tensors, int64_t n) {
  const TensorView* bias = FindTensor(tensors, "bias");
  if (bias == nullptr) return std::vector<float>();
  const bool fp8 = bias->dtype == "F8_E4M3";  // as ComfyUI's files have it
  AWQD_RETURN_IF_ERROR(fp8 ? CheckTensor("bias", *bias, {"F8_E4M3"}, 1)
                           : CheckTensor("bias", *bias, {"F16", "BF16", "F32"}, 1));
  AWQD_RETURN_IF_ERROR(CheckShape("bias", *bias, {n}, "N"));
  std::vector<float> out(n);
  if (fp8) absl::c_transform(bias->bytes, out.begin(), E4m3ToFloat);
  if (fp8) return out;
  for (int64_t i = 0; i < n; ++i) out[i] = LoadElement(bias->bytes.data(), FloatType(*bias), i);
  return out;
}

}  // namespace awqd
