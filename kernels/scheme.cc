// Validation, printing and parsing of QuantScheme.
#include "kernels/scheme.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd {
namespace {

absl::Status Bad(absl::string_view member, int64_t got, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(member, ": got ", got, ", expected ", expected));
}

// Takes leading decimal digits off `text`.
bool ConsumeNumber(absl::string_view* text, int64_t* value) {
  size_t digits = 0;
  while (digits < text->size() && absl::ascii_isdigit((*text)[digits])) ++digits;
  if (digits == 0 || !absl::SimpleAtoi(text->substr(0, digits), value)) return false;
  text->remove_prefix(digits);
  return true;
}

}  // namespace

absl::Status Validate(const QuantScheme& scheme, int64_t k, int64_t n) {
  if (scheme.bits < 1 || scheme.bits > 8) return Bad("bits", scheme.bits, "1 to 8");
  if (k < 1) return Bad("K (in features)", k, "at least 1");
  if (n < 8 || n % 8 != 0) return Bad("N (out features)", n, "a positive multiple of 8");
  if (scheme.group_size < 1 || scheme.group_size > k || k % scheme.group_size != 0) {
    return Bad("group_size", scheme.group_size, absl::StrCat("a divisor of K = ", k));
  }
  if (!IsFloating(scheme.scale_dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("scale dtype: got ", Name(scheme.scale_dtype),
                                                   ", expected FP16, BF16 or FP32"));
  }
  return absl::OkStatus();
}

std::string ToString(const QuantScheme& scheme) {
  std::string out =
      absl::StrCat("a", scheme.activation == Activation::kA16 ? 16 : 8, "w", scheme.bits, "g",
                   scheme.group_size, scheme.zero_kind == ZeroKind::kInteger ? "z" : "s");
  if (scheme.scale_dtype == DType::kBf16) out += 'b';
  if (scheme.scale_dtype == DType::kFp32) out += 'f';
  return out;
}

absl::StatusOr<QuantScheme> ParseScheme(absl::string_view text) {
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("scheme: got \"", text, "\", expected for example \"a16w4g128z\""));
  absl::string_view rest = text;
  int64_t activation = 0, bits = 0, group = 0;
  if (!absl::ConsumePrefix(&rest, "a") || !ConsumeNumber(&rest, &activation)) return bad;
  if (!absl::ConsumePrefix(&rest, "w") || !ConsumeNumber(&rest, &bits)) return bad;
  if (!absl::ConsumePrefix(&rest, "g") || !ConsumeNumber(&rest, &group)) return bad;
  if ((activation != 16 && activation != 8) || bits < 1 || bits > 8 || group < 1) return bad;
  QuantScheme out;
  out.activation = activation == 16 ? Activation::kA16 : Activation::kA8;
  out.bits = static_cast<int>(bits);
  out.group_size = group;
  if (absl::ConsumePrefix(&rest, "s")) {
    out.zero_kind = ZeroKind::kSymmetric;
  } else if (!absl::ConsumePrefix(&rest, "z")) {
    return bad;
  }
  if (rest == "b") {
    out.scale_dtype = DType::kBf16;
  } else if (rest == "f") {
    out.scale_dtype = DType::kFp32;
  } else if (!rest.empty()) {
    return bad;
  }
  return out;
}

}  // namespace awqd
