// Format AutoAWQ "gemm": qweight I32 [K, N/8], qzeros I32 [G, N/8], scales F16 [G, N], optional
// bias [N]; G = K / group_size.
//
// A 32-bit word holds 8 adjacent columns of one row; nibble i (bits 4i .. 4i+3) is column
// 0 2 4 6 1 3 5 7 [i]. W[k,n] = (q - z) * s, z an unsigned 4-bit integer without any offset.
#include "kernels/formats/awq.h"

#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/half.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

constexpr int kBits = 4;
constexpr int kCodesPerWord = 8;

constexpr absl::string_view kSuffixes[] = {"qweight", "qzeros", "scales", "bias"};
constexpr absl::string_view kOptional[] = {"bias"};

// --- Config ---

std::string RefusesVersion(absl::string_view version) {
  if (version.empty() || version == "gemm") return "";
  absl::string_view why = "is not a version of AutoAWQ that this server knows";
  if (version == "gemv") why = "packs along K, with padded scales";
  if (version == "gemv_fast") why = "stores 16-bit interleaved codes and no integer zero points";
  if (version == "marlin") why = "stores codes in a kernel's order and no zero points";
  const std::string got = absl::CHexEscape(version);
  return absl::StrCat("version: got \"", got, "\", expected \"gemm\" (\"", got, "\" ", why, ")");
}

std::string Refuses(const QuantConfig& config) {
  if (config.quant_method != "awq") {
    return absl::StrCat("quant_method: got \"", absl::CHexEscape(config.quant_method),
                        "\", expected \"awq\"");
  }
  if (std::string why = RefusesVersion(config.version); !why.empty()) return why;
  if (config.bits != 0 && config.bits != kBits) {
    return absl::StrCat("bits: got ", config.bits,
                        ", expected 4 (the gemm layout holds 4-bit codes only)");
  }
  return "";
}

// --- Tensors ---

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status Bad(absl::string_view tensor, absl::string_view got, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", tensor, "\": got ", got, ", expected ", expected));
}

// Bytes that the shape asks for, or nothing when that overflows or a dimension is negative.
std::optional<int64_t> BytesOf(const TensorView& tensor, int64_t element_bytes) {
  std::optional<int64_t> bytes = element_bytes;
  for (int64_t dim : tensor.shape) {
    if (bytes) bytes = CheckedMul(*bytes, dim);
  }
  return bytes;
}

absl::Status CheckTensor(absl::string_view name, const TensorView& tensor, absl::string_view dtype,
                         size_t rank, int64_t element_bytes) {
  if (tensor.dtype != dtype) return Bad(name, absl::StrCat("dtype ", tensor.dtype), dtype);
  if (tensor.shape.size() != rank) {
    return Bad(name, absl::StrCat("shape ", ShapeText(tensor.shape)), absl::StrCat("rank ", rank));
  }
  for (int64_t dim : tensor.shape) {
    if (dim < 1) {
      return Bad(name, absl::StrCat("shape ", ShapeText(tensor.shape)), "dimensions of at least 1");
    }
  }
  const std::optional<int64_t> bytes = BytesOf(tensor, element_bytes);
  if (!bytes) {
    return Bad(name, absl::StrCat("shape ", ShapeText(tensor.shape)), "a size below 2^63 bytes");
  }
  if (static_cast<int64_t>(tensor.bytes.size()) != *bytes) {
    return Bad(name, absl::StrCat(tensor.bytes.size(), " bytes"),
               absl::StrCat(*bytes, " for ", dtype, " ", ShapeText(tensor.shape)));
  }
  return absl::OkStatus();
}

absl::Status CheckShape(absl::string_view name, const TensorView& tensor,
                        std::initializer_list<int64_t> expected, absl::string_view because) {
  if (absl::c_equal(tensor.shape, expected)) return absl::OkStatus();
  return Bad(name, absl::StrCat("shape ", ShapeText(tensor.shape)),
             absl::StrCat(ShapeText(expected), " (", because, ")"));
}

struct Parts {
  const TensorView* qweight = nullptr;
  const TensorView* qzeros = nullptr;
  const TensorView* scales = nullptr;
  const TensorView* bias = nullptr;
};

absl::StatusOr<Parts> FindParts(const QuantConfig& config, const LinearTensors& tensors) {
  const auto find = [&](absl::string_view name) -> const TensorView* {
    const auto it = tensors.find(name);
    return it == tensors.end() ? nullptr : &it->second;
  };
  Parts out = {find("qweight"), find("qzeros"), find("scales"), find("bias")};
  if (out.qweight == nullptr) return Bad("qweight", "nothing", "I32 [K, N/8]");
  if (out.scales == nullptr) return Bad("scales", "nothing", "F16 [K/group_size, N]");
  if (out.qzeros == nullptr) {
    return Bad("qzeros", config.zero_point ? "nothing" : "nothing (zero_point is false)",
               "I32 [K/group_size, N/8]: the gemm layout always stores zero points");
  }
  return out;
}

absl::Status CheckBias(const TensorView& bias, int64_t n) {
  const bool half = bias.dtype == "F16" || bias.dtype == "BF16";
  if (!half && bias.dtype != "F32") {
    return Bad("bias", absl::StrCat("dtype ", bias.dtype), "F16, BF16 or F32");
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("bias", bias, bias.dtype, 1, half ? 2 : 4));
  return CheckShape("bias", bias, {n}, "N");
}

// --- Shapes ---

