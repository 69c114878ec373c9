// Validation, printing and parsing of QuantizationScheme.
#include "kernels/scheme.h"

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

// The types that stored scales may have.
constexpr DType kScaleTypes[] = {DType::kFp16, DType::kBf16, DType::kFp32,
                                 DType::kE4m3, DType::kE8m0, DType::kInt8};

// The type's name after '+' or ':'.
std::string Printed(DType dtype) { return absl::AsciiStrToLower(Name(dtype)); }

// Codes that are no integers.
struct NamedCode {
  CodeKind kind;
  int bits;
  absl::string_view name;
};
constexpr NamedCode kNamedCodes[] = {
    {CodeKind::kE2m1, 4, "e2m1"}, {CodeKind::kTable, 4, "t4"}, {CodeKind::kE4m3, 8, "e4m3"}};

std::string PrintedCode(const QuantizationScheme& d) {
  if (d.code == CodeKind::kVector) return std::string(InfoOf(d.vector).name);
  if (d.code == CodeKind::kTrellis) return absl::StrCat("trellis", d.bits, Suffix(d.trellis));
  for (const NamedCode& code : kNamedCodes) {
    if (code.kind == d.code) return std::string(code.name);
  }
  return absl::StrCat("w", d.bits);
}

std::string PrintedBlock(const QuantizationScheme& d) {
  if (d.block_cols == 1) return d.block_rows == 0 ? "c" : absl::StrCat("g", d.block_rows);
  if (d.block_rows == 0 && d.block_cols == 0) return "t";
  return absl::StrCat("b", d.block_rows, "x", d.block_cols);
}

std::string PrintedZero(const QuantizationScheme& d) {
  const std::string type =
      d.zero_dtype == DType::kFp16 ? "" : absl::StrCat(":", Printed(d.zero_dtype));
  if (d.zero_kind == ZeroKind::kStored) return "z";
  if (d.real_zeros()) return (d.zero_kind == ZeroKind::kRealBefore ? "r" : "o") + type;
  if (d.is_integer() && d.symmetric()) return "s";
  return d.zero == 0 ? "" : absl::StrCat("m", d.zero);
}

std::string PrintedScale(const QuantizationScheme& d) {
  if (!d.scale_dtype) return "+1";
  return *d.scale_dtype == DType::kFp16 ? "" : absl::StrCat("+", Printed(*d.scale_dtype));
}

// Removes leading decimal digits from `text`.
bool ConsumeNumber(absl::string_view* text, int64_t* value) {
  size_t digits = 0;
  while (digits < text->size() && absl::ascii_isdigit((*text)[digits])) ++digits;
  if (digits == 0 || !absl::SimpleAtoi(text->substr(0, digits), value)) return false;
  text->remove_prefix(digits);
  return true;
}

bool ConsumeDType(absl::string_view* text, DType* dtype) {
  for (const DType type : kScaleTypes) {
    if (!absl::ConsumePrefix(text, Printed(type))) continue;
    *dtype = type;
    return true;
  }
  return false;
}

bool ConsumeCode(absl::string_view* text, QuantizationScheme* out) {
  int64_t bits = 0;
  if (absl::ConsumePrefix(text, "w")) {
    if (!ConsumeNumber(text, &bits) || bits < 1 || bits > 8) return false;
    out->bits = static_cast<int>(bits);
    return true;
  }
  for (const NamedCode& code : kNamedCodes) {
    if (!absl::ConsumePrefix(text, code.name)) continue;
    out->code = code.kind;
    out->bits = code.bits;
    return true;
  }
  return false;
}

bool ConsumeBlock(absl::string_view* text, QuantizationScheme* out) {
  if (absl::ConsumePrefix(text, "c")) return true;
  if (absl::ConsumePrefix(text, "t")) {
    out->block_cols = 0;
    return true;
  }
  if (absl::ConsumePrefix(text, "b")) {
    return ConsumeNumber(text, &out->block_rows) && absl::ConsumePrefix(text, "x") &&
           ConsumeNumber(text, &out->block_cols) && out->block_cols != 1;
  }
  return absl::ConsumePrefix(text, "g") && ConsumeNumber(text, &out->block_rows) &&
         out->block_rows > 0;
}

