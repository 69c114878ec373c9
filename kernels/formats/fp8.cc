// Format "fp8", as DeepSeek's models and transformers' FP8 quantisation spell it.
//
//   weight F8_E4M3 [N, K]       W[k, n] = weight[n, k] * scale
//   weight_scale_inv or weight_scale F32, BF16, F16 (multiplied in spite of its name):
//       [N / 128, K / 128], rounded up, for blocks of weight_block_size, then also F8_E8M0;
//       [] or [1] for all; [N] or [N, 1] per out feature; of fused projections also [3] or [3, 1],
//       one for each, and blocks that begin anew with each
//   input_scale or activation_scale F32, BF16, F16 [] or [1]: of static activations
//   bias [N], optional
//
// DeepSeek-V4 calls the scales "scale". Its experts are MXFP4:
//
//   weight I8 [N, K / 2], E2M1, even k in the low half of a byte
//   scale F8_E8M0 [N, K / 32]
//
// In a request E4M3 and E8M0 are U8. Its settings of a checkpoint:
//
//   {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
//    "modules_to_not_convert": ["lm_head"]}
//
// FBGEMM's quant_method is "fbgemm_fp8", with one scale per out feature and dynamic activations.
//
// Format "blockwise-int8", as SGLang reads it: weight I8 [N, K], weight_scale_inv F32, BF16 or F16
// [N / block_n, K / block_k], rounded up, and "quant_method": "blockwise_int8" beside
// weight_block_size.
#include "kernels/formats/fp8.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale_inv", "weight_scale",
                                           "scale",  "input_scale",      "activation_scale",
                                           "bias"};
constexpr auto kOptional = absl::MakeConstSpan(kSuffixes).subspan(1);
constexpr absl::string_view kNamesOfScales[] = {"weight_scale_inv", "weight_scale", "scale"};
constexpr absl::string_view kCodeTypes[] = {"F8_E4M3", "I8"};
constexpr absl::string_view kSettings[] = {"activations", "block_k", "block_n"};
constexpr absl::string_view kInt8Suffixes[] = {"weight", "weight_scale_inv", "bias"};
constexpr absl::string_view kInt8Optional[] = {"bias"};
constexpr absl::string_view kInt8CodeTypes[] = {"I8"};
constexpr absl::string_view kInt8Settings[] = {"block_k", "block_n"};
constexpr absl::string_view kFbgemm = "fbgemm_fp8";  // a quant_method
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
  for (const absl::string_view name : {"block_k", "block_n"}) {
    const absl::Status status = ReadBlock(out, name).status();
    if (!status.ok()) return BadValue("weight_block_size", "others", "two whole numbers from 1 on");
  }
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckWord(config, "fmt", {"e4m3"}));
  AWQD_RETURN_IF_ERROR(CheckWord(config, "expert_dtype", {"fp8", "fp4"}));
  AWQD_ASSIGN_OR_RETURN(std::string scheme, ReadWord(config, "activation_scheme"));
  AWQD_ASSIGN_OR_RETURN(const std::string method, ReadWord(config, "quant_method"));
  if (method == kFbgemm) scheme = "dynamic";
  AWQD_ASSIGN_OR_RETURN(Setting rule, ReadBlockSize(config));
  const bool known = scheme == "dynamic" || scheme == "static";
  if (known) rule.members["activations"] = Setting::String(scheme);
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, std::move(rule),
                                                 {"modules_to_not_convert", "ignored_layers"}));
  if (!scheme.empty() && !known) {
    out.note = "activation_scheme has no effect: it is neither dynamic nor static";
  }
  return out;
}

absl::StatusOr<QuantConfig> ReadInt8(const Setting& config) {
  if (FindSetting(config, "weight_block_size") == nullptr) {
    return BadValue("weight_block_size", "nothing", "a list of two numbers");
  }
  AWQD_ASSIGN_OR_RETURN(Setting rule, ReadBlockSize(config));
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, std::move(rule),
                                                 {"modules_to_not_convert", "ignored_layers"}));
  out.note = "activation_scheme has no effect: activations are not quantised in groups";
  return out;
}

