// Each parameter is one line of a table: its name, which kinds of models have it, and where it
// goes.
#include "server/wire/oip/parameters.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
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

absl::StatusOr<int64_t> IntOf(const InferParameter& value, absl::string_view field, int64_t min,
                              int64_t max) {
  std::optional<int64_t> number;
  if (value.has_int64_param()) number = value.int64_param();
  if (value.has_uint64_param() &&
      value.uint64_param() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    number = static_cast<int64_t>(value.uint64_param());
  }
  if (number && *number >= min && *number <= max) return *number;
  return FieldError(field, TextOf(value),
                    max == std::numeric_limits<int64_t>::max()
                        ? absl::StrCat("an integer of at least ", min)
                        : absl::StrCat("an integer from ", min, " to ", max));
}

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// Reads one value.
using Reader = absl::Status (*)(const InferParameter& value, absl::string_view field,
                                Parameters* out);

// An enum by the name of its value; `values`: for the error.
template <typename Enum, typename Parse>
absl::Status ReadEnum(const InferParameter& value, absl::string_view field, Parse parse,
                      absl::string_view values, Enum* out) {
  if (value.has_string_param() && parse(value.string_param(), out)) return absl::OkStatus();
  return FieldError(field, TextOf(value), values);
}

absl::Status ReadPriority(const InferParameter& value, absl::string_view field, Parameters* out) {
  AWQD_ASSIGN_OR_RETURN(const int64_t level, IntOf(value, field, 0, kPriorityLevels));
  out->priority = level == 0 ? 0 : static_cast<int32_t>(kDefaultPriority - level);
  return absl::OkStatus();
}

absl::Status ReadTimeout(const InferParameter& value, absl::string_view field, Parameters* out) {
  AWQD_ASSIGN_OR_RETURN(const int64_t us, IntOf(value, field, 0, kAny));
  if (us > 0) out->timeout = absl::Microseconds(us);  // 0 is the protocol's word for none
  return absl::OkStatus();
}

absl::Status ReadOutput(const InferParameter& value, absl::string_view field, Parameters* out) {
  return ReadEnum(value, field, v1::DType_Parse, "\"FP16\", \"BF16\" or \"FP32\"",
                  &out->output_dtype);
}

absl::Status ReadPath(const InferParameter& value, absl::string_view field, Parameters* out) {
  return ReadEnum(value, field, v1::Path_Parse, "\"AUTO\", \"FUSED\" or \"DEQUANTIZE\"",
                  &out->path);
}

absl::Status ReadFunction(const InferParameter& value, absl::string_view field, Parameters* out) {
  return ReadEnum(value, field, v1::ActivationFunction_Parse,
                  "\"NONE\", \"RELU\", \"GELU\" or \"SILU\"", &out->activation_function);
}

absl::Status ReadQuantization(const InferParameter& value, absl::string_view field,
                              Parameters* out) {
  return ReadEnum(
      value, field, v1::ActivationQuantization_Parse,
      "\"ACTIVATIONS_AS_SENT\", \"INT8_PER_TOKEN\", \"INT8_STATIC\", \"INT8_AS_DECLARED\" or "
      "\"ACTIVATIONS_FLOATING\"",
      &out->activation_quantization);
}

template <bool Parameters::*kFlag>
absl::Status ReadFlag(const InferParameter& value, absl::string_view field, Parameters* out) {
  if (!value.has_bool_param()) return FieldError(field, TextOf(value), "true or false");
  out->*kFlag = value.bool_param();
  return absl::OkStatus();
}

template <v1::Range Parameters::*kRange, bool kEnd>
absl::Status ReadBound(const InferParameter& value, absl::string_view field, Parameters* out) {
  AWQD_ASSIGN_OR_RETURN(const int64_t bound, IntOf(value, field, 0, kAny));
  kEnd ? (out->*kRange).set_end(bound) : (out->*kRange).set_begin(bound);
  return absl::OkStatus();
}

constexpr unsigned KindBit(Kind kind) { return 1u << static_cast<int>(kind); }
constexpr unsigned kProducts =
    KindBit(Kind::kProduct) | KindBit(Kind::kStack) | KindBit(Kind::kMlp);
constexpr unsigned kAll = kProducts | KindBit(Kind::kDequantize);

struct ParameterRow {
  absl::string_view name;
  unsigned kinds;
  Reader read;
};

constexpr ParameterRow kParameters[] = {
    {"priority", kProducts, ReadPriority},
    {"timeout", kAll, ReadTimeout},
    {"output_dtype", kAll, ReadOutput},
    {"path", kProducts, ReadPath},
    {"activation_function", kProducts, ReadFunction},
    {"activation_quantization", KindBit(Kind::kProduct), ReadQuantization},
    {"row_begin", KindBit(Kind::kDequantize), ReadBound<&Parameters::rows, false>},
    {"row_end", KindBit(Kind::kDequantize), ReadBound<&Parameters::rows, true>},
    {"column_begin", KindBit(Kind::kDequantize), ReadBound<&Parameters::columns, false>},
    {"column_end", KindBit(Kind::kDequantize), ReadBound<&Parameters::columns, true>},
    {"execution", kAll, ReadFlag<&Parameters::execution>},
    // Set by tritonclient and perf_analyzer for servers that may answer a request several times.
    {"triton_enable_empty_final_response", kAll, ReadFlag<&Parameters::final_response>},
};

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
        std::find_if(std::begin(kParameters), std::end(kParameters),
                     [&, &name = name](const ParameterRow& candidate) {
                       return candidate.name == name && (candidate.kinds & KindBit(kind)) != 0;
                     });
    if (line == std::end(kParameters)) return Unknown(field, value, KnownOf(kind));
    AWQD_RETURN_IF_ERROR(line->read(value, field, out));
  }
  return absl::OkStatus();
}

absl::Status ReadRegionRange(const ParameterMap& map, absl::string_view field, RegionRange* out) {
  if (map.empty()) return absl::OkStatus();
  constexpr absl::string_view kKnown[] = {kRegion, kOffset, kSize};
  const std::string parameters = absl::StrCat(field, ".parameters");
  bool sized = false, placed = false;
  for (const auto& [name, value] : map) {
    if (std::find(std::begin(kOverHttp), std::end(kOverHttp), name) != std::end(kOverHttp)) {
      continue;
    }
    placed = true;
    const std::string at = FieldText(parameters, name);
    if (name == kRegion) {
      if (!value.has_string_param() || value.string_param().empty()) {
        return FieldError(at, TextOf(value), "the name of a region");
      }
      out->region = value.string_param();
    } else if (name == kOffset) {
      AWQD_ASSIGN_OR_RETURN(out->offset, IntOf(value, at, 0, kAny));
    } else if (name == kSize) {
      AWQD_ASSIGN_OR_RETURN(out->size, IntOf(value, at, 0, kAny));
      sized = true;
    } else {
      return Unknown(at, value, kKnown);
    }
  }
  if (placed && (out->region.empty() || !sized)) {
    return FieldError(FieldText(parameters, out->region.empty() ? kRegion : kSize), "nothing",
                      absl::StrCat(kRegion, " and ", kSize, " together"));
  }
  return absl::OkStatus();
}

void FillRegionRange(const RegionRange& range, ParameterMap* out) {
  (*out)[kRegion].set_string_param(range.region);
  (*out)[kSize].set_int64_param(range.size);
  if (range.offset != 0) (*out)[kOffset].set_int64_param(range.offset);
}

}  // namespace awqd::wire::oip
