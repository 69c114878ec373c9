// Format "awq": AutoAWQ's version gemm, which GPTQModel writes too.
//
//   qweight I32 [K, N*bits/32]             W[k, n] = (q - z) * scales[k / g, n]
//   qzeros I32 [K/g, N*bits/32], optional where zero_point is false: z = 2^(bits-1)
//   scales F16 or BF16 [K/g, N]
//   bias [N], optional
//
// A 32-bit word holds 8 adjacent columns of one row of 4-bit codes; nibble i (bits 4i .. 4i+3) is
// column 0 2 4 6 1 3 5 7 [i]. Other widths, 2 to 8 bits, are one code after the other from the low
// bits on. z is an unsigned integer without any offset. Facts: GPTQModel 7.7.0,
// quantization/awq/utils/packing_utils.py.
#include "kernels/formats/awq/awq.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq/gptq_words.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

// --- What the versions of AWQ share ---
//
// Settings are read under every name that AutoAWQ, llm-awq and GPTQModel have for them.
// Facts: AutoAWQ 0.2.9, models/_config.py and modules/linear; GPTQModel 7.7.0,
// quantization/config.py.

// GPTQModel writes the version as "format", or "checkpoint_format". llm-awq's is told by the
// backend, whatever the version says.
absl::StatusOr<std::string> ReadVersion(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string backend, ReadWord(object, "backend"));
  if (backend == "llm-awq") return backend;
  std::string out, name_of_out;
  for (absl::string_view name : {"version", "format", "checkpoint_format"}) {
    AWQD_ASSIGN_OR_RETURN(const std::string version, ReadWord(object, name));
    if (version.empty()) continue;
    if (!out.empty() && version != out) {
      return BadValue(name, Quoted(version, 64), absl::StrCat(name_of_out, "'s ", Quoted(out, 64)));
    }
    out = version;
    name_of_out = std::string(name);
  }
  return out;
}

absl::Status CheckVersion(absl::string_view got, const AwqVersion& version) {
  if (absl::c_linear_search(version.names, got)) return absl::OkStatus();
  const bool unsaid = version.names.front().empty();
  return UnreadSetting("version", got.empty() ? "nothing" : Quoted(got),
                       OneOf(version.names.subspan(unsaid ? 1 : 0), "\""));
}

absl::Status CheckBits(int64_t bits, const AwqVersion& version) {
  if (bits >= version.min_bits && bits <= version.max_bits) return absl::OkStatus();
  return UnreadSetting("bits", absl::StrCat(bits),
                       version.min_bits == version.max_bits
                           ? absl::StrCat(version.min_bits)
                           : absl::StrCat(version.min_bits, " to ", version.max_bits));
}

// --- Format "awq" ---

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

std::vector<uint8_t> DecodeCodes(absl::Span<const uint8_t> words) {
  constexpr int64_t kPiece = 1024, kWord = sizeof(uint32_t);
  const auto size = static_cast<int64_t>(words.size());
  std::vector<uint8_t> codes = AllocateCodes(size);
  ForEachPart(size, kPiece, size, [&](int64_t begin, int64_t end) {
    uint8_t ordered[kPiece];
    for (int64_t at = begin; at < end; at += kPiece) {
      const int64_t bytes = std::min(kPiece, end - at);
      for (int64_t i = 0; i < bytes; i += kWord) {
        const uint32_t word = InColumnOrder(LoadWord(words.data() + at + i));
        std::memcpy(ordered + i, &word, sizeof(word));
      }
      StreamBytes(ordered, codes.data() + at, bytes);
    }
    FinishStreams();
  });
  return codes;
}

// [rows, N] zero points, one to a byte.
std::vector<uint8_t> UnpackZeros(const TensorView& words, int64_t n, int bits) {
  const int64_t rows = words.shape[0];
  if (bits != 4) return UnpackGptqColumns(words.bytes, rows, n, bits, GptqWords::kDense, 0);
  std::vector<uint8_t> zeros(rows * n);
  UnpackStream(DecodeCodes(words.bytes).data(), rows * n, 4, zeros.data());
  return zeros;
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

absl::Status DecodeZeros(const AwqLinear& settings, absl::string_view name,
                         const LinearTensors& tensors, int64_t groups, int64_t words,
                         HostWeight* out) {
  const TensorView* qzeros = FindTensor(tensors, name);
  if (qzeros == nullptr) {
    return SetAwqZerosWithout(settings, name, "I32 [K/group_size, N*bits/32], or zero_point false",
                              out);
  }
  AWQD_RETURN_IF_ERROR(CheckTensor(name, *qzeros, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(CheckShape(name, *qzeros, {groups, words},
                                  ExplainWords(name, out->n, settings.bits, qzeros->shape[1])));
  return SetAwqZeros(settings, name, UnpackZeros(*qzeros, out->n, settings.bits), out);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(object, kVersion));
  return DecodeAwq(settings, {}, tensors);
}

}  // namespace

absl::StatusOr<AwqLinear> ReadAwqLinear(const Setting& object, const AwqVersion& version) {
  AwqLinear out;
  AWQD_ASSIGN_OR_RETURN(const std::string said, ReadVersion(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32, "w_bit"));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object, "q_group_size"));
  AWQD_ASSIGN_OR_RETURN(out.zero_point, ReadBool(object, "zero_point"));
  // A request need not say it: it names the format.
  if (!said.empty()) AWQD_RETURN_IF_ERROR(CheckVersion(said, version));
  if (bits) {
    AWQD_RETURN_IF_ERROR(CheckBits(*bits, version));
    out.bits = static_cast<int>(*bits);
  }
  return out;
}

