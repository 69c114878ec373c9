// The parts of a weight, changed in kind where no element changes its bits.
#include "client/tools/encode/normal.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

std::string Shown(float value) { return absl::StrCat(value); }

absl::Status CheckCodes(const HostWeight& weight, const Limits& limits) {
  const QuantizationScheme& d = weight.scheme;
  if (!d.is_integer() || !absl::c_linear_search(limits.widths, d.bits)) {
    return BadValue("codes", ToString(d),
                    absl::StrCat("integers of ", absl::StrJoin(limits.widths, ", "), " bits"));
  }
  if (!weight.factor.empty()) {
    return BadValue("factor", "one for each in-feature, which activations are multiplied by",
                    "none, as the format has no tensor for it");
  }
  if (!weight.order.empty() && !limits.order) {
    return BadValue("order", "rows sorted by group (desc_act)",
                    "none, as the format has no tensor for it");
  }
  if (weight.k % weight.group_rows() != 0 && !limits.short_group) {
    return BadValue(
        "groups",
        absl::StrCat("a short last one (K = ", weight.k, ", groups of ", weight.group_rows(), ")"),
        "equal ones");
  }
  return absl::OkStatus();
}

// `each`(group, col) for every cell of a normalised weight.
template <typename Each>
absl::Status ForEachCell(const HostWeight& weight, Each each) {
  for (int64_t group = 0; group < weight.groups(); ++group) {
    for (int64_t col = 0; col < weight.n; ++col) AWQD_RETURN_IF_ERROR(each(group, col));
  }
  return absl::OkStatus();
}

// --- Zeros ---

bool IsCode(float value, int bits) {
  return value >= 0 && value < static_cast<float>(1 << bits) && value == std::floor(value);
}

// One integer for all, if they are.
absl::Status SetStored(std::vector<uint8_t> zeros, QuantizationScheme* d,
                       std::vector<uint8_t>* out) {
  d->zero_dtype = QuantizationScheme().zero_dtype;
  const bool alike = absl::c_all_of(zeros, [&](uint8_t zero) { return zero == zeros[0]; });
  d->zero_kind = alike ? ZeroKind::kConstant : ZeroKind::kStored;
  d->zero = alike ? zeros[0] : 0;
  *out = alike ? std::vector<uint8_t>() : std::move(zeros);
  return absl::OkStatus();
}

// The zeros [groups, N] and their kind, of a weight whose other parts are still as they were.
absl::Status NormaliseZeros(const HostWeight& weight, const Limits& limits, QuantizationScheme* d,
                            std::vector<uint8_t>* out) {
  const int bits = d->bits;
  if (d->zero_kind == ZeroKind::kRealAfter) {
    return BadValue("zeros", "real ones after the scale", "ones before the scale");
  }
  if (d->zero_kind == ZeroKind::kConstant) {
    if (limits.real_zeros || IsCode(static_cast<float>(d->zero), bits)) return absl::OkStatus();
    return BadValue("zero", d->zero, absl::StrCat("0 to ", (1 << bits) - 1));
  }
  const bool real = d->real_zeros();
  std::vector<uint8_t> integers;
  integers.reserve(weight.groups() * weight.n);
  std::string misfit;
  AWQD_RETURN_IF_ERROR(ForEachCell(weight, [&](int64_t group, int64_t col) {
    const float zero =
        real ? weight.RealZero(group, col) : static_cast<float>(weight.Zero(group, col));
    if (misfit.empty() && !IsCode(zero, bits)) {
      misfit = absl::StrCat(Shown(zero), " at [", group, ", ", col, "]");
    }
    integers.push_back(misfit.empty() ? static_cast<uint8_t>(zero) : 0);
    return absl::OkStatus();
  }));
  if (misfit.empty()) return SetStored(std::move(integers), d, out);
  if (!limits.real_zeros) {
    return BadValue("zeros", misfit, absl::StrCat("integers from 0 to ", (1 << bits) - 1));
  }
  const int64_t size = SizeOf(d->zero_dtype);
  out->resize(weight.groups() * weight.n * size);
  return ForEachCell(weight, [&](int64_t group, int64_t col) {
    std::memcpy(out->data() + (group * weight.n + col) * size,
                weight.zeros.data() + weight.Cell(group, col) * size, size);
    return absl::OkStatus();
  });
}