// Dynamic activations have scales of blocks of 128 where the weight has such blocks, else of tokens;
// static ones have one scale, which a weight of several fused projections may lack.
absl::StatusOr<DeclaredActivations> DecodeActivations(const Setting& object, int64_t block_k,
                                                      const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const std::string scheme, ReadWord(object, "activations"));
  if (scheme.empty()) return DeclaredActivations{};
  if (scheme == "dynamic") {
    if (block_k == 0) return DeclaredActivations{ActivationQuantization::kFloat8PerToken};
    if (block_k == 128) return DeclaredActivations{ActivationQuantization::kFloat8PerBlock};
    return DeclaredActivations{};
  }
  if (scheme != "static") return UnreadSetting("activations", Quoted(scheme), "dynamic or static");
  for (const absl::string_view name : {"input_scale", "activation_scale"}) {
    AWQD_ASSIGN_OR_RETURN(const DeclaredActivations found, DecodeStaticFp8(name, tensors));
    if (found.how != ActivationQuantization::kNone) return found;
  }
  return DeclaredActivations{};
}

// --- Tensors ---

absl::string_view Lacks(const Setting& /*settings*/, HasTensor has) {
  return absl::c_any_of(kNamesOfScales, has) ? "" : "weight_scale_inv";
}

// How many out features each row of scales is for, by the ways in which projections may be fused
// into the codes. A projection has blocks of `block_n` out features, or with 0 just one block.
std::vector<std::vector<int64_t>> RowsOfScales(const TensorView& codes, int64_t block_n,
                                               int64_t rows) {
  std::vector<std::vector<int64_t>> out;
  for (const std::vector<int64_t>& projections : codes.fused) {
    std::vector<int64_t> counts;
    for (int64_t left : projections) {
      for (; left > 0; left -= counts.back()) {
        counts.push_back(block_n == 0 ? left : std::min(left, block_n));
      }
    }
    if (static_cast<int64_t>(counts.size()) == rows && !absl::c_linear_search(out, counts)) {
      out.push_back(std::move(counts));
    }
    if (block_n == 0) break;  // the other ways are of blocks
  }
  return out;
}

