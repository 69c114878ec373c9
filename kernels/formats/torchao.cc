// Format "torchao", as PyTorch's torchao (0.14 and later) writes weights to safetensors. The class
// of a weight stands in the metadata of the file, as JSON under the name "PATH.weight":
//
//   Int8Tensor, IntxUnpackedToInt8Tensor (target_dtype int1 to int8): _weight_qdata I8 [N, K];
//       _weight_scale F32, F16, BF16 [N / rows, K / columns], a scale for each block of codes;
//       _weight_zero_point of that shape, I8 or a float, optional
//       W[k, n] = (_weight_qdata[n, k] - zero_point) * scale
//   Float8Tensor: _weight_qdata F8_E4M3 [N, K]; _weight_scale as above, or [] for all
//   Int4Tensor: _weight_qdata I8 [N, K / 2], two's complement, even k in the low half of a byte;
//       _weight_scale, _weight_zero_point F16, BF16, F32 [K / group, N]
//       W[k, n] = code * scale + zero_point
//   MXTensor: _weight_qdata F8_E4M3 [N, K], or U8 [N, K / 2] of E2M1; _weight_scale F8_E8M0
//       [N, K / 32]
//   NVFP4Tensor: _weight_qdata U8 [N, K / 2], E2M1; _weight_scale F8_E4M3 [N, K / 16];
//       _weight_per_tensor_scale F32 [], optional
//   _weight_act_pre_scale F32, F16, BF16 [K], optional: multiplies activations
//   bias [N], optional
//
// Where is_swizzled_scales is true, scales are in tiles of 128 x 4, padded: element (r, c) of a
// tile is byte r % 32 * 16 + r / 32 * 4 + c. Other classes have the order of one device's kernels
// and are refused.
//
// The scheme has codes without sign, so Int4Tensor's zero is 8 * scale - zero_point in FP32.
// torchao rounds NVFP4's scale times per_tensor_scale, and not code times scale: a last place
// apart.
//
// In a request E4M3 and E8M0 are U8, and the settings say what the metadata would: tensor_type,
// target_dtype, elem_dtype, is_swizzled_scales, activations ("dynamic").
#include <cmath>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kCodes = "_weight_qdata", kScale = "_weight_scale";
constexpr absl::string_view kZero = "_weight_zero_point", kFactor = "_weight_act_pre_scale";
constexpr absl::string_view kOuter = "_weight_per_tensor_scale";
constexpr absl::string_view kSuffixes[] = {
    kCodes, kScale, kZero, kOuter, kFactor, "bias", "_weight_scale_and_zero"};
constexpr auto kOptional = absl::MakeSpan(kSuffixes).subspan(1);
constexpr absl::string_view kCommon[] = {"bias"};
constexpr absl::string_view kWithoutEffect[] = {
    "_weight_act_quant_scale", "_weight_act_quant_zero_point", "_weight_act_per_tensor_scale"};
constexpr absl::string_view kSettings[] = {"activations", "elem_dtype", "is_swizzled_scales",
                                           "target_dtype", "tensor_type"};
constexpr size_t kMostJsonBytes = 4096;
constexpr int64_t kMxGroup = 32, kNvGroup = 16;

// --- The class of a weight ---

enum class Kind { kInt8, kIntx, kFloat8, kInt4, kMx, kNvfp4 };
struct Class {
  absl::string_view name;
  Kind kind;
};
constexpr Class kClasses[] = {
    {"Int8Tensor", Kind::kInt8},     {"IntxUnpackedToInt8Tensor", Kind::kIntx},
    {"Float8Tensor", Kind::kFloat8}, {"Int4Tensor", Kind::kInt4},
    {"MXTensor", Kind::kMx},         {"NVFP4Tensor", Kind::kNvfp4}};
constexpr absl::string_view kExpected =
    "Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, Int4Tensor, MXTensor or NVFP4Tensor";
