// Format "pack-quantized" of compressed-tensors: integers of 1 to 8 bits in words along K.
//
//   weight_packed I32 [N, K*bits/32], codes q + 2^(bits-1)      W[k, n] = (q - z) * scale
//   weight_shape I64 [2]: N and K, or [3]: of all experts, N and K (I32 in a request)
//   weight_scale F16, BF16 or F32: [N, 1] per channel, [N, groups] per group, [1] per tensor
//   weight_zero_point, of asymmetric codes: I32 [N*bits/32, groups], z + 2^(bits-1), packed along
//       N as the codes are along K; or I8 of the shape of weight_scale, z
//   weight_g_idx I32 [K], of actorder "group": in-feature k has the scale of group weight_g_idx[k].
//       -1 throughout: it is not used
//   bias [N], optional
//   input_scale, input_zero_point: as in int-quantized, where activations are declared static
//   input_global_scale, output_scale, output_zero_point: without effect
//
// Settings: num_bits, strategy, group_size, symmetric; actorder "group", or "weight" for
// in-features in their order; packing "dense" or "padded" tells for the few K whose words look
// alike (packed_words.h).
#include <limits>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/compressed_tensors/common.h"
#include "kernels/formats/compressed_tensors/packed_words.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq/gptq.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {
    "weight_packed",      "weight_scale", "weight_shape",     "weight_zero_point",
    "weight_g_idx",       "bias",         "input_scale",      "input_zero_point",
    "input_global_scale", "output_scale", "output_zero_point"};
// Without weight_shape a linear is none that can be read, but its loss must not hide one.
constexpr absl::Span<const absl::string_view> kOptional = absl::MakeSpan(kSuffixes).subspan(2);
constexpr absl::string_view kUncut[] = {"weight_shape"};
constexpr absl::string_view kCodeTypes[] = {"I32"};
constexpr absl::string_view kSettings[] = {"activations", "actorder", "group_size", kHadamardSize,
                                           "num_bits",    "packing",  "strategy",   "symmetric"};
constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();  // an order is of int32

// --- Settings ---

struct Settings {
  int bits = 0;
  std::optional<ScaleStrategy> strategy;
  int64_t group_size = 0;  // -1: all of K; 0: not said
  std::optional<bool> symmetric;
  std::optional<bool> mixed;   // by actorder: whether in-features are in the order of their groups
  std::optional<bool> padded;  // by packing
  ActivationQuantization activations = ActivationQuantization::kNone;
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "num_bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(out.symmetric, ReadBool(object, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(out.strategy, ReadStrategy(object));
  AWQD_ASSIGN_OR_RETURN(out.mixed,
                        ReadChoice<bool>(object, "actorder", {{"group", true}, {"weight", false}}));
  AWQD_ASSIGN_OR_RETURN(out.padded,
                        ReadChoice<bool>(object, "packing", {{"padded", true}, {"dense", false}}));
  AWQD_ASSIGN_OR_RETURN(out.activations, ReadDeclaredActivations(object));
  if (!bits) return BadValue("num_bits", "nothing", "1 to 8");
  if (*bits > 8) return UnreadSetting("num_bits", absl::StrCat(*bits), "1 to 8");
  out.bits = static_cast<int>(*bits);
  if (out.strategy == ScaleStrategy::kGroup && out.group_size == 0) {
    return BadValue("group_size", "nothing", "at least 1 for strategy \"group\"");
  }
  return out;
}

// The setting of an "actorder" of config.json, which older files have as true and false.
absl::StatusOr<Setting> ReadOrder(const Setting& weights) {
  const Setting* const value = FindSetting(weights, "actorder");
  if (value == nullptr) return Setting::String("weight");
  if (value->kind == Setting::Kind::kLiteral) {
    AWQD_ASSIGN_OR_RETURN(const auto yes, ReadBool(weights, "actorder"));
    return Setting::String(yes.value_or(false) ? "group" : "weight");
  }
  AWQD_ASSIGN_OR_RETURN(const std::string word, ReadWord(weights, "actorder"));
  if (word == "group" || word == "dynamic") return Setting::String("group");
  if (word == "weight" || word == "static") return Setting::String("weight");
  return UnreadSetting("actorder", Quoted(word, 64), "null, \"group\", \"weight\" or \"static\"");
}

// The packing of the library of that version; empty where the settings name none.
absl::StatusOr<std::string> PackingOfVersion(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const std::string version, ReadWord(config, "version"));
  const std::vector<absl::string_view> parts = absl::StrSplit(version, '.');
  int64_t major = 0, minor = 0;
  if (parts.size() < 2 || !absl::SimpleAtoi(parts[0], &major) ||
      !absl::SimpleAtoi(parts[1], &minor)) {
    return std::string();
  }
  return std::string(major == 0 && minor < 18 ? "padded" : "dense");
}

