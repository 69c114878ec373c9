// Format "bitsandbytes": its 4-bit codes into a table of 16, nf4 and fp4, load_in_4bit.
//
//   weight U8, N * K / 2 bytes, rounded up: the weight [N, K] in one run, the first code in the high
//       half
//   weight.quant_map F32 [16], the table
//   weight.absmax F32 [N * K / blocksize]            W[k, n] = table[code] * absmax of its block
//     or, quantised twice, U8, with weight.nested_quant_map F32 [256] and weight.nested_absmax F32,
//     one for each nested_blocksize: map[absmax] * nested_absmax + nested_offset
//   weight.quant_state.bitsandbytes__nf4 or __fp4 U8: JSON with blocksize, shape [N, K] and the
//   above bias [N], optional
//
// Blocks run over the weight as a whole. Where K is no multiple of blocksize they span columns:
// groups of gcd(K, blocksize) rows each lie in one block, whose scale they have. Which linears are
// quantised shows in the type of "weight".
//
// Format "bitsandbytes-int8": LLM.int8() of bitsandbytes, load_in_8bit.
//
//   weight I8 [N, K]
//   SCB F32 [N], the largest magnitudes of the rows        W[k, n] = weight[n, k] * (SCB[n] / 127)
//   weight_format U8 [], 0: rows as they are
//   bias [N], optional
//
// The type of "weight" shows which linears are quantised.
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kNf4 = "weight.quant_state.bitsandbytes__nf4";
constexpr absl::string_view kFp4 = "weight.quant_state.bitsandbytes__fp4";
constexpr absl::string_view kSuffixes[] = {"weight",
                                           "weight.absmax",
                                           "weight.quant_map",
                                           "weight.nested_absmax",
                                           "weight.nested_quant_map",
                                           kNf4,
                                           kFp4,
                                           "bias"};
constexpr absl::string_view kOptional[] = {"weight.nested_absmax", "weight.nested_quant_map", kNf4,
                                           kFp4, "bias"};
constexpr absl::string_view kCodeTypes[] = {"U8"};

constexpr size_t kMostJsonBytes = 4096;
constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();
constexpr int64_t kTable = 16, kNestedTable = 256;

// Reads settings that say `load` ("load_in_4bit").
absl::StatusOr<QuantConfig> ReadLoad(const Setting& config, absl::string_view load) {
  AWQD_ASSIGN_OR_RETURN(const auto said, ReadBool(config, load));
  if (said.value_or(false)) return OneRule(config, {}, {});
  return UnreadSetting(load, said ? "false" : "nothing", "true");
}

absl::StatusOr<QuantConfig> Read(const Setting& config) { return ReadLoad(config, "load_in_4bit"); }
absl::StatusOr<QuantConfig> ReadInt8(const Setting& config) {
  return ReadLoad(config, "load_in_8bit");
}

// --- The quantisation state ---

using Json = nlohmann::json;

struct State {
  int64_t n = 0;
  int64_t k = 0;
  int64_t block = 0;
  int64_t group = 0;  // rows of a column that are in one block
  int64_t nested_block = 0;
  float nested_offset = 0;
};

absl::StatusOr<int64_t> WholeNumber(absl::string_view tensor, const char* name, const Json& value) {
  if (value.is_number_unsigned() && value >= 1 && value <= kMostFeatures) {
    return value.get<int64_t>();
  }
  return BadTensor(tensor, absl::StrCat(name, " of ", value.type_name(), " or out of range"),
                   "a whole number from 1 to 2^31 - 1");
}

absl::StatusOr<Json> ParseState(absl::string_view name, const TensorView& tensor) {
  AWQD_RETURN_IF_ERROR(CheckTensor(name, tensor, {"U8"}, 1));
  if (tensor.bytes.size() > kMostJsonBytes) {
    return BadTensor(name, absl::StrCat(tensor.bytes.size(), " bytes"),
                     absl::StrCat("at most ", kMostJsonBytes));
  }
  Json out = Json::parse(tensor.bytes.begin(), tensor.bytes.end(), nullptr, false);
  if (!out.is_object()) return BadTensor(name, "other bytes", "a JSON object");
  return out;
}

// Null when there is no member of that name.
const Json& Member(const Json& object, const char* name) {
  static const Json& nothing = *new Json();
  const auto it = object.find(name);
  return it == object.end() ? nothing : *it;
}