// Classes whose codes are in the order of one device's kernels, and whose order that is.
constexpr std::pair<absl::string_view, absl::string_view> kDeviceClasses[] = {
    {"Int4TilePackedTo4dTensor", "tiles of tinygemm's kernels"},
    {"Int4PlainInt32Tensor", "words of XPUs and NPUs"},
    {"Int4PreshuffledTensor", "shuffled for MSLK's kernels"},
    {"Int4MarlinSparseTensor", "Marlin's sparse tiles"},
    {"IntxOpaqueTensor", "packed for one CPU's kernels"}};

struct Description {
  const Class* type = nullptr;
  int bits = 8;
  std::string elements;  // elem_dtype; empty: not said
  bool swizzled = false;
  bool activations = false;           // whether they are to be rounded, for each token
  std::vector<int64_t> block;         // rows and columns that share a scale; empty: not said
  std::vector<std::string> suffixes;  // of tensors that the weight is said to have
};

absl::StatusOr<Description> ReadDescription(const Setting& object) {
  Description out;
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "tensor_type"));
  if (name.empty()) {
    return BadValue("tensor_type", "nothing, nor in the metadata of the file", kExpected);
  }
  const auto is = [&](absl::string_view known) { return absl::AsciiStrToLower(known) == name; };
  for (const auto& [known, order] : kDeviceClasses) {
    if (!is(known)) continue;
    return UnreadSetting("tensor_type", absl::StrCat(known, " (", order, ")"), kExpected);
  }
  out.type = absl::c_find_if(kClasses, [&](const Class& known) { return is(known.name); });
  if (out.type == std::end(kClasses)) return UnreadSetting("tensor_type", Quoted(name), kExpected);
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadChoice<int>(object, "target_dtype",
                                                         {{"int1", 1},
                                                          {"int2", 2},
                                                          {"int3", 3},
                                                          {"int4", 4},
                                                          {"int5", 5},
                                                          {"int6", 6},
                                                          {"int7", 7},
                                                          {"int8", 8}}));
  if (out.type->kind == Kind::kIntx && !bits) {
    return BadValue("target_dtype", "nothing", "int1 to int8");
  }
  out.bits = bits.value_or(8);
  AWQD_RETURN_IF_ERROR(CheckWord(object, "elem_dtype", {"float8_e4m3fn", "float4_e2m1fn_x2"}));
  AWQD_ASSIGN_OR_RETURN(out.elements, ReadWord(object, "elem_dtype"));
  AWQD_ASSIGN_OR_RETURN(const auto swizzled, ReadBool(object, "is_swizzled_scales"));
  out.swizzled = swizzled.value_or(false);
  AWQD_RETURN_IF_ERROR(CheckWord(object, "activations", {"dynamic"}));
  AWQD_ASSIGN_OR_RETURN(const std::string activations, ReadWord(object, "activations"));
  out.activations = !activations.empty();
  return out;
}

// The member of an object; null when there is none.
const Json& Member(const Json& object, const char* name) {
  static const Json& nothing = *new Json();
  const auto it = object.is_object() ? object.find(name) : object.end();
  return !object.is_object() || it == object.end() ? nothing : *it;
}

// A text under "_data", as types and enumerations have it: {"_type": "torch.dtype", "_data": ...}.
void CopyWord(const Json& data, const char* name, Setting* to) {
  const Json& word = Member(Member(data, name), "_data");
  if (word.is_string()) to->members[name] = Setting::String(word.get<std::string>());
}

// Whether activations are to be rounded about 0 with a scale for each token.
bool RoundsTokens(const Json& data) {
  const Json& how = Member(Member(data, "act_quant_kwargs"), "_data");
  const Json& mapping = Member(Member(how, "mapping_type"), "_data");
  const Json& type = Member(Member(how, "float8_dtype"), "_data");
  return Member(Member(how, "granularity"), "_type") == "PerRow" &&
         (mapping.is_null() || mapping == "SYMMETRIC") &&
         (type.is_null() || type == "float8_e4m3fn");
}