bool ConsumeZero(absl::string_view* text, QuantizationScheme* out) {
  out->zero_kind = ZeroKind::kConstant;
  int64_t constant = 0;
  if (absl::ConsumePrefix(text, "z")) {
    out->zero_kind = ZeroKind::kStored;
  } else if (absl::ConsumePrefix(text, "s")) {
    out->zero = 1 << (out->bits - 1);
  } else if (absl::ConsumePrefix(text, "m")) {
    if (!ConsumeNumber(text, &constant) || constant > 255) return false;
    out->zero = static_cast<int>(constant);
  } else if (absl::ConsumePrefix(text, "r")) {
    out->zero_kind = ZeroKind::kRealBefore;
  } else if (absl::ConsumePrefix(text, "o")) {
    out->zero_kind = ZeroKind::kRealAfter;
  }
  return !out->real_zeros() || !absl::ConsumePrefix(text, ":") ||
         ConsumeDType(text, &out->zero_dtype);
}

bool ConsumeScale(absl::string_view* text, QuantizationScheme* out) {
  if (!absl::ConsumePrefix(text, "+")) return true;
  if (absl::ConsumePrefix(text, "1")) {
    out->scale_dtype.reset();
    return true;
  }
  return ConsumeDType(text, &*out->scale_dtype);
}

bool ConsumeVectors(absl::string_view* text, QuantizationScheme* out) {
  for (const VectorCodeInfo& info : VectorCodes()) {
    if (!absl::ConsumePrefix(text, info.name)) continue;
    *out = Vectors(info.code);
    return true;
  }
  return false;
}

bool ConsumeTrellis(absl::string_view* text, QuantizationScheme* out) {
  int64_t bits = 0;
  if (!absl::ConsumePrefix(text, "trellis") || !ConsumeNumber(text, &bits)) return false;
  if (bits < 1 || bits > 8) return false;
  TrellisCode code = TrellisCode::k3Inst;
  for (const TrellisCode other : {TrellisCode::kMcg, TrellisCode::kMul1}) {
    if (absl::ConsumePrefix(text, Suffix(other))) code = other;
  }
  *out = Trellis(code, static_cast<int>(bits));
  return true;
}

bool ConsumeOuter(absl::string_view* text, QuantizationScheme* out) {
  if (absl::ConsumePrefix(text, "*c")) out->outer = OuterKind::kColumn;
  if (absl::ConsumePrefix(text, "*t")) out->outer = OuterKind::kOne;
  return text->empty();
}

absl::Status ValidateVectors(const QuantizationScheme& d, int64_t k) {
  QuantizationScheme expected = Vectors(d.vector);
  expected.outer = d.outer;
  if (InfoOf(d.vector).name.empty() || d != expected) {
    return BadValue("quantization scheme", "vector codes with other parts", "blocks alone");
  }
  if (k % kVectorBlock == 0) return absl::OkStatus();
  return BadValue("K (in features)", k, absl::StrCat("a multiple of ", kVectorBlock));
}

absl::Status ValidateTrellis(const QuantizationScheme& d, int64_t k, int64_t n) {
  if (d.bits < 1 || d.bits > 8) return BadValue("bits", d.bits, "1 to 8");
  QuantizationScheme expected = Trellis(d.trellis, d.bits);
  expected.outer = d.outer;
  if (d.trellis == TrellisCode::kNone || d != expected) {
    return BadValue("quantization scheme", "a trellis with other parts", "tiles alone");
  }
  if (k % kTrellisTile != 0) {
    return BadValue("K (in features)", k, absl::StrCat("a multiple of ", kTrellisTile));
  }
  if (n % kTrellisColumns == 0) return absl::OkStatus();
  return BadValue("N (out features)", n, absl::StrCat("a multiple of ", kTrellisColumns));
}

absl::Status ValidateCode(const QuantizationScheme& d, int64_t k, int64_t n) {
  if (d.code != CodeKind::kVector && d.vector != VectorCode::kNone) {
    return BadValue("code", InfoOf(d.vector).name, "no vector code for other kinds");
  }
  if (d.code != CodeKind::kTrellis && d.trellis != TrellisCode::kNone) {
    return BadValue("code", "a trellis", "none for other kinds");
  }
  if (d.is_integer()) {
    return d.bits >= 1 && d.bits <= 8 ? absl::OkStatus() : BadValue("bits", d.bits, "1 to 8");
  }
  if (d.code == CodeKind::kVector) return ValidateVectors(d, k);
  if (d.code == CodeKind::kTrellis) return ValidateTrellis(d, k, n);
  for (const NamedCode& code : kNamedCodes) {
    if (code.kind != d.code) continue;
    if (d.bits == code.bits) return absl::OkStatus();
    return BadValue("bits", d.bits, absl::StrCat(code.bits, " for codes ", code.name));
  }
  return BadValue("code", static_cast<int64_t>(d.code), "a known kind");
}