// --- Tensors ---

// N and K, which the words are compared with.
absl::Status DecodeShape(const TensorView& shape, const TensorView& packed, HostWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_shape", shape, {"I64", "I32"}, 1));
  const int64_t count = shape.shape[0];
  if (count != 2 && count != 3) {
    return BadTensor("weight_shape", absl::StrCat("shape [", count, "]"),
                     "[2]: N and K, or [3]: of all experts, N and K");
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = LoadInteger(shape, i);
    if (number >= 1 && number <= kMostFeatures) continue;
    return BadTensor("weight_shape", absl::StrCat(number, " at element ", i),
                     "numbers from 1 to 2^31 - 1");
  }
  if (count == 3 && shape.experts > 0 && LoadInteger(shape, 0) != shape.experts) {
    return BadTensor("weight_shape", absl::StrCat(LoadInteger(shape, 0), " experts"),
                     absl::StrCat(shape.experts, ", as \"weight_packed\" has"));
  }
  out->n = LoadInteger(shape, count - 2);
  out->k = LoadInteger(shape, count - 1);
  if (out->n == packed.shape[0]) return absl::OkStatus();
  return BadTensor("weight_shape", absl::StrCat("N = ", out->n),
                   absl::StrCat(packed.shape[0], ", the rows of \"weight_packed\""));
}

ScaleStrategy StrategyOf(const Settings& settings, const TensorView& scale) {
  if (settings.strategy) return *settings.strategy;
  if (scale.shape.size() == 1) return ScaleStrategy::kTensor;
  return settings.group_size > 0 ? ScaleStrategy::kGroup : ScaleStrategy::kChannel;
}

// Stored one to a byte, as they are meant.
absl::StatusOr<std::vector<uint8_t>> DecodeBytes(int bits, const TensorView& zeros,
                                                 const TensorView& scale,
                                                 const HostWeight& weight) {
  if (zeros.shape != scale.shape) {
    return BadTensor("weight_zero_point", absl::StrCat("shape ", ShapeText(zeros.shape)),
                     absl::StrCat(ShapeText(scale.shape), ", as weight_scale"));
  }
  const int middle = 1 << (bits - 1);
  const int64_t columns = weight.shape().column_blocks(), groups = weight.groups();
  std::vector<uint8_t> out(zeros.bytes.size());
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    const int zero = static_cast<int8_t>(zeros.bytes[i]);
    if (zero < -middle || zero >= middle) {
      return BadTensor("weight_zero_point", absl::StrCat(zero, " at element ", i),
                       absl::StrCat(-middle, " to ", middle - 1, " for ", bits, " bits"));
    }
    out[i % groups * columns + i / groups] = static_cast<uint8_t>(zero + middle);
  }
  return out;
}

absl::Status DecodeZeros(const Settings& settings, const PackedWords& packed,
                         const TensorView* zeros, const TensorView& scale, HostWeight* out) {
  const int middle = 1 << (settings.bits - 1);
  if (zeros == nullptr) {
    if (settings.symmetric.value_or(true)) return absl::OkStatus();
    return BadTensor("weight_zero_point", "nothing",
                     "I32 [N*bits/32, groups], as symmetric is false");
  }
  if (zeros->dtype == "I32") {
    AWQD_RETURN_IF_ERROR(CheckShape("weight_zero_point", *zeros,
                                    {packed.Words(out->n), out->groups()}, "[N*bits/32, groups]"));
    if (out->scheme.block_cols == 0) {
      return BadTensor("weight_zero_point", "dtype I32", "I8 for strategy \"tensor\"");
    }
    out->zeros = UnpackColumnsOfWords(zeros->bytes, out->n, out->groups(), packed);
  } else {
    AWQD_ASSIGN_OR_RETURN(out->zeros, DecodeBytes(settings.bits, *zeros, scale, *out));
  }
  if (!settings.symmetric.value_or(false)) {
    out->scheme.zero_kind = ZeroKind::kStored;
    out->scheme.zero = 0;
    return absl::OkStatus();
  }
  const auto other = absl::c_find_if(out->zeros, [&](uint8_t zero) { return zero != middle; });
  if (other != out->zeros.end()) {
    return BadTensor("weight_zero_point", absl::StrCat("zero point ", *other - middle),
                     "0, as symmetric is true");
  }
  out->zeros.clear();
  return absl::OkStatus();
}