// Repeats each row of scales [counts.size(), groups] as often as its count.
std::vector<uint8_t> RepeatRows(absl::Span<const uint8_t> scales,
                                const std::vector<int64_t>& counts) {
  const size_t row_bytes = scales.size() / counts.size();
  std::vector<uint8_t> out;
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto row = scales.subspan(i * row_bytes, row_bytes);
    for (int64_t count = counts[i]; count > 0; --count)
      out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// Sets scales and their type; `shape` [N, groups] is by out feature, as in the file. `counts`: how
// many out features each row is for, where it is not as the scheme says.
absl::Status TakeScales(const Fp8Scales& scales, const TensorView& tensor,
                        const std::vector<int64_t>& counts, HostWeight* out) {
  DType type = DType::kE8m0;
  if (scales.e8m0 && (tensor.dtype == "F8_E8M0" || tensor.dtype == "U8")) {
    AWQD_RETURN_IF_ERROR(CheckByteScales(scales.name, tensor, type, tensor.shape.size()));
  } else {
    AWQD_ASSIGN_OR_RETURN(type, CheckScales(scales.name, tensor, tensor.shape.size(), true));
  }
  out->scheme.scale_dtype = type;
  std::vector<uint8_t> repeated;
  if (!counts.empty()) repeated = RepeatRows(tensor.bytes, counts);
  out->scales = Transposed(counts.empty() ? tensor.bytes : repeated, out->shape().column_blocks(),
                           out->groups(), SizeOf(type));
  return absl::OkStatus();
}

absl::Status DecodeBlockScales(const Fp8Scales& scales, const TensorView& codes,
                               const TensorView& tensor, HostWeight* out) {
  QuantizationScheme& scheme = out->scheme;
  const int64_t column_blocks = CeilDiv(out->n, scales.block_n);
  const int64_t groups = CeilDiv(out->k, scales.block_k);
  if (tensor.shape.size() == 2 && tensor.shape[0] > column_blocks && tensor.shape[1] == groups) {
    const auto ways = RowsOfScales(codes, scales.block_n, tensor.shape[0]);
    if (ways.size() > 1) {
      return BadTensor(scales.name, absl::StrCat("shape ", ShapeText(tensor.shape)),
                       "blocks that fit one way of fusing projections, not several");
    }
    if (!ways.empty()) {
      scheme.block_rows = scales.block_k >= out->k ? 0 : scales.block_k;
      return TakeScales(scales, tensor, ways[0], out);
    }
  }
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
  return TakeScales(scales, tensor, {}, out);
}

absl::Status DecodeOtherScales(const Fp8Scales& scales, const TensorView& codes,
                               const TensorView& tensor, HostWeight* out) {
  const std::vector<int64_t>& shape = tensor.shape;
  if (AreOfProjections(codes, tensor)) {
    return TakeScales(scales, tensor, codes.fused.front(), out);
  }
  if (shape.empty() || shape == std::vector<int64_t>{1}) {
    out->scheme.block_cols = 0;
  } else if (shape != std::vector<int64_t>{out->n} && shape != std::vector<int64_t>{out->n, 1}) {
    return BadTensor(scales.name, absl::StrCat("shape ", ShapeText(shape)),
                     absl::StrCat("[], [1], [", out->n, "] or [", out->n,
                                  ", 1] (N), as no size of blocks is set, or one for each of the "
                                  "fused projections where config.json tells their sizes"));
  }
  return TakeScales(scales, tensor, {}, out);
}

// The one tensor of scales.
absl::StatusOr<absl::string_view> NameOfScales(const LinearTensors& tensors) {
  absl::string_view out;
  for (const absl::string_view name : kNamesOfScales) {
    if (FindTensor(tensors, name) == nullptr) continue;
    if (!out.empty()) {
      return BadTensor(name, absl::StrCat("it beside \"", out, "\""), "only one of them");
    }
    out = name;
  }
  return out.empty() ? "weight_scale" : out;
}

// The sides of the blocks that share a scale; 0 where no size is set.
absl::Status ReadBlocks(const Setting& object, Fp8Scales* out) {
  AWQD_ASSIGN_OR_RETURN(out->block_n, ReadBlock(object, "block_n"));
  AWQD_ASSIGN_OR_RETURN(out->block_k, ReadBlock(object, "block_k"));
  if ((out->block_n == 0) == (out->block_k == 0)) return absl::OkStatus();
  return BadValue(out->block_n == 0 ? "block_n" : "block_k", "nothing",
                  "a number, as the other side of the blocks has one");
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  Fp8Scales scales = {.e8m0 = true};
  AWQD_RETURN_IF_ERROR(ReadBlocks(object, &scales));
  AWQD_ASSIGN_OR_RETURN(scales.name, NameOfScales(tensors));
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "F8_E4M3 [N, K]"));
  const E2m1Tensors mxfp4 = {
      .scales = scales.name, .scale = DType::kE8m0, .group_size = 32, .code_dtype = "I8"};
  AWQD_ASSIGN_OR_RETURN(HostWeight out, weight->dtype == "I8" ? DecodeE2m1(mxfp4, tensors)
                                                              : DecodeFp8(scales, tensors));
  AWQD_ASSIGN_OR_RETURN(out.activations, DecodeActivations(object, scales.block_k, tensors));
  return out;
}