absl::Status ValidateZero(const QuantizationScheme& d) {
  if (d.real_zeros()) {
    if (IsFloating(d.zero_dtype)) return absl::OkStatus();
    return BadValue("zero dtype", Name(d.zero_dtype), "FP16, BF16 or FP32 for a real zero");
  }
  if (!d.is_integer() && (d.zero_kind == ZeroKind::kStored || d.zero != 0)) {
    return BadValue("zero", "an integer", "none or a real one for codes that are no integers");
  }
  if (d.zero_kind == ZeroKind::kConstant && (d.zero < 0 || d.zero > 255)) {
    return BadValue("zero", d.zero, "0 to 255");
  }
  return absl::OkStatus();
}

absl::Status ValidateBlock(const QuantizationScheme& d, int64_t k, int64_t n) {
  if (d.block_rows < 0 || d.block_rows > k) {
    return BadValue("group_size", d.block_rows,
                    absl::StrCat("1 to K = ", k, ", or 0 for all of K"));
  }
  if (d.block_cols < 0 || d.block_cols > n) {
    return BadValue("block columns", d.block_cols,
                    absl::StrCat("1 to N = ", n, ", or 0 for all of N"));
  }
  return absl::OkStatus();
}

}  // namespace

QuantizationScheme Symmetric(int bits, int64_t block_rows, DType scale) {
  QuantizationScheme out = Asymmetric(bits, block_rows, scale);
  out.zero_kind = ZeroKind::kConstant;
  out.zero = 1 << (bits - 1);
  return out;
}

QuantizationScheme Asymmetric(int bits, int64_t block_rows, DType scale) {
  QuantizationScheme out;
  out.bits = bits;
  out.block_rows = block_rows;
  out.scale_dtype = scale;
  return out;
}

QuantizationScheme Vectors(VectorCode code) {
  return {.code = CodeKind::kVector,
          .vector = code,
          .bits = 8,
          .block_rows = kVectorBlock,
          .zero_kind = ZeroKind::kConstant,
          .scale_dtype = std::nullopt};
}

QuantizationScheme Trellis(TrellisCode code, int bits) {
  return {.code = CodeKind::kTrellis,
          .trellis = code,
          .bits = bits,
          .block_rows = kTrellisTile,
          .block_cols = kTrellisColumns,
          .zero_kind = ZeroKind::kConstant,
          .scale_dtype = std::nullopt};
}

absl::Status Validate(const QuantizationScheme& d, int64_t k, int64_t n) {
  if (k < 1) return BadValue("K (in features)", k, "at least 1");
  if (n < 1) return BadValue("N (out features)", n, "at least 1");
  AWQD_RETURN_IF_ERROR(ValidateCode(d, k, n));
  AWQD_RETURN_IF_ERROR(ValidateBlock(d, k, n));
  AWQD_RETURN_IF_ERROR(ValidateZero(d));
  if (d.scale_dtype && !absl::c_linear_search(kScaleTypes, *d.scale_dtype)) {
    return BadValue("scale dtype", Name(*d.scale_dtype), "FP16, BF16, FP32, E4M3, E8M0 or INT8");
  }
  return absl::OkStatus();
}

std::string ToString(const QuantizationScheme& d) {
  std::string out = PrintedCode(d);
  if (d.rows_of_code() == 1) {
    absl::StrAppend(&out, PrintedBlock(d), PrintedZero(d), PrintedScale(d));
  }
  if (d.outer == OuterKind::kColumn) out += "*c";
  if (d.outer == OuterKind::kOne) out += "*t";
  return out;
}

absl::StatusOr<QuantizationScheme> ParseScheme(absl::string_view text) {
  QuantizationScheme out;
  absl::string_view rest = text;
  const bool read = ConsumeVectors(&rest, &out) || ConsumeTrellis(&rest, &out) ||
                    (ConsumeCode(&rest, &out) && ConsumeBlock(&rest, &out) &&
                     ConsumeZero(&rest, &out) && ConsumeScale(&rest, &out));
  if (read && ConsumeOuter(&rest, &out)) {
    return out;
  }
  return BadValue("quantization scheme",
                  absl::StrCat("\"", absl::CHexEscape(text.substr(0, 64)), "\""),
                  "for example \"w4g128z\"");
}

}  // namespace awqd
