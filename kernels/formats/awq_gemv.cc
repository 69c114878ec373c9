// Format "awq-gemv": AutoAWQ's version gemv, 4 bits. Everything runs along K:
//
//   qweight I32 [N, K/8], eight codes to a word, the lowest bits first
//   qzeros I32 [N, Z], zero points of a column's groups likewise; optional where zero_point is
//   false scales F16 or BF16 [N, 8 Z], those of groups, then 0     W[k, n] = (q - z) * scales[n, k
//   / g] bias [N], optional
//
// Z is what the groups need, rounded up (PadAwqGroups), so that group_size has to be said.
// Facts: AutoAWQ 0.2.9, modules/linear/gemv.py; GPTQModel 7.7.0, nn_modules/qlinear/gemv_awq.py.
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/awq_linear.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"qweight", "qzeros", "scales", "bias"};
constexpr absl::string_view kOptional[] = {"qzeros", "bias"};
constexpr absl::string_view kCommon[] = {"scales", "bias"};
constexpr absl::string_view kVersions[] = {"gemv"};
constexpr AwqVersion kVersion = {.names = kVersions};
constexpr int64_t kInWord = 8;

absl::StatusOr<QuantConfig> Read(const Setting& config) { return ReadAwqConfig(config, kVersion); }

absl::Status DecodeZeros(const AwqLinear& settings, const LinearTensors& tensors,
                         const PaddedGroups& groups, HostWeight* out) {
  const TensorView* const qzeros = FindTensor(tensors, "qzeros");
  if (qzeros == nullptr) {
    return SetAwqZerosWithout(settings, "qzeros", "I32 [N, padded groups/8], or zero_point false",
                              out);
  }
  const int64_t words = groups.padded / kInWord;
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(
      CheckShape("qzeros", *qzeros, {out->n, words},
                 absl::StrCat("N rows of ", groups.groups, " groups, padded, 8 to a word")));
  std::vector<uint8_t> zeros(groups.groups * out->n);
  for (int64_t group = 0; group < groups.groups; ++group) {
    for (int64_t col = 0; col < out->n; ++col) {
      const uint8_t two = qzeros->bytes[col * words * 4 + group / 2];
      zeros[group * out->n + col] = group % 2 == 0 ? two & 15 : two >> 4;
    }
  }
  return SetAwqZeros(settings, "qzeros", std::move(zeros), out);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<AwqLinear> settings = ReadAwqLinear(object, kVersion);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight, NeedTensor(tensors, "qweight", "I32 [N, K/8]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [N, padded groups]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  HostWeight out;
  out.format = std::string(kAwqGemvFormat.name);
  out.n = qweight->shape[0];
  out.k = qweight->shape[1] * kInWord;
  AWQD_ASSIGN_OR_RETURN(const PaddedGroups groups, PadAwqGroups(*settings, out.k));
  AWQD_RETURN_IF_ERROR(CheckShape(
      "scales", *scales, {out.n, groups.padded},
      absl::StrCat("[N, padded groups] for \"qweight\" [N, K/8] and groups of ", groups.rows)));
  out.scheme = Asymmetric(4, BlockRows(groups.rows, out.k), type);
  AWQD_ASSIGN_OR_RETURN(
      out.scales, UnpadGroups(groups, out.n, Transposed(scales->bytes, out.n, groups.padded, 2)));
  AWQD_RETURN_IF_ERROR(DecodeZeros(*settings, tensors, groups, &out));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  if (qweight->unread()) return out;
  out.codes = TransposedNibbles(qweight->bytes, out.n, out.k, FirstNibble::kLow);
  return out;
}

}  // namespace

const Format kAwqGemvFormat = {.name = "awq-gemv",
                               .quant_method = "awq",
                               .suffixes = kSuffixes,
                               .optional_suffixes = kOptional,
                               .lacks = AwqLacks,
                               .common_suffixes = kCommon,
                               .settings = kAwqSettings,
                               .read = Read,
                               .decode = Decode};

}  // namespace awqd
