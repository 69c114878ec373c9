// Each parameter is one line of a table: its name, which kinds of models have it, and where it
// goes.
#include "server/wire/oip/parameters.h"

#include <iterator>
#include <limits>
#include <optional>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::wire::oip {
namespace {

using inference::InferParameter;

constexpr char kRegion[] = "shared_memory_region";
constexpr char kOffset[] = "shared_memory_offset";
constexpr char kSize[] = "shared_memory_byte_size";
// Parameters of the protocol over HTTP, which place raw bytes there. Clients that speak both set
// them here too, where they mean nothing.
constexpr absl::string_view kOverHttp[] = {"binary_data_size", "binary_data"};

std::string FieldText(absl::string_view field, absl::string_view name) {
  return absl::StrCat(field, "[", obs::LogText(name, 64), "]");
}

std::string TextOf(const InferParameter& value) {
  switch (value.parameter_choice_case()) {
    case InferParameter::kBoolParam:
      return value.bool_param() ? "true" : "false";
    case InferParameter::kInt64Param:
      return absl::StrCat(value.int64_param());
    case InferParameter::kUint64Param:
      return absl::StrCat(value.uint64_param());
    case InferParameter::kDoubleParam:
      return absl::StrCat(value.double_param());
    case InferParameter::kStringParam:
      return absl::StrCat("\"", obs::LogText(value.string_param(), 64), "\"");
    case InferParameter::PARAMETER_CHOICE_NOT_SET:
      break;
  }
  return "nothing";
}

// From 0 to `max`; none for another number or type.
std::optional<int64_t> IntOf(const InferParameter& value,
                             int64_t max = std::numeric_limits<int64_t>::max()) {
  std::optional<int64_t> number;
  if (value.has_int64_param()) number = value.int64_param();
  if (value.has_uint64_param() &&
      value.uint64_param() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    number = static_cast<int64_t>(value.uint64_param());
  }
  return number && *number >= 0 && *number <= max ? number : std::nullopt;
}
constexpr absl::string_view kAnInteger = "an integer of at least 0";
constexpr absl::string_view kANumber = "a number";

// Reads one value. False where it is none that the parameter may have.
using Reader = bool (*)(const InferParameter& value, Parameters* out);

// An enum by the name of its value.
template <auto kField, auto kParse>
bool ReadEnum(const InferParameter& value, Parameters* out) {
  return value.has_string_param() && kParse(value.string_param(), &(out->*kField));
}

bool ReadPriority(const InferParameter& value, Parameters* out) {
  const std::optional<int64_t> level = IntOf(value, kPriorityLevels);
  if (level && *level > 0) out->priority = static_cast<int32_t>(kDefaultPriority - *level);
  return level.has_value();
}

bool ReadTimeout(const InferParameter& value, Parameters* out) {
  const std::optional<int64_t> us = IntOf(value);
  if (us && *us > 0) out->timeout = absl::Microseconds(*us);  // 0 is the protocol's word for none
  return us.has_value();
}

template <bool Parameters::*kFlag>
bool ReadFlag(const InferParameter& value, Parameters* out) {
  out->*kFlag = value.bool_param();
  return value.has_bool_param();
}

template <v1::Range Parameters::*kRange, void (v1::Range::*kSet)(int64_t)>
bool ReadBound(const InferParameter& value, Parameters* out) {
  const std::optional<int64_t> bound = IntOf(value);
  if (bound) (out->*kRange.*kSet)(*bound);
  return bound.has_value();
}

std::optional<float> NumberOf(const InferParameter& value) {
  if (value.has_double_param()) return static_cast<float>(value.double_param());
  if (value.has_int64_param()) return static_cast<float>(value.int64_param());
  return std::nullopt;
}

template <void (v1::ActivationParameters::*kSet)(float)>
bool ReadActivation(const InferParameter& value, Parameters* out) {
  const std::optional<float> number = NumberOf(value);
  if (number) (out->activation.*kSet)(*number);
  return number.has_value();
}

v1::Router& RouterOf(Parameters* out) { return out->router ? *out->router : out->router.emplace(); }

template <void (v1::Router::*kSet)(int32_t)>
bool ReadCount(const InferParameter& value, Parameters* out) {
  const std::optional<int64_t> number = IntOf(value, std::numeric_limits<int32_t>::max());
  if (number) (RouterOf(out).*kSet)(static_cast<int32_t>(*number));
  return number.has_value();
}

bool ReadScoring(const InferParameter& value, Parameters* out) {
  v1::RouterScoring scoring;
  if (!value.has_string_param() || !v1::RouterScoring_Parse(value.string_param(), &scoring)) {
    return false;
  }
  RouterOf(out).set_scoring(scoring);
  return true;
}

bool ReadNormalization(const InferParameter& value, Parameters* out) {
  if (value.has_bool_param()) RouterOf(out).set_norm_topk_prob(value.bool_param());
  return value.has_bool_param();
}

bool ReadScalingFactor(const InferParameter& value, Parameters* out) {
  const std::optional<float> number = NumberOf(value);
  if (number) RouterOf(out).set_routed_scaling_factor(*number);
  return number.has_value();
}

bool ReadSharedExpert(const InferParameter& value, Parameters* out) {
  out->shared_expert = value.string_param();
  return value.has_string_param() && !out->shared_expert.empty();
}

constexpr unsigned KindBit(Kind kind) { return 1u << static_cast<int>(kind); }
constexpr unsigned kProducts =
    KindBit(Kind::kProduct) | KindBit(Kind::kStack) | KindBit(Kind::kMlp);
constexpr unsigned kAll = kProducts | KindBit(Kind::kDequantize);

constexpr unsigned kMlp = KindBit(Kind::kMlp);
constexpr unsigned kExperts = KindBit(Kind::kStack) | kMlp;
constexpr unsigned kBlock = KindBit(Kind::kDequantize);

struct ParameterRow {
  absl::string_view name;
  unsigned kinds;
  Reader read;
  absl::string_view expected;  // for the error
};

constexpr ParameterRow kParameters[] = {
    {"priority", kProducts, ReadPriority, "an integer from 0 to 9"},
    {"timeout", kAll, ReadTimeout, kAnInteger},
    {"output_dtype", kAll, ReadEnum<&Parameters::output_dtype, v1::DType_Parse>,
     "\"FP16\", \"BF16\" or \"FP32\""},
    {"path", kProducts, ReadEnum<&Parameters::path, v1::Path_Parse>,
     "\"AUTO\", \"FUSED\" or \"DEQUANTIZE\""},
    {"activation_function", kProducts,
     ReadEnum<&Parameters::activation_function, v1::ActivationFunction_Parse>,
     "\"NONE\", \"RELU\", \"GELU\", \"SILU\", \"GELU_TANH\", \"SWIGLU_OAI\" or \"SITU\""},
    {"activation_limit", kMlp, ReadActivation<&v1::ActivationParameters::set_limit>, kANumber},
    {"activation_alpha", kMlp, ReadActivation<&v1::ActivationParameters::set_alpha>, kANumber},
    {"activation_beta", kMlp, ReadActivation<&v1::ActivationParameters::set_beta>, kANumber},
    {"activation_linear_beta", kMlp, ReadActivation<&v1::ActivationParameters::set_linear_beta>,
     kANumber},
    {"top_k", kExperts, ReadCount<&v1::Router::set_top_k>, kAnInteger},
    {"scoring", kExperts, ReadScoring, "\"SOFTMAX\", \"SIGMOID\" or \"SQRTSOFTPLUS\""},
    {"n_group", kExperts, ReadCount<&v1::Router::set_n_group>, kAnInteger},
    {"topk_group", kExperts, ReadCount<&v1::Router::set_topk_group>, kAnInteger},
    {"norm_topk_prob", kExperts, ReadNormalization, "true or false"},
    {"routed_scaling_factor", kExperts, ReadScalingFactor, kANumber},
    {"shared_expert", kMlp, ReadSharedExpert, "the path of a gated MLP"},
    {"activation_quantization", kProducts,
     ReadEnum<&Parameters::activation_quantization, v1::ActivationQuantization_Parse>,
     "\"ACTIVATIONS_AS_SENT\", \"INT8_PER_TOKEN\", \"INT8_STATIC\", \"INT8_AS_DECLARED\", "
     "\"ACTIVATIONS_FLOATING\", \"FP8_PER_TOKEN\", \"FP8_PER_BLOCK_128\", \"FP8_STATIC\" or "
     "\"FP8_AS_DECLARED\""},
    {"row_begin", kBlock, ReadBound<&Parameters::rows, &v1::Range::set_begin>, kAnInteger},
    {"row_end", kBlock, ReadBound<&Parameters::rows, &v1::Range::set_end>, kAnInteger},
    {"column_begin", kBlock, ReadBound<&Parameters::columns, &v1::Range::set_begin>, kAnInteger},
    {"column_end", kBlock, ReadBound<&Parameters::columns, &v1::Range::set_end>, kAnInteger},
    {"execution", kAll, ReadFlag<&Parameters::execution>, "true or false"},
    // Set by tritonclient and perf_analyzer for servers that may answer a request several times.
    {"triton_enable_empty_final_response", kAll, ReadFlag<&Parameters::final_response>,
     "true or false"},
};
static_assert(kPriorityLevels == 9, "the text of `priority` says so");

std::vector<absl::string_view> KnownOf(Kind kind) {
  std::vector<absl::string_view> known;
  for (const ParameterRow& line : kParameters) {
    if ((line.kinds & KindBit(kind)) != 0) known.push_back(line.name);
  }
  return known;
}

absl::Status Unknown(absl::string_view field, const InferParameter& value,
                     absl::Span<const absl::string_view> known) {
  return FieldError(field, TextOf(value),
                    absl::StrCat("none: the parameters here are ", absl::StrJoin(known, ", ")));
}

}  // namespace

