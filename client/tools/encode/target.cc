// The list of targets; words of codes, biases and settings that several of them have; the parts of a
// weight, changed in kind where no element changes its bits.
#include "client/tools/encode/target.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/elements.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

template <typename T>
NewTensor Held(std::string name, std::string dtype, std::vector<int64_t> shape,
               std::vector<T> values) {
  NewTensor out = {std::move(name), std::move(dtype), std::move(shape)};
  out.bytes = static_cast<int64_t>(values.size() * sizeof(T));
  // std::function copies what it holds.
  auto held = std::make_shared<const std::vector<T>>(std::move(values));
  out.read = [held](int64_t at, absl::Span<uint8_t> to) {
    std::memcpy(to.data(), reinterpret_cast<const uint8_t*>(held->data()) + at, to.size());
    return absl::OkStatus();
  };
  return out;
}

constexpr int kBlock = 32;  // codes that fill `bits` words

// Words [bits, n] of codes [kBlock, n].
void PackBlock(const std::vector<uint8_t>& codes, int64_t n, int bits, uint32_t* to) {
  std::fill_n(to, bits * n, 0u);
  for (int code = 0; code < kBlock; ++code) {
    const int word = code * bits / 32, shift = code * bits % 32;
    const uint8_t* const from = codes.data() + code * n;
    for (int64_t col = 0; col < n; ++col) {
      to[word * n + col] |= static_cast<uint32_t>(from[col]) << shift;
    }
    if (shift + bits <= 32) continue;
    for (int64_t col = 0; col < n; ++col) {
      to[(word + 1) * n + col] |= static_cast<uint32_t>(from[col]) >> (32 - shift);
    }
  }
}

// --- A weight within the limits of a format ---

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
  if (weight.hadamard.size > 0) {
    return BadValue("transform", "one of activations", "none, as the format has no name for it");
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

// Calls `each`(group, col) for every cell that a normalised weight has.
template <typename Each>
void ForEachCell(const HostWeight& weight, Each each) {
  for (int64_t group = 0; group < weight.groups(); ++group) {
    for (int64_t col = 0; col < weight.n; ++col) each(group, col);
  }
}

// --- Zeros ---

bool IsCode(float value, int bits) {
  return value >= 0 && value < static_cast<float>(1 << bits) && value == std::floor(value);
}

// Stores `zeros`, or the one integer that all of them are.
void SetStored(std::vector<uint8_t> zeros, QuantizationScheme* d, std::vector<uint8_t>* out) {
  d->zero_dtype = QuantizationScheme().zero_dtype;
  const bool alike = absl::c_all_of(zeros, [&](uint8_t zero) { return zero == zeros[0]; });
  d->zero_kind = alike ? ZeroKind::kConstant : ZeroKind::kStored;
  d->zero = alike ? zeros[0] : 0;
  *out = alike ? std::vector<uint8_t>() : std::move(zeros);
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
  std::vector<uint8_t> integers;
  integers.reserve(weight.groups() * weight.n);
  std::string misfit;
  ForEachCell(weight, [&](int64_t group, int64_t col) {
    const float zero = ZeroOf(weight, group, col);
    if (misfit.empty() && !IsCode(zero, bits)) {
      misfit = absl::StrCat(zero, " at [", group, ", ", col, "]");
    }
    integers.push_back(misfit.empty() ? static_cast<uint8_t>(zero) : 0);
  });
  if (misfit.empty()) {
    SetStored(std::move(integers), d, out);
    return absl::OkStatus();
  }
  if (!limits.real_zeros) {
    return BadValue("zeros", misfit, absl::StrCat("integers from 0 to ", (1 << bits) - 1));
  }
  const int64_t size = SizeOf(d->zero_dtype);
  out->resize(weight.groups() * weight.n * size);
  ForEachCell(weight, [&](int64_t group, int64_t col) {
    std::memcpy(out->data() + (group * weight.n + col) * size,
                weight.zeros.data() + weight.Cell(group, col) * size, size);
  });
  return absl::OkStatus();
}

// --- Scales ---

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
      if (StoreRounded(scale, type, to) == scale) continue;
      return absl::StrCat(scale, " at [", group, ", ", col, "]");
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
  std::vector<DType> types(limits.scales.begin(), limits.scales.end());
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

absl::Status Normalise(const Limits& limits, HostWeight* weight) {
  AWQD_RETURN_IF_ERROR(CheckCodes(*weight, limits));
  QuantizationScheme scheme = weight->scheme;
  std::vector<uint8_t> zeros, scales;
  AWQD_RETURN_IF_ERROR(NormaliseZeros(*weight, limits, &scheme, &zeros));
  AWQD_RETURN_IF_ERROR(NormaliseScales(*weight, limits, &scheme, &scales));
  scheme.block_cols = 1;
  if (weight->groups() == 1) scheme.block_rows = 0;
  weight->scheme = scheme;
  weight->zeros = std::move(zeros);
  weight->scales = std::move(scales);
  weight->outer.clear();
  return weight->codes.empty() ? ValidateBesideCodes(*weight) : Validate(*weight);
}

std::vector<uint8_t> CodesByColumn(const HostWeight& weight, int bits, int zero) {
  const int64_t row_bytes = weight.row_bytes();
  const int place = weight.code_bits();
  return PackTransposed(
      weight.k, weight.n, bits, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
        UnpackStream(weight.codes.data() + row * row_bytes + col * place / 8, count, place, to);
        if (zero < 0 || (weight.zeros.empty() && weight.scheme.zero == zero)) return;
        const int64_t group = row / weight.group_rows();
        for (int64_t i = 0; i < count; ++i) {
          to[i] = static_cast<uint8_t>(to[i] - weight.Zero(group, col + i) + zero);
        }
      });
}