// Codes of one byte, E4M3 or integers about 0, with their scales.
absl::StatusOr<HostWeight> DecodeBytes(bool integers, const Fp8Scales& scales,
                                       const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(
      const TensorView* weight,
      NeedTensor(tensors, scales.codes, integers ? "I8 [N, K]" : "F8_E4M3 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, scales.name, "F32, BF16 or F16 scales"));
  AWQD_RETURN_IF_ERROR(integers ? CheckTensor(scales.codes, *weight, {"I8"}, 2)
                                : CheckTensor(scales.codes, *weight, {"F8_E4M3", "U8"}, 2));
  HostWeight out;
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  out.scheme = {.code = CodeKind::kE4m3, .bits = 8, .zero_kind = ZeroKind::kConstant};
  if (integers) out.scheme = Symmetric(8, 0);
  AWQD_RETURN_IF_ERROR(scales.block_n > 0 ? DecodeBlockScales(scales, *weight, *scale, &out)
                                          : DecodeOtherScales(scales, *weight, *scale, &out));
  if (weight->unread()) return out;
  out.codes = Transposed(weight->bytes, out.n, out.k, 1);
  if (!integers) return out;
  for (uint8_t& code : out.codes) code ^= 0x80;  // two's complement to 0 .. 255
  return out;
}

absl::StatusOr<HostWeight> DecodeInt8Blocks(const Setting& object, const LinearTensors& tensors) {
  Fp8Scales scales = {.name = "weight_scale_inv"};
  AWQD_RETURN_IF_ERROR(ReadBlocks(object, &scales));
  return DecodeInt8(scales, tensors);
}

}  // namespace

absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes, NeedTensor(tensors, names.codes, "U8 [N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, names.scales,
                                   absl::StrCat(names.scale == DType::kE4m3 ? "F8_E4M3" : "U8",
                                                " [N, K/group_size]")));
  AWQD_RETURN_IF_ERROR(CheckTensor(names.codes, *codes, {names.code_dtype}, 2));
  DType type = names.scale;
  if (IsFloating(type)) {
    AWQD_ASSIGN_OR_RETURN(type, CheckScales(names.scales, *scale, 2, true));
  } else {
    AWQD_RETURN_IF_ERROR(CheckByteScales(names.scales, *scale, type, 2));
  }
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
                .scale_dtype = type};
  out.scales = Transposed(scale->bytes, out.n, groups, SizeOf(type));
  if (codes->unread()) return out;
  out.codes = TransposedNibbles(codes->bytes, out.n, out.k, names.first);
  return out;
}

absl::StatusOr<DeclaredActivations> DecodeStaticFp8(absl::string_view name,
                                                    const LinearTensors& tensors) {
  const TensorView* const scale = FindTensor(tensors, name);
  if (scale == nullptr || absl::c_any_of(scale->shape, [](int64_t side) { return side != 1; })) {
    return DeclaredActivations{};
  }
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber(name, *scale));
  if (number > 0) return DeclaredActivations{ActivationQuantization::kFloat8Static, number};
  return BadTensor(name, absl::StrCat(number), "a positive number");
}

bool AreOfProjections(const TensorView& codes, const TensorView& scales) {
  const std::vector<int64_t>& shape = scales.shape;
  const bool column = shape.size() == 1 || (shape.size() == 2 && shape[1] == 1);
  return column && shape[0] > 1 && shape[0] != codes.shape[0] && !codes.fused.empty() &&
         shape[0] == static_cast<int64_t>(codes.fused.front().size());
}

absl::StatusOr<HostWeight> DecodeFp8(const Fp8Scales& scales, const LinearTensors& tensors) {
  return DecodeBytes(/*integers=*/false, scales, tensors);
}

absl::StatusOr<HostWeight> DecodeInt8(const Fp8Scales& scales, const LinearTensors& tensors) {
  return DecodeBytes(/*integers=*/true, scales, tensors);
}

absl::StatusOr<HostWeight> DecodeInt8(const LinearTensors& tensors) {
  return DecodeInt8({.name = "weight_scale"}, tensors);
}

const Format kFp8Format = {.name = "fp8",
                           .quant_method = "fp8",
                           .other_quant_method = kFbgemm,
                           .suffixes = kSuffixes,
                           .optional_suffixes = kOptional,
                           .lacks = Lacks,
                           .code_dtypes = kCodeTypes,
                           .settings = kSettings,
                           .read = Read,
                           .decode_parts = Decode};

const Format kBlockwiseInt8Format = {.name = "blockwise-int8",
                                     .quant_method = "blockwise_int8",
                                     .suffixes = kInt8Suffixes,
                                     .optional_suffixes = kInt8Optional,
                                     .code_dtypes = kInt8CodeTypes,
                                     .settings = kInt8Settings,
                                     .read = ReadInt8,
                                     .decode_parts = DecodeInt8Blocks};

}  // namespace awqd
