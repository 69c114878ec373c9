// Settings under every name that AutoAWQ, llm-awq and GPTQModel have for them, and shared checks.
// Facts: AutoAWQ 0.2.9, models/_config.py and modules/linear; GPTQModel 7.7.0,
// quantization/config.py.
#include "kernels/formats/awq_linear.h"

#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

// GPTQModel writes the version as "format", or "checkpoint_format". llm-awq's is told by the
// backend, whatever the version says.
absl::StatusOr<std::string> ReadVersion(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string backend, ReadWord(object, "backend"));
  if (backend == "llm-awq") return backend;
  std::string out, name_of_out;
  for (absl::string_view name : {"version", "format", "checkpoint_format"}) {
    AWQD_ASSIGN_OR_RETURN(const std::string version, ReadWord(object, name));
    if (version.empty()) continue;
    if (!out.empty() && version != out) {
      return BadValue(name, Quoted(version, 64), absl::StrCat(name_of_out, "'s ", Quoted(out, 64)));
    }
    out = version;
    name_of_out = std::string(name);
  }
  return out;
}

absl::Status CheckVersion(absl::string_view got, const AwqVersion& version) {
  if (absl::c_linear_search(version.names, got)) return absl::OkStatus();
  std::vector<std::string> expected;
  for (absl::string_view name : version.names) {
    if (!name.empty()) expected.push_back(Quoted(name, 64));
  }
  return UnreadSetting("version", got.empty() ? "nothing" : Quoted(got, 64),
                       absl::StrJoin(expected, " or "));
}

absl::Status CheckBits(int64_t bits, const AwqVersion& version) {
  if (bits >= version.min_bits && bits <= version.max_bits) return absl::OkStatus();
  return UnreadSetting("bits", absl::StrCat(bits),
                       version.min_bits == version.max_bits
                           ? absl::StrCat(version.min_bits)
                           : absl::StrCat(version.min_bits, " to ", version.max_bits));
}

bool IsZero(const uint8_t* half) { return half[0] == 0 && (half[1] & 0x7f) == 0; }

}  // namespace

absl::StatusOr<AwqLinear> ReadAwqLinear(const Setting& object, const AwqVersion& version) {
  AwqLinear out;
  AWQD_ASSIGN_OR_RETURN(const std::string said, ReadVersion(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32, "w_bit"));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object, "q_group_size"));
  AWQD_ASSIGN_OR_RETURN(out.zero_point, ReadBool(object, "zero_point"));
  // A request need not say it: it names the format.
  if (!said.empty()) AWQD_RETURN_IF_ERROR(CheckVersion(said, version));
  if (bits) {
    AWQD_RETURN_IF_ERROR(CheckBits(*bits, version));
    out.bits = static_cast<int>(*bits);
  }
  return out;
}

absl::StatusOr<QuantConfig> ReadAwqConfig(const Setting& config, const AwqVersion& version) {
  AWQD_ASSIGN_OR_RETURN(const AwqLinear settings, ReadAwqLinear(config, version));
  AWQD_ASSIGN_OR_RETURN(const std::string said, ReadVersion(config));
  AWQD_RETURN_IF_ERROR(CheckVersion(said, version));
  if (FindSetting(config, "bits") == nullptr && FindSetting(config, "w_bit") == nullptr) {
    return BadValue("bits (or w_bit)", "nothing", "a number");
  }
  if (settings.group_size == 0) {
    return BadValue("group_size (or q_group_size)", "nothing", "-1 (all of K) or at least 1");
  }
  Setting rule;
  rule.members = {{"bits", Setting::Literal(int64_t{settings.bits})},
                  {"group_size", Setting::Literal(settings.group_size)}};
  if (settings.zero_point) rule.members["zero_point"] = Setting::Literal(*settings.zero_point);
  return OneRule(config, std::move(rule));
}

absl::Status SetAwqZeros(const AwqLinear& settings, absl::string_view name,
                         std::vector<uint8_t> zeros, HostWeight* out) {
  out->zeros = std::move(zeros);
  if (settings.zero_point.value_or(true)) return absl::OkStatus();
  const auto other =
      absl::c_find_if(out->zeros, [&](uint8_t zero) { return zero != settings.middle(); });
  if (other != out->zeros.end()) {
    const int64_t at = other - out->zeros.begin();
    return BadTensor(
        name, absl::StrCat("zero point ", *other, " at [", at / out->n, ", ", at % out->n, "]"),
        absl::StrCat(settings.middle(), ", as zero_point is false"));
  }
  return SetAwqZerosWithout(settings, name, "", out);
}

absl::Status SetAwqZerosWithout(const AwqLinear& settings, absl::string_view name,
                                absl::string_view expected, HostWeight* out) {
  if (settings.zero_point.value_or(true)) return BadTensor(name, "nothing", expected);
  out->zeros.clear();
  const QuantizationScheme& d = out->scheme;
  out->scheme = Symmetric(settings.bits, d.block_rows, *d.scale_dtype);
  return absl::OkStatus();
}

absl::string_view AwqLacks(const Setting& settings, HasTensor has) {
  const absl::StatusOr<std::optional<bool>> zero_point = ReadBool(settings, "zero_point");
  const bool needed = zero_point.ok() && zero_point->value_or(true);
  return needed && !has("qzeros") ? "qzeros" : "";
}

absl::StatusOr<PaddedGroups> PadAwqGroups(const AwqLinear& settings, int64_t k) {
  constexpr int64_t kInWord = 8;
  PaddedGroups out = {.rows = settings.group_size == -1 ? k : settings.group_size};
  if (out.rows == 0) {
    return BadValue("group_size", "nothing",
                    "-1 (all of K) or at least 16: the padded scales do not tell it");
  }
  if (out.rows > k || k % out.rows != 0) {
    return BadValue("group_size", out.rows, absl::StrCat("-1 or a divisor of K = ", k));
  }
  if (out.rows < 128 && out.rows != k && out.rows != 64 && out.rows != 32 && out.rows != 16) {
    return BadValue("group_size", out.rows, "-1, 16, 32, 64, or 128 and above");
  }
  out.groups = k / out.rows;
  const int64_t words = CeilDiv(out.groups, kInWord);
  const int64_t multiple = out.rows >= 128 ? 1 : out.rows >= 64 ? 2 : out.rows >= 32 ? 4 : 8;
  out.padded = RoundUp(words, multiple) * kInWord;
  return out;
}

absl::StatusOr<std::vector<uint8_t>> UnpadGroups(const PaddedGroups& of, int64_t n,
                                                 absl::Span<const uint8_t> scales) {
  for (int64_t group = 0; group < of.padded; ++group) {
    int64_t zeros = 0;
    while (zeros < n && IsZero(scales.data() + 2 * (group * n + zeros))) ++zeros;
    if (group < of.groups && zeros == n) {
      return BadTensor("scales", absl::StrCat("0 in every column of group ", group),
                       absl::StrCat("scales of ", of.groups, " groups of ", of.rows));
    }
    if (group >= of.groups && zeros < n) {
      return BadTensor("scales", absl::StrCat("a scale in group ", group, " of column ", zeros),
                       absl::StrCat("0: there are ", of.groups, " groups of ", of.rows));
    }
  }
  return std::vector<uint8_t>(scales.begin(), scales.begin() + 2 * of.groups * n);
}

}  // namespace awqd