// --- Scales ---

// False where the type does not hold the value.
bool StoreScale(float value, DType type, uint8_t* to) {
  if (type == DType::kFp32) {
    std::memcpy(to, &value, sizeof(value));
    return true;
  }
  const uint16_t bits = type == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  std::memcpy(to, &bits, sizeof(bits));
  return LoadElement(to, type, 0) == value;
}

// A scale per column that stands alone is a scale like another: multiplying by 1 before changes
// nothing.
float WholeScale(const HostWeight& weight, int64_t group, int64_t col) {
  return weight.scheme.scale_dtype ? weight.Scale(group, col) : weight.Outer(col);
}

// Empty where all scales fit; else the first that does not.
std::string StoreScales(const HostWeight& weight, DType type, std::vector<uint8_t>* out) {
  const int64_t size = SizeOf(type);
  out->assign(weight.groups() * weight.n * size, 0);
  uint8_t* to = out->data();
  for (int64_t group = 0; group < weight.groups(); ++group) {
    for (int64_t col = 0; col < weight.n; ++col, to += size) {
      const float scale = WholeScale(weight, group, col);
      if (StoreScale(scale, type, to)) continue;
      return absl::StrCat(Shown(scale), " at [", group, ", ", col, "]");
    }
  }
  return "";
}

absl::Status NormaliseScales(const HostWeight& weight, const Limits& limits, QuantizationScheme* d,
                             std::vector<uint8_t>* out) {
  if (d->scale_dtype && d->outer != OuterKind::kNone) {
    return BadValue("scales", ToString(*d), "one level of them");
  }
  d->outer = OuterKind::kNone;
  std::vector<DType> types = limits.scales;
  // As they are stored, where that is possible.
  if (d->scale_dtype && absl::c_linear_search(types, *d->scale_dtype)) types = {*d->scale_dtype};
  std::string misfit;
  for (const DType type : types) {
    misfit = StoreScales(weight, type, out);
    d->scale_dtype = type;
    if (misfit.empty()) return absl::OkStatus();
  }
  return BadValue("scales", misfit,
                  absl::StrCat("numbers that ",
                               absl::StrJoin(limits.scales, " or ",
                                             [](std::string* text, DType type) {
                                               absl::StrAppend(text, Name(type));
                                             }),
                               " holds exactly"));
}

}  // namespace

absl::StatusOr<HostWeight> Normalised(HostWeight weight, const Limits& limits) {
  AWQD_RETURN_IF_ERROR(CheckCodes(weight, limits));
  QuantizationScheme scheme = weight.scheme;
  std::vector<uint8_t> zeros, scales;
  AWQD_RETURN_IF_ERROR(NormaliseZeros(weight, limits, &scheme, &zeros));
  AWQD_RETURN_IF_ERROR(NormaliseScales(weight, limits, &scheme, &scales));
  scheme.block_cols = 1;
  if (weight.groups() == 1) scheme.block_rows = 0;
  weight.scheme = scheme;
  weight.zeros = std::move(zeros);
  weight.scales = std::move(scales);
  weight.outer.clear();
  AWQD_RETURN_IF_ERROR(Validate(weight));
  return weight;
}

void Widen(absl::Span<const int> widths, HostWeight* weight) {
  QuantizationScheme& d = weight->scheme;
  if (!d.is_integer() || absl::c_linear_search(widths, d.bits)) return;
  for (const int width : widths) {  // in ascending order
    if (width < d.bits || CodeBits(width) != CodeBits(d.bits)) continue;
    d.bits = width;
    return;
  }
}

}  // namespace awqd::tools