absl::StatusOr<QuantConfig> ReadAwqConfig(const Setting& config, const AwqVersion& version) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(config, version));
  AWQD_ASSIGN_OR_RETURN(const std::string said, ReadVersion(config));
  AWQD_RETURN_IF_ERROR(CheckVersion(said, version));
  if (FindSetting(config, "bits") == nullptr && FindSetting(config, "w_bit") == nullptr) {
    return BadValue("bits (or w_bit)", "nothing", "a number");
  }
  if (settings.group_size == 0) {
    return BadValue("group_size (or q_group_size)", "nothing", "-1 (all of K) or at least 1");
  }
  Setting rule;
  rule.members = {{"bits", Setting::Literal(int64_t{settings.bits})},
                  {"group_size", Setting::Literal(settings.group_size)}};
  if (settings.zero_point) rule.members["zero_point"] = Setting::Literal(*settings.zero_point);
  return OneRule(config, std::move(rule));
}

absl::Status SetAwqZeros(const AwqLinear& settings, absl::string_view name,
                         std::vector<uint8_t> zeros, HostWeight* out) {
  out->zeros = std::move(zeros);
  if (settings.zero_point.value_or(true)) return absl::OkStatus();
  const auto other =
      absl::c_find_if(out->zeros, [&](uint8_t zero) { return zero != settings.middle(); });
  if (other != out->zeros.end()) {
    const int64_t at = other - out->zeros.begin();
    return BadTensor(
        name, absl::StrCat("zero point ", *other, " at [", at / out->n, ", ", at % out->n, "]"),
        absl::StrCat(settings.middle(), ", as zero_point is false"));
  }
  return SetAwqZerosWithout(settings, name, "", out);
}

absl::Status SetAwqZerosWithout(const AwqLinear& settings, absl::string_view name,
                                absl::string_view expected, HostWeight* out) {
  if (settings.zero_point.value_or(true)) return BadTensor(name, "nothing", expected);
  out->zeros.clear();
  const QuantizationScheme& d = out->scheme;
  out->scheme = Symmetric(settings.bits, d.block_rows, *d.scale_dtype);
  return absl::OkStatus();
}

absl::string_view AwqLacks(const Setting& settings, HasTensor has) {
  const absl::StatusOr<std::optional<bool>> zero_point = ReadBool(settings, "zero_point");
  const bool needed = zero_point.ok() && zero_point->value_or(true);
  return needed && !has("qzeros") ? "qzeros" : "";
}

absl::StatusOr<HostWeight> DecodeAwq(const AwqLinear& settings, const AwqTensors& names,
                                     const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight,
                        NeedTensor(tensors, names.codes, "I32 [K, N*bits/32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, names.scales, "F16 or BF16 [K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor(names.codes, *qweight, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(names.scales, *scales, 2, false));
  const int bits = settings.bits;
  HostWeight out;
  out.k = qweight->shape[0];
  out.n = scales->shape[1];
  const int64_t groups = scales->shape[0], words = WordsOfCodes(out.n, bits);
  if (bits == 4 && out.n % kCodesPerWord != 0) {
    return BadTensor(names.scales, absl::StrCat("N = ", out.n),
                     "a multiple of 8: a word holds 8 columns");
  }
  AWQD_RETURN_IF_ERROR(
      CheckShape(names.codes, *qweight, {out.k, words},
                 absl::StrCat("N = ", out.n, " of tensor \"", names.scales, "\"; ",
                              ExplainWords(names.codes, out.n, bits, qweight->shape[1]))));
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings.group_size, out.k, groups, names.scales, false));
  out.scheme = Asymmetric(bits, BlockRows(rows, out.k), type);
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, names.zeros, tensors, groups, words, &out));
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  if (qweight->unread()) return out;
  out.codes = bits == 4 ? DecodeCodes(qweight->bytes)
                        : DecodeOtherCodes(qweight->bytes, out.k, out.n, bits);
  return out;
}

const Format kAwqFormat = {.name = "awq",
                           .quant_method = "awq",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .lacks = AwqLacks,
                           .common_suffixes = kCommon,
                           .settings = kAwqSettings,
                           .read = Read,
                           .decode_parts = Decode};

}  // namespace awqd
