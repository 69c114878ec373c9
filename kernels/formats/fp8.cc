// Format "fp8", as DeepSeek's models and transformers' FP8 quantisation spell it.
//
//   weight F8_E4M3 [N, K]       W[k, n] = weight[n, k] * scale
//   weight_scale_inv or weight_scale F32, BF16, F16 (multiplied in spite of its name):
//       [N / 128, K / 128], rounded up, for blocks of weight_block_size, then also F8_E8M0;
//       [] or [1] for all; [N] or [N, 1] per out feature
//   bias [N], optional
//
// In a request codes and E8M0 scales are U8. Its settings of a checkpoint:
//
//   {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
//    "modules_to_not_convert": ["lm_head"]}
#include "kernels/formats/fp8.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale_inv", "weight_scale", "bias"};
constexpr absl::string_view kOptional[] = {"weight_scale_inv", "weight_scale", "bias"};
constexpr absl::string_view kCodeTypes[] = {"F8_E4M3"};
constexpr absl::string_view kSettings[] = {"block_k", "block_n"};
constexpr int64_t kMostBlock = int64_t{1} << 31;

// --- Settings ---

absl::StatusOr<int64_t> ReadBlock(const Setting& object, absl::string_view name) {
  AWQD_ASSIGN_OR_RETURN(const auto size, ReadInteger(object, name, 1, kMostBlock));
  return size.value_or(0);
}

// "weight_block_size": [rows of the tensor, its columns] or null.
absl::StatusOr<Setting> ReadBlockSize(const Setting& config) {
  Setting out;
  const Setting* const size = FindSetting(config, "weight_block_size");
  if (size == nullptr) return out;
  if (size->kind != Setting::Kind::kList || size->list.size() != 2) {
    return BadSetting("weight_block_size", *size, "null or a list of two numbers");
  }
  out.members = {{"block_n", size->list[0]}, {"block_k", size->list[1]}};
  for (const absl::string_view name : kSettings) {
    const absl::Status status = ReadBlock(out, name).status();
    if (!status.ok()) return BadValue("weight_block_size", "others", "two whole numbers from 1 on");
  }
  return out;
}

absl::Status CheckWord(const Setting& config, absl::string_view name, absl::string_view expected) {
  AWQD_ASSIGN_OR_RETURN(const std::string got, ReadWord(config, name));
  if (got.empty() || got == expected) return absl::OkStatus();
  return UnreadSetting(name, Quoted(got), absl::StrCat("\"", expected, "\""));
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckWord(config, "fmt", "e4m3"));
  AWQD_RETURN_IF_ERROR(CheckWord(config, "expert_dtype", "fp8"));
  AWQD_ASSIGN_OR_RETURN(const std::string scheme, ReadWord(config, "activation_scheme"));
  AWQD_ASSIGN_OR_RETURN(Setting rule, ReadBlockSize(config));
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, std::move(rule)));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> ignored,
                        ReadStrings(config, "ignored_layers"));
  for (const std::string& layer : ignored) {
    out.left_out.push_back({ModulePattern::Kind::kContains, layer});
  }
  if (!scheme.empty()) {
    out.note = "activation_scheme has no effect: activations are not quantised to FP8";
  }
  return out;
}

// --- Tensors ---

// Sets scales and their type; `shape` [N, groups] is by out feature, as in the file.
absl::Status TakeScales(const Fp8Scales& scales, const TensorView& tensor, HostWeight* out) {
  DType type = DType::kE8m0;
  if (scales.e8m0 && (tensor.dtype == "F8_E8M0" || tensor.dtype == "U8")) {
    AWQD_RETURN_IF_ERROR(CheckByteScales(scales.name, tensor, type, tensor.shape.size()));
  } else {
    AWQD_ASSIGN_OR_RETURN(type, CheckScales(scales.name, tensor, tensor.shape.size(), true));
  }
  out->scheme.scale_dtype = type;
  out->scales = Transposed(tensor.bytes, out->shape().column_blocks(), out->groups(), SizeOf(type));
  return absl::OkStatus();
}

