// Format "plain": a weight as its formula has it, one code to a byte, for anyone to type or to
// write with three lines of numpy.
//
//   codes U8 [K, N], each below 2^bits           W[k, n] = (codes[k, n] - zero) * scales[k / g, n]
//   scales F16, BF16, F32 or I8 [groups, N]                * outer[n]
//   zeros U8 [groups, N], optional               y[m, n] = sum of x[m, k] * W[k, n], + bias[n]
//   outer F16, BF16 or F32 [N] or [1], optional  bias [N], optional
//
// Settings: bits 1 to 8 (8 unless said), group_size (the last group may be short). Without `zeros`
// either symmetric (true: the zero is 2^(bits-1)) or zero, one number for all.
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"codes", "zeros", "scales", "outer", "bias"};
constexpr absl::string_view kOptional[] = {"zeros", "outer", "bias"};
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr absl::string_view kSettings[] = {"bits", "group_size", "symmetric", "zero"};

struct Settings {
  int bits = 8;
  int64_t group_size = 0;   // -1: all of K; 0: not said
  std::optional<int> zero;  // one for all
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 8));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(object, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(const auto zero, ReadInteger(object, "zero", 0, 255));
  out.bits = static_cast<int>(bits.value_or(8));
  if (zero && symmetric.value_or(false)) {
    return BadValue("zero", *zero, "none beside symmetric");
  }
  if (zero) out.zero = static_cast<int>(*zero);
  if (symmetric.value_or(false)) out.zero = 1 << (out.bits - 1);
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(ReadSettings(config).status());
  return OneRule(config, OnlySettings(config, kSettings));
}

// Checks that each of the values [rows, cols] fits into so many bits.
absl::Status CheckBits(absl::string_view name, const TensorView& tensor, int bits) {
  const int most = (1 << bits) - 1;
  const auto bad = absl::c_find_if(tensor.bytes, [most](uint8_t code) { return code > most; });
  if (bad == tensor.bytes.end()) return absl::OkStatus();
  const int64_t index = bad - tensor.bytes.begin(), cols = tensor.shape[1];
  return BadTensor(name, absl::StrCat(*bad, " at [", index / cols, ", ", index % cols, "]"),
                   absl::StrCat("0 to ", most, " for ", bits, " bits"));
}

absl::Status DecodeZeros(const Settings& settings, const LinearTensors& tensors, int64_t groups,
                         HostWeight* out) {
  QuantizationScheme& scheme = out->scheme;
  const TensorView* zeros = FindTensor(tensors, "zeros");
  if (zeros == nullptr) {
    if (!settings.zero) {
      return BadTensor("zeros", "nothing",
                       "U8 [groups, N], or one of the settings symmetric and zero");
    }
    scheme.zero_kind = ZeroKind::kConstant;
    scheme.zero = *settings.zero;
    return absl::OkStatus();
  }
  if (settings.zero) {
    return BadTensor("zeros", "a tensor", "none beside the settings symmetric and zero");
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("zeros", *zeros, {"U8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckShape("zeros", *zeros, {groups, out->n}, "as the scales"));
  AWQD_RETURN_IF_ERROR(CheckBits("zeros", *zeros, settings.bits));
  out->zeros.assign(zeros->bytes.begin(), zeros->bytes.end());
  return absl::OkStatus();
}

absl::StatusOr<DType> ScaleType(const TensorView& scales) {
  if (scales.dtype != "I8") return CheckScales("scales", scales, 2, true);
  AWQD_RETURN_IF_ERROR(CheckTensor("scales", scales, {"I8"}, 2));
  return DType::kInt8;
}

// One for all where there is one, also of one column.
absl::Status DecodeOuter(const LinearTensors& tensors, HostWeight* out) {
  const TensorView* outer = FindTensor(tensors, "outer");
  if (outer == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckScales("outer", *outer, 1, true).status());
  AWQD_ASSIGN_OR_RETURN(out->outer, ToFloats("outer", *outer));
  if (out->outer.size() == 1) {
    out->scheme.outer = OuterKind::kOne;
    return absl::OkStatus();
  }
  out->scheme.outer = OuterKind::kColumn;
  return CheckShape("outer", *outer, {out->n}, "[N], or one for all");
}

absl::string_view Lacks(const Setting& object, HasTensor has) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  return settings.ok() && !settings->zero && !has("zeros") ? "zeros" : "";
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes, NeedTensor(tensors, "codes", "U8 [K, N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16, BF16, F32 or I8 [groups, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("codes", *codes, {"U8"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, ScaleType(*scales));
  HostWeight out;
  out.k = codes->shape[0];
  out.n = codes->shape[1];
  const int64_t groups = scales->shape[0];
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings.group_size, out.k, groups, "scales", true));
  AWQD_RETURN_IF_ERROR(CheckShape("scales", *scales, {groups, out.n}, "[groups, N]"));
  out.scheme = Asymmetric(settings.bits, BlockRows(rows, out.k), type);
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, tensors, groups, &out));
  AWQD_RETURN_IF_ERROR(DecodeOuter(tensors, &out));
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  if (codes->unread()) return out;
  AWQD_RETURN_IF_ERROR(CheckBits("codes", *codes, settings.bits));
  out.codes = PackCodes(codes->bytes, out.k, out.n, settings.bits);
  return out;
}

}  // namespace

const Format kPlainFormat = {.name = "plain",
                             .quant_method = "plain",
                             .suffixes = kSuffixes,
                             .optional_suffixes = kOptional,
                             .lacks = Lacks,
                             .code_dtypes = kCodeTypes,
                             .settings = kSettings,
                             .read = Read,
                             .decode_parts = Decode};

}  // namespace awqd