// Reads metadata where the file has some; they tell of the weight, and the settings do not count.
absl::StatusOr<Description> Describe(const Setting& object, const std::string& metadata) {
  if (metadata.empty()) return ReadDescription(object);
  const auto bad = [](absl::string_view got, absl::string_view expected) {
    return BadValue("metadata of the weight", got, expected);
  };
  if (metadata.size() > kMostJsonBytes) {
    return bad(absl::StrCat(metadata.size(), " bytes"), absl::StrCat("at most ", kMostJsonBytes));
  }
  const Json json = Json::parse(metadata, nullptr, /*allow_exceptions=*/false);
  const Json& type = Member(json, "_type");
  const Json& data = Member(json, "_data");
  if (!type.is_string()) return bad("other text", "a JSON object with \"_type\"");
  Setting said;
  said.members["tensor_type"] = Setting::String(type.get<std::string>());
  CopyWord(data, "target_dtype", &said);
  CopyWord(data, "elem_dtype", &said);
  said.members["is_swizzled_scales"] = Setting::Literal(Member(data, "is_swizzled_scales") == true);
  if (RoundsTokens(data)) said.members["activations"] = Setting::String("dynamic");
  AWQD_ASSIGN_OR_RETURN(Description out, ReadDescription(said));
  for (const Json& name : Member(json, "_tensor_data_names")) {
    if (!name.is_string()) return bad("_tensor_data_names of others", "names");
    out.suffixes.push_back(absl::StrCat("_weight_", name.get<std::string>()));
  }
  const Json& block = Member(data, "block_size");
  if (!block.is_array()) return out;
  for (const Json& side : block) {
    if (!side.is_number_unsigned()) return bad("block_size of others", "whole numbers");
    out.block.push_back(side.get<int64_t>());
  }
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  return OneRule(config, OnlySettings(config, kSettings));
}

// --- Tensors ---

// Rows and columns of scales, which divide [N, K] into equal blocks.
struct Grid {
  int64_t rows = 1, cols = 1;
};

absl::StatusOr<Grid> ReadGrid(const Description& what, const TensorView& scale, int64_t n,
                              int64_t k) {
  const std::vector<int64_t>& shape = scale.shape;
  Grid out;
  if (shape.size() == 2) out = {shape[0], shape[1]};
  if (shape.size() == 1) out = {shape[0], 1};
  if (shape.size() > 2 || n % out.rows != 0 || k % out.cols != 0) {
    return BadTensor(kScale, absl::StrCat("shape ", ShapeText(shape)),
                     absl::StrCat("a scale for each of equal blocks of ", ShapeText({n, k})));
  }
  const std::vector<int64_t> block = {n / out.rows, k / out.cols};
  if (!what.block.empty() && what.block != block) {
    return BadTensor(kScale, absl::StrCat("shape ", ShapeText(shape)),
                     absl::StrCat("that of blocks ", ShapeText(what.block), " of ",
                                  ShapeText({n, k}), ", as the metadata say"));
  }
  return out;
}