absl::Status ReadParameters(const ParameterMap& map, Kind kind, Parameters* out) {
  for (const auto& [name, value] : map) {
    const std::string field = FieldText("parameters", name);
    const auto* const line =
        absl::c_find_if(kParameters, [&, &name = name](const ParameterRow& candidate) {
          return candidate.name == name && (candidate.kinds & KindBit(kind)) != 0;
        });
    if (line == std::end(kParameters)) return Unknown(field, value, KnownOf(kind));
    if (!line->read(value, out)) return FieldError(field, TextOf(value), line->expected);
  }
  return absl::OkStatus();
}

absl::Status ReadRegionRange(const ParameterMap& map, absl::string_view field,
                             v1::SharedMemory* out) {
  if (map.empty()) return absl::OkStatus();
  constexpr absl::string_view kKnown[] = {kRegion, kOffset, kSize};
  const std::string parameters = absl::StrCat(field, ".parameters");
  std::optional<int64_t> size;
  bool placed = false;
  for (const auto& [name, value] : map) {
    if (absl::c_linear_search(kOverHttp, name)) continue;
    placed = true;
    const std::string at = FieldText(parameters, name);
    if (name == kRegion) {
      if (!value.has_string_param() || value.string_param().empty()) {
        return FieldError(at, TextOf(value), "the name of a region");
      }
      out->set_region(value.string_param());
    } else if (name == kOffset || name == kSize) {
      const std::optional<int64_t> number = IntOf(value);
      if (!number) return FieldError(at, TextOf(value), kAnInteger);
      if (name == kOffset) out->set_offset(*number);
      if (name == kSize) size = number;
    } else {
      return Unknown(at, value, kKnown);
    }
  }
  if (placed && (out->region().empty() || !size)) {
    return FieldError(FieldText(parameters, out->region().empty() ? kRegion : kSize), "nothing",
                      absl::StrCat(kRegion, " and ", kSize, " together"));
  }
  out->set_size(size.value_or(0));
  return absl::OkStatus();
}

void FillRegionRange(const v1::SharedMemory& range, ParameterMap* out) {
  (*out)[kRegion].set_string_param(range.region());
  (*out)[kSize].set_int64_param(range.size());
  if (range.offset() != 0) (*out)[kOffset].set_int64_param(range.offset());
}

}  // namespace awqd::wire::oip