// Rows of K per row of scales, from the config and the tensors, which must agree.
absl::StatusOr<int64_t> GroupSize(int64_t said, int64_t k, int64_t groups) {
  if (said == 0) {
    if (k % groups == 0) return k / groups;
    return Bad("scales", absl::StrCat(groups, " rows"), absl::StrCat("a divisor of K = ", k));
  }
  const int64_t size = said == -1 ? k : said;
  if (size < 1 || size > k || k % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("group_size: got ", said,
                                                   ", expected -1 or a divisor of K = ", k,
                                                   " (rows of tensor \"qweight\")"));
  }
  if (k / size != groups) {
    return Bad("scales", absl::StrCat(groups, " rows"),
               absl::StrCat(k / size, " (K = ", k, " by group_size ", size, ")"));
  }
  return size;
}

absl::Status CheckConfig(const QuantConfig& config) {
  const std::string why = Refuses(config);
  return why.empty() ? absl::OkStatus() : absl::InvalidArgumentError(why);
}

// Sets k, n and the scheme once every tensor is known to fit.
absl::Status CheckParts(const QuantConfig& config, const Parts& parts, CanonicalWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *parts.qweight, "I32", 2, 4));
  AWQD_RETURN_IF_ERROR(CheckTensor("scales", *parts.scales, "F16", 2, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *parts.qzeros, "I32", 2, 4));
  const int64_t k = parts.qweight->shape[0];
  const int64_t words = parts.qweight->shape[1];
  const int64_t groups = parts.scales->shape[0];
  const int64_t n = parts.scales->shape[1];
  if (n % kCodesPerWord != 0) {
    return Bad("scales", absl::StrCat("N = ", n), "a multiple of 8");
  }
  AWQD_RETURN_IF_ERROR(CheckShape("qweight", *parts.qweight, {k, n / kCodesPerWord},
                                  absl::StrCat("[K, N/8] for N = ", n, " of tensor \"scales\"")));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, GroupSize(config.group_size, k, groups));
  AWQD_RETURN_IF_ERROR(CheckShape("qzeros", *parts.qzeros, {groups, words}, "[K/group_size, N/8]"));
  if (parts.bias != nullptr) AWQD_RETURN_IF_ERROR(CheckBias(*parts.bias, n));
  out->k = k;
  out->n = n;
  out->scheme = {.bits = kBits, .group_size = group_size};
  return absl::OkStatus();
}

// --- Words ---

// Puts a zero nibble above each of the four nibbles of `half`.
inline uint32_t Spread(uint32_t half) {
  half = (half | (half << 8)) & 0x00ff00ffu;
  return (half | (half << 4)) & 0x0f0f0f0fu;
}

// Codes in column order, least significant first: the low half of a word holds the even columns,
// the high half the odd ones, so interleaving the two halves is the whole conversion.
inline uint32_t InColumnOrder(uint32_t word) {
  return Spread(word & 0xffffu) | (Spread(word >> 16) << 4);
}

// memcpy because neither safetensors files nor messages align their tensors.
inline uint32_t LoadWord(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

void DecodeCodes(absl::Span<const uint8_t> words, std::vector<uint8_t>* codes) {
  codes->reserve(words.size());
  AdviseHugePages(codes->data(), static_cast<int64_t>(words.size()));
  codes->resize(words.size());
  const uint8_t* from = words.data();
  uint8_t* to = codes->data();
  for (size_t i = 0; i < words.size(); i += sizeof(uint32_t)) {
    const uint32_t ordered = InColumnOrder(LoadWord(from + i));
    std::memcpy(to + i, &ordered, sizeof(ordered));
  }
}

// One byte per zero point.
void DecodeZeros(absl::Span<const uint8_t> words, std::vector<uint8_t>* zeros) {
  zeros->resize(words.size() * 2);
  for (size_t i = 0; i < words.size(); i += sizeof(uint32_t)) {
    const uint32_t word = LoadWord(words.data() + i);
    const uint32_t even = Spread(word & 0xffffu);
    const uint32_t odd = Spread(word >> 16);
    uint8_t* to = zeros->data() + 2 * i;
    for (int pair = 0; pair < 4; ++pair) {
      to[2 * pair] = static_cast<uint8_t>(even >> (8 * pair));
      to[2 * pair + 1] = static_cast<uint8_t>(odd >> (8 * pair));
    }
  }
}

std::vector<float> DecodeBias(const TensorView& bias) {
  std::vector<float> out(bias.shape[0]);
  if (bias.dtype == "F32") {
    std::memcpy(out.data(), bias.bytes.data(), bias.bytes.size());
    return out;
  }
  const bool fp16 = bias.dtype == "F16";
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bias.bytes.data() + 2 * i, sizeof(bits));
    out[i] = fp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
  }
  return out;
}

absl::StatusOr<CanonicalWeight> Decode(const QuantConfig& config, const LinearTensors& tensors) {
  AWQD_RETURN_IF_ERROR(CheckConfig(config));
  AWQD_ASSIGN_OR_RETURN(const Parts parts, FindParts(config, tensors));
  CanonicalWeight out;
  out.format = "awq";
  AWQD_RETURN_IF_ERROR(CheckParts(config, parts, &out));
  DecodeCodes(parts.qweight->bytes, &out.codes);
  DecodeZeros(parts.qzeros->bytes, &out.zeros);
  out.scales.assign(parts.scales->bytes.begin(), parts.scales->bytes.end());
  if (parts.bias != nullptr) out.bias = DecodeBias(*parts.bias);
  return out;
}

}  // namespace

const Format kAwqFormat = {"awq", Refuses, kSuffixes, kOptional, Decode};

}  // namespace awqd