NewTensor MadeTensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::vector<uint8_t> bytes) {
  return Held(std::move(name), std::move(dtype), std::move(shape), std::move(bytes));
}

NewTensor MadeTensor(std::string name, std::vector<int64_t> shape, std::vector<uint32_t> words) {
  return Held(std::move(name), "I32", std::move(shape), std::move(words));
}

NewTensor RoundedTensor(std::string name, const std::string& dtype, std::vector<int64_t> shape,
                        absl::Span<const float> values) {
  const DType type = FloatTypeNamed(dtype);
  std::vector<uint8_t> bytes(values.size() * SizeOf(type));
  for (size_t i = 0; i < values.size(); ++i) {
    StoreRounded(values[i], type, bytes.data() + i * SizeOf(type));
  }
  return MadeTensor(std::move(name), dtype, std::move(shape), std::move(bytes));
}

NewTensor DenseTensor(const std::string& dtype, int64_t n, int64_t k, StoreRows store) {
  const int64_t row_bytes = k * SizeOf(FloatTypeNamed(dtype));
  return {.name = "weight",
          .dtype = dtype,
          .shape = {n, k},
          .bytes = n * row_bytes,
          .unit = row_bytes,
          .read = [store = std::move(store), row_bytes](int64_t at, absl::Span<uint8_t> to) {
            const auto rows = static_cast<int64_t>(to.size()) / row_bytes;
            return store(at / row_bytes, at / row_bytes + rows, to.data());
          }};
}

LinearFacts FactsOf(const HostWeight& weight) {
  LinearFacts out = {.k = weight.k,
                     .n = weight.n,
                     .bits = weight.scheme.bits,
                     .group_rows = weight.group_rows(),
                     .symmetric = weight.scheme.symmetric(),
                     .order = !weight.order.empty()};
  out.zero_at_0 = weight.scheme.zero_kind == ZeroKind::kConstant
                      ? weight.scheme.zero == 0
                      : absl::c_linear_search(weight.zeros, 0);
  return out;
}

absl::Span<const Target* const> AllTargets() {
  static constexpr const Target* kTargets[] = {&kAwqTarget,
                                               &kGptqTarget,
                                               &kCompressedTensorsTarget,
                                               &kGemliteTarget,
                                               &kFasterTransformerTarget,
                                               &kMlxTarget,
                                               &kGgufTarget,
                                               &kDenseTarget};
  return kTargets;
}