absl::StatusOr<State> ReadState(const LinearTensors& tensors, bool nested) {
  const absl::string_view name = FindTensor(tensors, kFp4) == nullptr ? kNf4 : kFp4;
  if (name == kFp4 && FindTensor(tensors, kNf4) != nullptr) {
    return BadTensor(kFp4, "it beside that of nf4", "only one of the two");
  }
  AWQD_ASSIGN_OR_RETURN(const TensorView* tensor, NeedTensor(tensors, name, "U8, a JSON object"));
  AWQD_ASSIGN_OR_RETURN(const Json state, ParseState(name, *tensor));
  const Json& shape = Member(state, "shape");
  if (!shape.is_array() || shape.size() != 2) {
    return BadTensor(name, absl::StrCat("shape of ", shape.type_name()), "[N, K], two numbers");
  }
  State out;
  AWQD_ASSIGN_OR_RETURN(out.n, WholeNumber(name, "shape", shape[0]));
  AWQD_ASSIGN_OR_RETURN(out.k, WholeNumber(name, "shape", shape[1]));
  AWQD_ASSIGN_OR_RETURN(out.block, WholeNumber(name, "blocksize", Member(state, "blocksize")));
  out.group = std::gcd(out.k, out.block);
  if (!nested) return out;
  AWQD_ASSIGN_OR_RETURN(out.nested_block,
                        WholeNumber(name, "nested_blocksize", Member(state, "nested_blocksize")));
  const Json& offset = Member(state, "nested_offset");
  if (!offset.is_number() || !(std::abs(offset.get<double>()) <= 3e38)) {
    return BadTensor(name, absl::StrCat("nested_offset of ", offset.type_name()), "a number");
  }
  out.nested_offset = offset.get<float>();
  return out;
}

// --- Tensors ---

// `count` numbers of FP32.
absl::StatusOr<std::vector<float>> Numbers(const LinearTensors& tensors, absl::string_view name,
                                           int64_t count) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* tensor,
                        NeedTensor(tensors, name, absl::StrCat("F32 [", count, "]")));
  AWQD_RETURN_IF_ERROR(CheckTensor(name, *tensor, {"F32"}, 1));
  AWQD_RETURN_IF_ERROR(CheckShape(name, *tensor, {count}, "F32"));
  return ToFloats(name, *tensor);
}

// The scale of each block as FP32.
absl::StatusOr<std::vector<float>> DecodeScales(const State& state, const TensorView& absmax,
                                                const LinearTensors& tensors) {
  const int64_t count = CeilDiv(state.n * state.k, state.block);
  AWQD_RETURN_IF_ERROR(CheckShape("weight.absmax", absmax, {count}, "N * K / blocksize"));
  if (absmax.dtype == "F32") {
    AWQD_RETURN_IF_ERROR(CheckScales("weight.absmax", absmax, 1, true).status());
    std::vector<float> out(count);
    std::memcpy(out.data(), absmax.bytes.data(), absmax.bytes.size());
    return out;
  }
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> map,
                        Numbers(tensors, "weight.nested_quant_map", kNestedTable));
  AWQD_ASSIGN_OR_RETURN(
      const std::vector<float> largest,
      Numbers(tensors, "weight.nested_absmax", CeilDiv(count, state.nested_block)));
  std::vector<float> out(count);
  for (int64_t i = 0; i < count; ++i) {
    const float product = map[absmax.bytes[i]] * largest[i / state.nested_block];
    out[i] = product + state.nested_offset;
  }
  return out;
}

// The scales of the blocks as those of groups [N, K / group].
std::vector<uint8_t> ExpandToGroups(const State& state, const std::vector<float>& scales) {
  const int64_t groups = state.n * (state.k / state.group);
  std::vector<uint8_t> out(groups * sizeof(float));
  for (int64_t i = 0; i < groups; ++i) {
    std::memcpy(out.data() + i * sizeof(float), &scales[i * state.group / state.block],
                sizeof(float));
  }
  return out;
}

