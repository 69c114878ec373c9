// Format "bitsandbytes": its 4-bit codes into a table of 16, nf4 and fp4, load_in_4bit.
//
//   weight U8, N * K / 2 bytes: the weight [N, K] in one run, the first code in the high half
//   weight.quant_map F32 [16], the table
//   weight.absmax F32 [N * K / blocksize]            W[k, n] = table[code] * absmax of its block
//     or, quantised twice, U8, with weight.nested_quant_map F32 [256] and weight.nested_absmax F32,
//     one for each nested_blocksize: map[absmax] * nested_absmax + nested_offset
//   weight.quant_state.bitsandbytes__nf4 or __fp4 U8: JSON with blocksize, shape [N, K] and the
//   above bias [N], optional
//
// Blocks run over the weight as a whole: where K is a multiple of blocksize, each is a part of one
// column. Which linears are quantised shows in the type of "weight".
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

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

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const auto four, ReadBool(config, "load_in_4bit"));
  if (!four.value_or(false)) {
    return UnreadSetting("load_in_4bit", four ? "false" : "nothing", "true");
  }
  QuantConfig out;
  out.rules = {{.targets = {{}}, .settings = {}}};
  return out;
}

// --- The quantisation state ---

using Json = nlohmann::json;

struct State {
  int64_t n = 0;
  int64_t k = 0;
  int64_t block = 0;
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
  if (out.k % out.block != 0 || out.k % 2 != 0) {
    return BadTensor(name, absl::StrCat("K = ", out.k, " in blocks of ", out.block),
                     "an even K that is a multiple of blocksize: another block spans columns");
  }
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

// The scales [N, groups] as FP32.
absl::StatusOr<std::vector<uint8_t>> DecodeScales(const State& state, const TensorView& absmax,
                                                  const LinearTensors& tensors) {
  const int64_t count = state.n * (state.k / state.block);
  AWQD_RETURN_IF_ERROR(CheckShape("weight.absmax", absmax, {count}, "N * K / blocksize"));
  if (absmax.dtype == "F32") {
    AWQD_RETURN_IF_ERROR(CheckScales("weight.absmax", absmax, 1, true).status());
    return std::vector<uint8_t>(absmax.bytes.begin(), absmax.bytes.end());
  }
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> map,
                        Numbers(tensors, "weight.nested_quant_map", kNestedTable));
  AWQD_ASSIGN_OR_RETURN(
      const std::vector<float> largest,
      Numbers(tensors, "weight.nested_absmax", CeilDiv(count, state.nested_block)));
  std::vector<uint8_t> out(count * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    const float product = map[absmax.bytes[i]] * largest[i / state.nested_block];
    const float scale = product + state.nested_offset;
    std::memcpy(out.data() + i * sizeof(float), &scale, sizeof(scale));
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
  out.format = std::string(kBitsAndBytesFormat.name);
  out.n = state.n;
  out.k = state.k;
  const int64_t bytes = state.n * state.k / 2;  // both are below 2^31
  if (static_cast<int64_t>(weight->bytes.size()) != bytes) {
    return BadTensor("weight", absl::StrCat(weight->bytes.size(), " bytes"),
                     absl::StrCat(bytes, " for shape [", state.n, ", ", state.k, "]"));
  }
  out.scheme = {.code = CodeKind::kTable,
                .block_rows = BlockRows(state.block, state.k),
                .zero_kind = ZeroKind::kConstant,
                .scale_dtype = DType::kFp32};
  AWQD_ASSIGN_OR_RETURN(out.table, Numbers(tensors, "weight.quant_map", kTable));
  AWQD_ASSIGN_OR_RETURN(const std::vector<uint8_t> scales, DecodeScales(state, *absmax, tensors));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.scales = Transposed(scales, out.n, out.groups(), sizeof(float));
  if (weight->unread()) return out;
  out.codes = TransposedNibbles(weight->bytes, out.n, out.k, FirstNibble::kHigh);
  return out;
}

}  // namespace

const Format kBitsAndBytesFormat = {.name = "bitsandbytes",
                                    .quant_method = "bitsandbytes",
                                    .suffixes = kSuffixes,
                                    .optional_suffixes = kOptional,
                                    .code_dtypes = kCodeTypes,
                                    .read = Read,
                                    .decode = Decode};

}  // namespace awqd