// HostWeight::order.
absl::StatusOr<std::vector<int32_t>> DecodeOrder(const Settings& settings,
                                                 const LinearTensors& tensors,
                                                 const HostWeight& weight) {
  const TensorView* g_idx = FindTensor(tensors, "weight_g_idx");
  if (g_idx != nullptr) {
    AWQD_RETURN_IF_ERROR(CheckTensor("weight_g_idx", *g_idx, {"I32"}, 1));
    AWQD_RETURN_IF_ERROR(CheckShape("weight_g_idx", *g_idx, {weight.k}, "K"));
    // As it was before anybody set it.
    if (absl::c_all_of(g_idx->bytes, [](uint8_t byte) { return byte == 0xff; })) {
      return std::vector<int32_t>();
    }
  }
  const GroupIndex index = {"weight_g_idx", "weight_scale", settings.mixed, "actorder is \"group\"",
                            "actorder is not \"group\""};
  AWQD_ASSIGN_OR_RETURN(
      const std::vector<int32_t> places,
      PlacesByGroup(index, g_idx, weight.k, weight.groups(), weight.group_rows()));
  return OrderOfPlaces(places);
}

absl::string_view Lacks(const Setting& object, HasTensor has) {
  if (!has("weight_shape")) return "weight_shape";
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  const bool asymmetric = settings.ok() && !settings->symmetric.value_or(true);
  return asymmetric && !has("weight_zero_point") ? "weight_zero_point" : "";
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* packed,
                        NeedTensor(tensors, "weight_packed", "I32 [N, K*bits/32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "weight_scale", "F16, BF16 or F32 [N, groups]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* shape,
                        NeedTensor(tensors, "weight_shape", "I64 [2]: N and K"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_packed", *packed, {"I32"}, 2));
  const TensorView* const zeros = FindTensor(tensors, "weight_zero_point");
  if (zeros != nullptr) {
    AWQD_RETURN_IF_ERROR(CheckTensor("weight_zero_point", *zeros, {"I32", "I8"},
                                     zeros->dtype == "I32" ? 2 : scale->shape.size()));
  }
  HostWeight out;
  AWQD_RETURN_IF_ERROR(DecodeShape(*shape, *packed, &out));
  AWQD_ASSIGN_OR_RETURN(
      const PackedWords words,
      FindPacking(settings.bits, settings.padded, *packed,
                  zeros != nullptr && zeros->dtype == "I32" ? zeros : nullptr, out));
  const int64_t row = packed->unread() ? -1 : RowWithMoreCodes(packed->bytes, out.n, out.k, words);
  if (row >= 0) {
    return BadTensor("weight_shape", absl::StrCat("K = ", out.k),
                     absl::StrCat("more: row ", row, " of \"weight_packed\" has bits behind"));
  }
  AWQD_RETURN_IF_ERROR(DecodeIntegerScales(StrategyOf(settings, *scale), settings.group_size,
                                           settings.bits, *scale, &out));
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, words, zeros, *scale, &out));
  AWQD_ASSIGN_OR_RETURN(out.order, DecodeOrder(settings, tensors, out));
  AWQD_ASSIGN_OR_RETURN(out.activations, DecodeActivations(settings.activations, tensors));
  if (packed->unread()) return out;
  out.codes = UnpackRowsOfWords(packed->bytes, out.n, out.k, words, out.order);
  return out;
}

}  // namespace

absl::StatusOr<Setting> ReadPackQuantizedWeights(const Setting& weights, const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckWeightType(weights, "int"));
  Setting out = OnlySettings(weights, kSettings);
  AWQD_ASSIGN_OR_RETURN(out.members["actorder"], ReadOrder(weights));
  AWQD_ASSIGN_OR_RETURN(const std::string packing, PackingOfVersion(config));
  if (!packing.empty()) out.members["packing"] = Setting::String(packing);
  // The defaults of the library.
  out.members.try_emplace("num_bits", Setting::Literal(int64_t{8}));
  out.members.try_emplace("symmetric", Setting::Literal(true));
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(out));
  if (!settings.strategy) {
    out.members["strategy"] = Setting::String(settings.group_size == 0  ? "tensor"
                                              : settings.group_size < 0 ? "channel"
                                                                        : "group");
  }
  return out;
}

const Format kPackQuantizedFormat = {.name = "pack-quantized",
                                     .quant_method = "compressed-tensors",
                                     .suffixes = kSuffixes,
                                     .optional_suffixes = kOptional,
                                     .lacks = Lacks,
                                     .code_dtypes = kCodeTypes,
                                     .uncut_suffixes = kUncut,
                                     .settings = kSettings,
                                     .read = ReadCompressedTensors<&kPackQuantizedFormat>,
                                     .decode_parts = Decode};

}  // namespace awqd