absl::StatusOr<HostWeight> Decode(const Setting& /*settings*/, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, "weight", "U8 [N * K / 2, 1]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* absmax,
                        NeedTensor(tensors, "weight.absmax", "F32 or U8"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"U8"}, weight->shape.size() == 1 ? 1 : 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight.absmax", *absmax, {"F32", "U8"}, 1));
  AWQD_ASSIGN_OR_RETURN(const State state, ReadState(tensors, absmax->dtype == "U8"));
  HostWeight out;
  out.n = state.n;
  out.k = state.k;
  const int64_t bytes = CeilDiv(state.n * state.k, 2);  // both are below 2^31
  if (static_cast<int64_t>(weight->bytes.size()) != bytes) {
    return BadTensor("weight", absl::StrCat(weight->bytes.size(), " bytes"),
                     absl::StrCat(bytes, " for shape [", state.n, ", ", state.k, "]"));
  }
  out.scheme = {.code = CodeKind::kTable,
                .block_rows = BlockRows(state.group, state.k),
                .zero_kind = ZeroKind::kConstant,
                .scale_dtype = DType::kFp32};
  AWQD_ASSIGN_OR_RETURN(out.table, Numbers(tensors, "weight.quant_map", kTable));
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> scales, DecodeScales(state, *absmax, tensors));
  out.scales = Transposed(ExpandToGroups(state, scales), out.n, out.groups(), sizeof(float));
  if (weight->unread()) return out;
  if (out.k % 2 == 0) {
    out.codes = TransposedNibbles(weight->bytes, out.n, out.k, FirstNibble::kHigh);
    return out;
  }
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    for (int64_t at = row * out.k + col; count > 0; --count, ++at) {
      *to++ = at % 2 == 0 ? weight->bytes[at / 2] >> 4 : weight->bytes[at / 2] & 15;
    }
  };
  out.codes = PackTransposed(out.n, out.k, 4, read);
  return out;
}

// --- bitsandbytes-int8 ---

constexpr absl::string_view kInt8Suffixes[] = {"weight", "SCB", "weight_format", "bias"};
constexpr absl::string_view kInt8Optional[] = {"weight_format", "bias"};
constexpr absl::string_view kInt8CodeTypes[] = {"I8"};

// Other kinds are orders of tiles of older GPUs.
absl::Status CheckWeightFormat(const LinearTensors& tensors) {
  const TensorView* const kind = FindTensor(tensors, "weight_format");
  if (kind == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_format", *kind, {"U8"}, 0));
  if (kind->bytes[0] == 0) return absl::OkStatus();
  return BadTensor("weight_format", absl::StrCat(kind->bytes[0]), "0 (rows)");
}

absl::StatusOr<HostWeight> DecodeInt8Rows(const Setting& /*settings*/,
                                          const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "I8 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* largest, NeedTensor(tensors, "SCB", "F32 [N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"I8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("SCB", *largest, {"F32"}, 1));
  AWQD_RETURN_IF_ERROR(CheckWeightFormat(tensors));
  HostWeight out;
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape("SCB", *largest, {out.n}, "N"));
  AWQD_RETURN_IF_ERROR(CheckScales("SCB", *largest, 1, true).status());
  out.scheme = Symmetric(8, 0, DType::kFp32);
  out.scales.resize(out.n * sizeof(float));
  for (int64_t n = 0; n < out.n; ++n) {
    const float scale = LoadElement(largest->bytes.data(), DType::kFp32, n) / 127.0f;
    std::memcpy(out.scales.data() + n * sizeof(float), &scale, sizeof(scale));
  }
  if (weight->unread()) return out;
  out.codes = Transposed(weight->bytes, out.n, out.k, 1);
  for (uint8_t& code : out.codes) code ^= 0x80;
  return out;
}

}  // namespace

const Format kBitsAndBytesFormat = {.name = "bitsandbytes",
                                    .quant_method = "bitsandbytes",
                                    .suffixes = kSuffixes,
                                    .optional_suffixes = kOptional,
                                    .code_dtypes = kCodeTypes,
                                    .read = Read,
                                    .decode_parts = Decode};

const Format kBitsAndBytesInt8Format = {.name = "bitsandbytes-int8",
                                        .quant_method = "bitsandbytes",
                                        .suffixes = kInt8Suffixes,
                                        .optional_suffixes = kInt8Optional,
                                        .code_dtypes = kInt8CodeTypes,
                                        .read = ReadInt8,
                                        .decode_parts = DecodeInt8Rows};

}  // namespace awqd