const Target* TargetNamed(absl::string_view name) {
  for (const Target* target : AllTargets()) {
    if (target->name == name) return target;
  }
  return nullptr;
}

std::vector<uint32_t> DenseWords(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                                 int bits) {
  const int64_t row_words = CeilDiv(cols * bits, 32);
  std::vector<uint32_t> out(rows * row_words);
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t* const to = out.data() + row * row_words;
    for (int64_t col = 0; col < cols; ++col) {
      const uint32_t code = codes[row * cols + col];
      const int64_t word = col * bits / 32;
      const int shift = static_cast<int>(col * bits % 32);
      to[word] |= code << shift;
      if (shift + bits > 32) to[word + 1] |= code >> (32 - shift);
    }
  }
  return out;
}

std::vector<uint8_t> WordsAlongRows(const HostWeight& weight) {
  const int bits = weight.scheme.bits;
  const int64_t n = weight.n, all = CeilDiv(weight.k * bits, 32);
  std::vector<uint8_t> out(all * n * 4), codes(kBlock * n);
  RowReader rows(&weight);
  std::vector<uint32_t> words(bits * n);
  for (int64_t k = 0; k < weight.k; k += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, weight.k - k);
    if (count < kBlock) std::fill(codes.begin(), codes.end(), uint8_t{0});
    for (int64_t i = 0; i < count; ++i) rows.ReadCodes(k + i, codes.data() + i * n);
    PackBlock(codes, n, bits, words.data());
    const int64_t first = k / kBlock * bits;
    std::memcpy(out.data() + first * n * 4, words.data(),
                std::min<int64_t>(bits, all - first) * n * 4);
  }
  return out;
}

std::vector<uint8_t> BytesOf(absl::Span<const uint32_t> words) {
  std::vector<uint8_t> out(words.size() * sizeof(uint32_t));
  std::memcpy(out.data(), words.data(), out.size());
  return out;
}

std::string TypeName(DType dtype) {
  return dtype == DType::kFp16 ? "F16" : dtype == DType::kBf16 ? "BF16" : "F32";
}

absl::StatusOr<int64_t> OneGroupSize(const FolderFacts& facts) {
  const std::pair<std::string, LinearFacts>* first = nullptr;  // with more groups than one
  for (const auto& linear : facts.linears) {
    if (linear.second.groups() > 1 && first == nullptr) first = &linear;
  }
  if (first == nullptr) return -1;
  for (const auto& [path, linear] : facts.linears) {
    if (linear.group_rows == first->second.group_rows) continue;
    return Invalid("linear ", path, ": got groups of ", linear.group_rows, ", expected ",
                   first->second.group_rows, " as of ", first->first,
                   ": the format has one group_size for all");
  }
  return first->second.group_rows;
}

absl::StatusOr<int> OneWidth(const FolderFacts& facts) {
  const auto& [first, of_first] = facts.linears.front();
  for (const auto& [path, linear] : facts.linears) {
    if (linear.bits == of_first.bits) continue;
    return Invalid("linear ", path, ": got codes of ", linear.bits, " bits, expected ",
                   of_first.bits, " as of ", first, ": the format has one width for all");
  }
  return of_first.bits;
}

void SetQuantizer(const FolderFacts& facts, nlohmann::ordered_json* settings) {
  if (!facts.rtn) return;
  (*settings)["meta"] = {{"quantizer", {facts.search ? "awqd:rtn-search" : "awqd:rtn"}}};
}

absl::StatusOr<EncodedLinear> Target::Encode(HostWeight weight,
                                             const EncodeOptions& options) const {
  if (!limits.widths.empty()) AWQD_RETURN_IF_ERROR(Normalise(limits, &weight));
  EncodedLinear out = {.facts = FactsOf(weight)};
  if (!weight.bias.empty()) {
    out.tensors.push_back(RoundedTensor("bias", options.bias_dtype, {weight.n}, weight.bias));
  }
  AWQD_RETURN_IF_ERROR(encode(std::move(weight), options, &out));
  return out;
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
