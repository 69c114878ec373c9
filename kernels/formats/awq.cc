// Format "awq": AutoAWQ's version gemm, which GPTQModel writes too.
//
//   qweight I32 [K, N*bits/32]             W[k, n] = (q - z) * scales[k / g, n]
//   qzeros I32 [K/g, N*bits/32], optional where zero_point is false: z = 2^(bits-1)
//   scales F16 or BF16 [K/g, N]
//   bias [N], optional
//
// Of 4 bits a 32-bit word holds 8 adjacent columns of one row; nibble i (bits 4i .. 4i+3) is column
// 0 2 4 6 1 3 5 7 [i]. Other widths, 2 to 8 bits, are one code after the other from the low bits
// on. z is an unsigned integer without any offset. Facts: GPTQModel 7.7.0,
// quantization/awq/utils/packing_utils.py.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/awq_linear.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq_words.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr int kCodesPerWord = 8;  // of 4 bits

constexpr absl::string_view kSuffixes[] = {"qweight", "qzeros", "scales", "bias"};
constexpr absl::string_view kOptional[] = {"qzeros", "bias"};
// AutoAWQ's scaled activation functions have scales as well.
constexpr absl::string_view kCommon[] = {"scales", "bias"};
constexpr absl::string_view kVersions[] = {"", "gemm"};
constexpr AwqVersion kVersion = {.names = kVersions, .min_bits = 2, .max_bits = 8};

absl::StatusOr<QuantConfig> Read(const Setting& config) { return ReadAwqConfig(config, kVersion); }

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
std::vector<uint8_t> DecodeZeros(absl::Span<const uint8_t> words) {
  std::vector<uint8_t> zeros(words.size() * 2);
  for (size_t i = 0; i < words.size(); i += sizeof(uint32_t)) {
    const uint32_t word = LoadWord(words.data() + i);
    const uint32_t even = Spread(word & 0xffffu);
    const uint32_t odd = Spread(word >> 16);
    uint8_t* to = zeros.data() + 2 * i;
    for (int pair = 0; pair < 4; ++pair) {
      to[2 * pair] = static_cast<uint8_t>(even >> (8 * pair));
      to[2 * pair + 1] = static_cast<uint8_t>(odd >> (8 * pair));
    }
  }
  return zeros;
}

// [rows, N] of codes in dense words, one to a byte.
std::vector<uint8_t> Unpack(const TensorView& words, int64_t n, int bits) {
  return UnpackGptqColumns(words.bytes, words.shape[0], n, bits, GptqWords::kDense, 0);
}

// Some rows at a time: one code to a byte takes several times the room of the result.
std::vector<uint8_t> DecodeOtherCodes(absl::Span<const uint8_t> words, int64_t k, int64_t n,
                                      int bits) {
  constexpr int64_t kRows = 64;
  const int64_t row_bytes = WordsOfCodes(n, bits) * 4;
  std::vector<uint8_t> out;
  out.reserve(k * CeilDiv(n * CodeBits(bits), 8));
  for (int64_t row = 0; row < k; row += kRows) {
    const int64_t rows = std::min(kRows, k - row);
    const std::vector<uint8_t> codes = UnpackGptqColumns(
        words.subspan(row * row_bytes, rows * row_bytes), rows, n, bits, GptqWords::kDense, 0);
    const std::vector<uint8_t> packed = PackCodes(codes, rows, n, bits);
    out.insert(out.end(), packed.begin(), packed.end());
  }
  return out;
}

absl::Status DecodeZeros(const AwqLinear& settings, const LinearTensors& tensors, int64_t groups,
                         int64_t words, HostWeight* out) {
  const TensorView* qzeros = FindTensor(tensors, "qzeros");
  if (qzeros == nullptr) {
    return SetAwqZerosWithout(settings, "qzeros",
                              "I32 [K/group_size, N*bits/32], or zero_point false", out);
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(CheckShape("qzeros", *qzeros, {groups, words},
                                  ExplainWords("qzeros", out->n, settings.bits, qzeros->shape[1])));
  return SetAwqZeros(
      settings, "qzeros",
      settings.bits == 4 ? DecodeZeros(qzeros->bytes) : Unpack(*qzeros, out->n, settings.bits),
      out);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<AwqLinear> settings = ReadAwqLinear(object, kVersion);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight,
                        NeedTensor(tensors, "qweight", "I32 [K, N*bits/32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  const int bits = settings->bits;
  HostWeight out;
  out.format = std::string(kAwqFormat.name);
  out.k = qweight->shape[0];
  out.n = scales->shape[1];
  const int64_t groups = scales->shape[0], words = WordsOfCodes(out.n, bits);
  if (bits == 4 && out.n % kCodesPerWord != 0) {
    return BadTensor("scales", absl::StrCat("N = ", out.n),
                     "a multiple of 8: a word holds 8 columns");
  }
  AWQD_RETURN_IF_ERROR(
      CheckShape("qweight", *qweight, {out.k, words},
                 absl::StrCat("N = ", out.n, " of tensor \"scales\"; ",
                              ExplainWords("qweight", out.n, bits, qweight->shape[1]))));
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings->group_size, out.k, groups, "scales", false));
  out.scheme = Asymmetric(bits, BlockRows(rows, out.k), type);
  AWQD_RETURN_IF_ERROR(DecodeZeros(*settings, tensors, groups, words, &out));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  if (qweight->unread()) return out;
  if (bits == 4) {
    DecodeCodes(qweight->bytes, &out.codes);
  } else {
    out.codes = DecodeOtherCodes(qweight->bytes, out.k, out.n, bits);
  }
  return out;
}

}  // namespace

const Format kAwqFormat = {.name = "awq",
                           .quant_method = "awq",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .lacks = AwqLacks,
                           .common_suffixes = kCommon,
                           .settings = kAwqSettings,
                           .read = Read,
                           .decode = Decode};

}  // namespace awqd
