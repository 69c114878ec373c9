// Format AutoAWQ "gemm": qweight I32 [K, N/8], qzeros I32 [G, N/8], scales F16 or BF16 [G, N],
// optional bias [N]; G = K / group_size.
//
// A 32-bit word holds 8 adjacent columns of one row; nibble i (bits 4i .. 4i+3) is column
// 0 2 4 6 1 3 5 7 [i]. W[k,n] = (q - z) * s, z an unsigned 4-bit integer without any offset.
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/huge_pages.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr int kBits = 4;
constexpr int kCodesPerWord = 8;

constexpr absl::string_view kSuffixes[] = {"qweight", "qzeros", "scales", "bias"};
constexpr absl::string_view kOptional[] = {"bias"};
constexpr absl::string_view kSettings[] = {"bits", "group_size", "version", "zero_point"};

// --- Settings ---

absl::Status CheckVersion(absl::string_view version) {
  if (version.empty() || version == "gemm") return absl::OkStatus();
  absl::string_view why = "is not a version of AutoAWQ that this server knows";
  if (version == "gemv") why = "packs along K, with padded scales";
  if (version == "gemv_fast") why = "stores 16-bit interleaved codes and no integer zero points";
  if (version == "marlin") why = "stores codes in a kernel's order and no zero points";
  const std::string got = absl::StrCat("\"", absl::CHexEscape(version), "\"");
  return UnreadSetting("version", got, absl::StrCat("\"gemm\" (", got, " ", why, ")"));
}

// GPTQModel writes the version as "format", or "checkpoint_format".
absl::StatusOr<std::string> Version(const Setting& object) {
  for (absl::string_view name : {"version", "format", "checkpoint_format"}) {
    AWQD_ASSIGN_OR_RETURN(std::string version, ReadWord(object, name));
    if (!version.empty()) return version;
  }
  return std::string();
}

struct Settings {
  int64_t group_size = 0;  // -1: all of K; 0: not said
  bool zero_point = true;
};

// UNIMPLEMENTED for other versions and widths.
absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string version, Version(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32, "w_bit"));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGroupSize(object, "q_group_size"));
  AWQD_ASSIGN_OR_RETURN(const auto zero_point, ReadBool(object, "zero_point"));
  AWQD_RETURN_IF_ERROR(CheckVersion(version));
  if (bits.value_or(kBits) != kBits) {
    return UnreadSetting("bits", absl::StrCat(*bits), "4 (the gemm layout holds 4-bit codes only)");
  }
  return Settings{group_size, zero_point.value_or(true)};
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(config));
  if (FindSetting(config, "bits") == nullptr && FindSetting(config, "w_bit") == nullptr) {
    return BadValue("bits (or w_bit)", "nothing", "a number");
  }
  if (settings.group_size == 0) {
    return BadValue("group_size (or q_group_size)", "nothing", "-1 (all of K) or at least 1");
  }
  Setting rule;
  rule.members = {{"bits", Setting::Literal(int64_t{kBits})},
                  {"group_size", Setting::Literal(settings.group_size)},
                  {"zero_point", Setting::Literal(settings.zero_point)}};
  return OneRule(config, std::move(rule));
}

// --- Tensors ---

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

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight, NeedTensor(tensors, "qweight", "I32 [K, N/8]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [K/group_size, N]"));
  const TensorView* qzeros = FindTensor(tensors, "qzeros");
  if (qzeros == nullptr) {
    return BadTensor("qzeros", settings->zero_point ? "nothing" : "nothing (zero_point is false)",
                     "I32 [K/group_size, N/8]: the gemm layout always stores zero points");
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  const int64_t k = qweight->shape[0], groups = scales->shape[0], n = scales->shape[1];
  if (n % kCodesPerWord != 0) {
    return BadTensor("scales", absl::StrCat("N = ", n), "a multiple of 8: a word holds 8 columns");
  }
  AWQD_RETURN_IF_ERROR(CheckShape("qweight", *qweight, {k, n / kCodesPerWord},
                                  absl::StrCat("[K, N/8] for N = ", n, " of tensor \"scales\"")));
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings->group_size, k, groups, "scales", false));
  AWQD_RETURN_IF_ERROR(
      CheckShape("qzeros", *qzeros, {groups, n / kCodesPerWord}, "[K/group_size, N/8]"));
  HostWeight out;
  out.format = std::string(kAwqFormat.name);
  out.k = k;
  out.n = n;
  out.description = Asymmetric(kBits, BlockRows(rows, k), type);
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, n));
  DecodeCodes(qweight->bytes, &out.codes);
  DecodeZeros(qzeros->bytes, &out.zeros);
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  return out;
}

}  // namespace

const Format kAwqFormat = {.name = "awq",
                           .quant_method = "awq",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .settings = kSettings,
                           .read = Read,
                           .decode = Decode};

}  // namespace awqd