// Sets zeros from numbers as the file has them: none, integers of the codes' range, or real ones.
absl::Status DecodeZeros(const TensorView& zero, const TensorView& scale, const Grid& grid,
                         HostWeight* out) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> zeros, ToFloats(kZero, zero));
  if (zero.shape != scale.shape) {
    return BadTensor(kZero, absl::StrCat("shape ", ShapeText(zero.shape)),
                     absl::StrCat(ShapeText(scale.shape), ", as \"", kScale, "\" has"));
  }
  if (absl::c_all_of(zeros, [](float value) { return value == 0; })) return absl::OkStatus();
  const int half = 1 << (out->scheme.bits - 1);
  out->scheme.zero = 0;
  if (absl::c_all_of(zeros, [half](float value) {
        return value == std::floor(value) && value >= -half && value < half;
      })) {
    std::vector<uint8_t> stored;
    for (const float value : zeros) stored.push_back(static_cast<uint8_t>(value + half));
    out->scheme.zero_kind = ZeroKind::kStored;
    out->zeros = Transposed(stored, grid.rows, grid.cols, 1);
    return absl::OkStatus();
  }
  std::vector<uint8_t> real(zeros.size() * sizeof(float));
  for (size_t i = 0; i < zeros.size(); ++i) {
    const float sum = zeros[i] + half;
    if (static_cast<double>(sum) != static_cast<double>(zeros[i]) + half) {
      return BadTensor(kZero, absl::StrCat(zeros[i], " at element ", i),
                       absl::StrCat("a number that FP32 holds with ", half, " added"));
    }
    std::memcpy(real.data() + i * sizeof(float), &sum, sizeof(sum));
  }
  out->scheme.zero_kind = ZeroKind::kRealBefore;
  out->scheme.zero_dtype = DType::kFp32;
  out->zeros = Transposed(real, grid.rows, grid.cols, sizeof(float));
  return absl::OkStatus();
}