absl::Status DecodeBlockScales(const Fp8Scales& scales, const TensorView& tensor, HostWeight* out) {
  QuantizationScheme& scheme = out->scheme;
  const int64_t column_blocks = CeilDiv(out->n, scales.block_n);
  const int64_t groups = CeilDiv(out->k, scales.block_k);
  if (tensor.shape.size() == 4) {  // ModelOpt keeps a dimension for each block's
    AWQD_RETURN_IF_ERROR(CheckShape(scales.name, tensor, {column_blocks, 1, groups, 1},
                                    "[blocks of N, 1, of K, 1]"));
  } else {
    AWQD_RETURN_IF_ERROR(
        CheckShape(scales.name, tensor, {column_blocks, groups},
                   absl::StrCat("[N, K] in blocks of ", scales.block_n, " x ", scales.block_k)));
  }
  scheme.block_rows = scales.block_k >= out->k ? 0 : scales.block_k;
  scheme.block_cols = scales.block_n >= out->n && out->n > 1 ? 0 : scales.block_n;
  if (out->n == 1) scheme.block_cols = 1;
  return TakeScales(scales, tensor, out);
}

absl::Status DecodeOtherScales(const Fp8Scales& scales, const TensorView& tensor, HostWeight* out) {
  const std::vector<int64_t>& shape = tensor.shape;
  if (shape.empty() || shape == std::vector<int64_t>{1}) {
    out->scheme.block_cols = 0;
  } else if (shape != std::vector<int64_t>{out->n} && shape != std::vector<int64_t>{out->n, 1}) {
    return BadTensor(scales.name, absl::StrCat("shape ", ShapeText(shape)),
                     absl::StrCat("[], [1], [", out->n, "] or [", out->n,
                                  ", 1] (N), as no size of blocks is set"));
  }
  return TakeScales(scales, tensor, out);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  Fp8Scales scales = {.e8m0 = true};
  AWQD_ASSIGN_OR_RETURN(scales.block_n, ReadBlock(object, "block_n"));
  AWQD_ASSIGN_OR_RETURN(scales.block_k, ReadBlock(object, "block_k"));
  if ((scales.block_n == 0) != (scales.block_k == 0)) {
    return BadValue(scales.block_n == 0 ? "block_n" : "block_k", "nothing",
                    "a number, as the other side of the blocks has one");
  }
  if (scales.block_n != 0) scales.kind = Fp8Scales::Kind::kBlocks;
  const bool inverse = FindTensor(tensors, "weight_scale_inv") != nullptr;
  if (inverse && FindTensor(tensors, "weight_scale") != nullptr) {
    return BadTensor("weight_scale", "it beside \"weight_scale_inv\"", "only one of the two");
  }
  scales.name = inverse ? "weight_scale_inv" : "weight_scale";
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeFp8(scales, tensors));
  out.format = std::string(kFp8Format.name);
  return out;
}

}  // namespace

absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes, NeedTensor(tensors, names.codes, "U8 [N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, names.scales,
                                   absl::StrCat(names.scale == DType::kE4m3 ? "F8_E4M3" : "U8",
                                                " [N, K/group_size]")));
  AWQD_RETURN_IF_ERROR(CheckTensor(names.codes, *codes, {"U8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckByteScales(names.scales, *scale, names.scale, 2));
  HostWeight out;
  out.n = codes->shape[0];
  out.k = codes->shape[1] * 2;  // as many bytes as the shape says: doubled it fits
  const int64_t groups = scale->shape[1];
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(names.group_size, out.k, groups, names.scales, false));
  AWQD_RETURN_IF_ERROR(CheckShape(names.scales, *scale, {out.n, groups}, "[N, K/group_size]"));
  out.scheme = {.code = CodeKind::kE2m1,
                .block_rows = BlockRows(rows, out.k),
                .zero_kind = ZeroKind::kConstant,
                .scale_dtype = names.scale};
  out.scales = Transposed(scale->bytes, out.n, groups, 1);
  if (codes->unread()) return out;
  out.codes = TransposedNibbles(codes->bytes, out.n, out.k, FirstNibble::kLow);
  return out;
}

absl::StatusOr<HostWeight> DecodeFp8(const Fp8Scales& scales, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "F8_E4M3 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, scales.name, "F32, BF16 or F16 scales"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"F8_E4M3", "U8"}, 2));
  HostWeight out;
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  out.scheme = {.code = CodeKind::kE4m3, .bits = 8, .zero_kind = ZeroKind::kConstant};
  AWQD_RETURN_IF_ERROR(scales.kind == Fp8Scales::Kind::kBlocks
                           ? DecodeBlockScales(scales, *scale, &out)
                           : DecodeOtherScales(scales, *scale, &out));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  if (weight->unread()) return out;
  out.codes = Transposed(weight->bytes, out.n, out.k, 1);
  return out;
}

const Format kFp8Format = {.name = "fp8",
                           .quant_method = "fp8",
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .code_dtypes = kCodeTypes,
                           .settings = kSettings,
                           .read = Read,
                           .decode = Decode};

}  // namespace awqd