// Codes of one byte each, whatever their bits.
absl::StatusOr<HostWeight> DecodeIntegers(const Description& what, const TensorView& codes,
                                          const TensorView& scale, const LinearTensors& tensors) {
  AWQD_RETURN_IF_ERROR(CheckTensor(kCodes, codes, {"I8"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(kScale, scale, scale.shape.size(), true));
  HostWeight out;
  out.n = codes.shape[0];
  out.k = codes.shape[1];
  AWQD_ASSIGN_OR_RETURN(const Grid grid, ReadGrid(what, scale, out.n, out.k));
  out.scheme = Symmetric(what.bits, BlockRows(out.k / grid.cols, out.k), type);
  out.scheme.block_cols = grid.rows == 1 && out.n > 1 ? 0 : out.n / grid.rows;
  out.scales = Transposed(scale.bytes, grid.rows, grid.cols, SizeOf(type));
  if (const TensorView* const zero = FindTensor(tensors, kZero); zero != nullptr) {
    AWQD_RETURN_IF_ERROR(DecodeZeros(*zero, scale, grid, &out));
  }
  if (codes.unread()) return out;
  const int half = 1 << (what.bits - 1);
  const auto outside = absl::c_find_if(codes.bytes, [half](uint8_t byte) {
    const auto code = static_cast<int8_t>(byte);
    return code < -half || code >= half;
  });
  if (outside != codes.bytes.end()) {
    return BadTensor(kCodes,
                     absl::StrCat(static_cast<int>(static_cast<int8_t>(*outside)), " at element ",
                                  outside - codes.bytes.begin()),
                     absl::StrCat(-half, " to ", half - 1, " (int", what.bits, ")"));
  }
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    const uint8_t* const from = codes.bytes.data() + row * out.k + col;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(from[i] + half);
  };
  out.codes = PackTransposed(out.n, out.k, what.bits, read);
  return out;
}

absl::StatusOr<HostWeight> DecodeInt4(const TensorView& codes, const TensorView& scale,
                                      const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* zero,
                        NeedTensor(tensors, kZero, "F16, BF16 or F32 [K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor(kCodes, codes, {"I8", "U8"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales(kScale, scale, 2, true));
  AWQD_RETURN_IF_ERROR(CheckScales(kZero, *zero, 2, true).status());
  HostWeight out;
  out.n = codes.shape[0];
  out.k = codes.shape[1] * 2;  // as many bytes as the shape says: doubled it fits
  const int64_t groups = scale.shape[0];
  AWQD_ASSIGN_OR_RETURN(const int64_t rows, GroupRows(0, out.k, groups, kScale, false));
  AWQD_RETURN_IF_ERROR(CheckShape(kScale, scale, {groups, out.n}, "[K/group_size, N]"));
  AWQD_RETURN_IF_ERROR(CheckShape(kZero, *zero, {groups, out.n}, "[K/group_size, N]"));
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> zeros, ToFloats(kZero, *zero));
  out.scheme = Symmetric(4, BlockRows(rows, out.k), type);
  out.scales.assign(scale.bytes.begin(), scale.bytes.end());
  if (!absl::c_all_of(zeros, [](float value) { return value == 0; })) {
    out.scheme.zero = 0;
    out.scheme.zero_kind = ZeroKind::kRealAfter;
    out.scheme.zero_dtype = DType::kFp32;
    out.zeros.resize(zeros.size() * sizeof(float));
    for (size_t i = 0; i < zeros.size(); ++i) {
      const double step = LoadElement(scale.bytes.data(), type, static_cast<int64_t>(i));
      const auto value = static_cast<float>(8 * step - zeros[i]);
      std::memcpy(out.zeros.data() + i * sizeof(float), &value, sizeof(value));
    }
  }
  if (codes.unread()) return out;
  out.codes = TransposedNibbles(codes.bytes, out.n, out.k, FirstNibble::kLow);
  for (uint8_t& pair : out.codes) pair ^= 0x88;  // two's complement to 0 .. 15
  if (out.n % 2 == 0) return out;
  for (int64_t row = 1; row <= out.k; ++row) out.codes[row * out.row_bytes() - 1] &= 0x0f;
  return out;
}

absl::StatusOr<HostWeight> DecodeFloat8(const Description& what, const TensorView& codes,
                                        const TensorView& scale, const LinearTensors& tensors) {
  AWQD_RETURN_IF_ERROR(CheckTensor(kCodes, codes, {"F8_E4M3", "U8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckScales(kScale, scale, scale.shape.size(), true).status());
  const int64_t n = codes.shape[0], k = codes.shape[1];
  AWQD_ASSIGN_OR_RETURN(const Grid grid, ReadGrid(what, scale, n, k));
  Fp8Scales scales = {.name = kScale, .codes = kCodes};
  if (scale.shape.size() == 2) {
    scales.block_n = n / grid.rows;
    scales.block_k = k / grid.cols;
  }
  return DecodeFp8(scales, tensors);
}

// Scales [rows, cols] of tiles of 128 x 4 by rows.
std::vector<uint8_t> Unswizzled(absl::Span<const uint8_t> from, int64_t rows, int64_t cols) {
  constexpr int64_t kRows = 128, kCols = 4;
  const int64_t tiles = CeilDiv(cols, kCols);
  std::vector<uint8_t> out(rows * cols);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t tile = row / kRows * tiles + col / kCols;
      const int64_t place = row % 32 * 16 + row % kRows / 32 * kCols + col % kCols;
      out[row * cols + col] = from[tile * kRows * kCols + place];
    }
  }
  return out;
}

// Codes with a scale of one byte for each group.
absl::StatusOr<HostWeight> DecodeMx(const Description& what, const TensorView& codes,
                                    const TensorView& scale, LinearTensors tensors) {
  const bool nvfp4 = what.type->kind == Kind::kNvfp4;
  const int64_t group = nvfp4 ? kNvGroup : kMxGroup;
  const DType type = nvfp4 ? DType::kE4m3 : DType::kE8m0;
  AWQD_RETURN_IF_ERROR(CheckTensor(kCodes, codes, {"U8", "F8_E4M3"}, 2));
  AWQD_RETURN_IF_ERROR(CheckByteScales(kScale, scale, type, 2));
  const int64_t n = codes.shape[0];
  bool fp8 = codes.dtype == "F8_E4M3";
  // A request has U8 for both.
  if (!fp8 && !what.elements.empty()) fp8 = what.elements == "float8_e4m3fn";
  const int64_t k = fp8 ? codes.shape[1] : codes.shape[1] * 2;
  if (k % group != 0) {
    return BadTensor(kCodes, absl::StrCat("K = ", k), absl::StrCat("a multiple of ", group));
  }
  std::vector<uint8_t> rows;
  if (what.swizzled) {
    const int64_t cols = k / group;
    AWQD_RETURN_IF_ERROR(CheckShape(kScale, scale, {32 * CeilDiv(n, 128), 16 * CeilDiv(cols, 4)},
                                    "tiles of [N, K/group_size]"));
    rows = Unswizzled(scale.bytes, n, cols);
    TensorView& view = tensors.find(kScale)->second;
    view.shape = {n, cols};
    view.bytes = rows;
  }
  if (fp8) return DecodeFp8({kScale, 1, group, true, kCodes}, tensors);
  AWQD_ASSIGN_OR_RETURN(
      HostWeight out,
      DecodeE2m1({.codes = kCodes, .scales = kScale, .scale = type, .group_size = group}, tensors));
  const TensorView* const outer = FindTensor(tensors, kOuter);
  if (!nvfp4 || outer == nullptr) return out;
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber(kOuter, *outer));
  out.scheme.outer = OuterKind::kOne;
  out.outer = {number};
  return out;
}

absl::StatusOr<HostWeight> DecodeStored(const Description& what, const TensorView& codes,
                                        const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale, NeedTensor(tensors, kScale, "scales"));
  const Kind kind = what.type->kind;
  for (const auto& [name, known] :
       {std::pair(kZero, kind == Kind::kInt8 || kind == Kind::kIntx || kind == Kind::kInt4),
        std::pair(kOuter, kind == Kind::kNvfp4),
        std::pair(absl::string_view("_weight_scale_and_zero"), false)}) {
    if (known || FindTensor(tensors, name) == nullptr) continue;
    return BadTensor(name, "it", absl::StrCat("none with ", what.type->name));
  }
  switch (kind) {
    case Kind::kInt8:
    case Kind::kIntx:
      return DecodeIntegers(what, codes, *scale, tensors);
    case Kind::kFloat8:
      return DecodeFloat8(what, codes, *scale, tensors);
    case Kind::kInt4:
      return DecodeInt4(codes, *scale, tensors);
    case Kind::kMx:
    case Kind::kNvfp4:
      break;
  }
  return DecodeMx(what, codes, *scale, tensors);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes, NeedTensor(tensors, kCodes, "codes"));
  AWQD_ASSIGN_OR_RETURN(const Description what, Describe(object, codes->metadata));
  for (const std::string& suffix : what.suffixes) {
    if (absl::c_linear_search(kWithoutEffect, suffix)) continue;
    AWQD_RETURN_IF_ERROR(NeedTensor(tensors, suffix, "it, as the metadata name it").status());
  }
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeStored(what, *codes, tensors));
  if (const TensorView* const factor = FindTensor(tensors, kFactor); factor != nullptr) {
    AWQD_ASSIGN_OR_RETURN(out.factor, ToFloats(kFactor, *factor));
    if (static_cast<int64_t>(out.factor.size()) != out.k) {
      return BadTensor(kFactor, absl::StrCat("shape ", ShapeText(factor->shape)),
                       absl::StrCat("[", out.k, "] (K)"));
    }
  }
  if (what.activations && what.type->kind == Kind::kInt8) {
    out.activations.how = ActivationQuantization::kPerToken;
  }
  if (what.activations && what.type->kind == Kind::kFloat8) {
    out.activations.how = ActivationQuantization::kFloat8PerToken;
  }
  return out;
}

}  // namespace

const Format kTorchAoFormat = {.name = "torchao",
                               .quant_method = "torchao",
                               .suffixes = kSuffixes,
                               .optional_suffixes = kOptional,
                               .common_suffixes = kCommon,
                               .suffixes_without_effect = kWithoutEffect,
                               .metadata = "weight",
                               .settings = kSettings,
                               .read = Read,
                               .decode_parts = Decode};

}  // namespace awqd
