// Targets "awq", "gemlite" and "ft": formats whose settings are the same for every linear. Target
// "dense": linears that are not quantised.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "client/tools/encode/target.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/fastertransformer.h"
#include "kernels/formats/gemlite.h"

namespace awqd::tools {
namespace {

// --- awq: AutoAWQ "gemm". kernels/formats/awq/awq.cc describes the tensors ---

constexpr int kAwqWidths[] = {4};
constexpr int kColumnOfNibble[] = {0, 2, 4, 6, 1, 3, 5, 7};

uint32_t Word(const uint8_t* codes) {
  uint32_t out = 0;
  for (int nibble = 0; nibble < 8; ++nibble) {
    out |= static_cast<uint32_t>(codes[kColumnOfNibble[nibble]]) << (4 * nibble);
  }
  return out;
}

absl::Status EncodeAwq(HostWeight weight, const EncodeOptions&, EncodedLinear* out) {
  const int64_t k = weight.k, n = weight.n, groups = weight.groups();
  if (n % 8 != 0) return BadValue("N", n, "a multiple of 8: a word holds 8 columns");
  std::vector<uint32_t> codes(k * n / 8), zeros(groups * n / 8);
  std::vector<uint8_t> row(n);
  RowReader rows(&weight);
  for (int64_t i = 0; i < k; ++i) {
    rows.ReadCodes(i, row.data());
    for (int64_t col = 0; col < n; col += 8) codes[(i * n + col) / 8] = Word(row.data() + col);
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t col = 0; col < n; ++col) row[col] = static_cast<uint8_t>(weight.Zero(group, col));
    for (int64_t col = 0; col < n; col += 8) zeros[(group * n + col) / 8] = Word(row.data() + col);
  }
  out->tensors.push_back(MadeTensor("qweight", {k, n / 8}, std::move(codes)));
  out->tensors.push_back(MadeTensor("qzeros", {groups, n / 8}, std::move(zeros)));
  out->tensors.push_back(
      MadeTensor("scales", TypeName(*weight.scheme.scale_dtype), {groups, n}, weight.scales));
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::ordered_json> AwqSettings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, OneGroupSize(facts));
  nlohmann::ordered_json out = {{"quant_method", "awq"},    {"bits", 4},
                                {"group_size", group_size}, {"zero_point", true},
                                {"version", "gemm"},        {"modules_to_not_convert", nullptr}};
  nlohmann::ordered_json modules = nlohmann::ordered_json::array();
  for (const std::string& path : facts.dense) {
    // Readers look for the name anywhere in a path, so that "mlp.gate" would be "mlp.gate_proj".
    const auto in = [&](const auto& linear) { return absl::StrContains(linear.first, path); };
    bool ambiguous = false;
    for (const auto& linear : facts.linears) ambiguous |= in(linear);
    if (!ambiguous) modules.push_back(path);
  }
  if (!modules.empty()) out["modules_to_not_convert"] = std::move(modules);
  SetQuantizer(facts, &out);
  return out;
}

// The shape of one number for each column, or for each group of a column.
std::vector<int64_t> CellShape(const HostWeight& weight) {
  return weight.groups() == 1 ? std::vector<int64_t>{weight.n}
                              : std::vector<int64_t>{weight.groups(), weight.n};
}

// --- gemlite: scales that multiply. kernels/formats/gemlite.cc describes the tensors ---

constexpr int kGemliteHolds[] = {1, 2, 3, 4, 8};
constexpr int kGemliteWidths[] = {2, 3, 4, 8};  // that are quantised to

// Codes of a row of W_q fill whole words, and its words may have a dimension of their own only
// where all of them together are a multiple of 32.
struct Words {
  int64_t in_row = 0;
  bool flat = false;
  bool whole = false;  // the row's last word is full, so that words say K
};

Words WordsOf(int64_t k, int64_t n, int bits) {
  const int64_t step = 32 / bits, in_row = CeilDiv(k, step);
  return {in_row, in_row * n % 32 != 0, k % step == 0};
}

absl::Status EncodeGemlite(HostWeight weight, const EncodeOptions&, EncodedLinear* out) {
  const QuantizationScheme& d = weight.scheme;
  const Words words = WordsOf(weight.k, weight.n, d.bits);
  AWQD_ASSIGN_OR_RETURN(std::vector<uint32_t> codes, PackWarpedInt32(weight));
  const auto all = static_cast<int64_t>(codes.size());
  out->tensors.push_back(MadeTensor(
      "qweight",
      words.flat ? std::vector<int64_t>{all} : std::vector<int64_t>{weight.n, words.in_row},
      std::move(codes)));
  out->tensors.push_back(
      MadeTensor("scales", TypeName(*d.scale_dtype), CellShape(weight), weight.scales));
  if (d.zero_kind == ZeroKind::kConstant) {
    out->tensors.push_back(MadeTensor("zeros", "U8", {1}, {static_cast<uint8_t>(d.zero)}));
  } else {
    out->tensors.push_back(MadeTensor("zeros", d.real_zeros() ? TypeName(d.zero_dtype) : "U8",
                                      CellShape(weight), weight.zeros));
  }
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::ordered_json> GemliteSettings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int bits, OneWidth(facts));
  nlohmann::ordered_json out = {{"quant_method", "gemlite"}, {"bits", bits}};
  bool shapes = false, ragged = false;
  for (const auto& [path, linear] : facts.linears) {
    const Words words = WordsOf(linear.k, linear.n, bits);
    shapes |= words.flat || !words.whole;
    ragged |= linear.k % linear.group_rows != 0;
  }
  // Groups that the settings say nothing of are equal.
  const absl::StatusOr<int64_t> group_size = OneGroupSize(facts);
  if (group_size.ok()) out["group_size"] = *group_size;
  if (ragged && !group_size.ok()) return group_size.status();
  const auto& [first, of_first] = facts.linears.front();
  for (const auto& [path, linear] : facts.linears) {
    if (!shapes || (linear.k == of_first.k && linear.n == of_first.n)) continue;
    return Invalid("linear ", path, ": got [", linear.k, ", ", linear.n, "], expected [",
                   of_first.k, ", ", of_first.n, "] as of ", first,
                   ": the format has one in_features and out_features for all, "
                   "which words that are not full need");
  }
  if (shapes) out["in_features"] = of_first.k;
  if (shapes) out["out_features"] = of_first.n;
  out["scale_mode"] = "multiply";
  SetQuantizer(facts, &out);
  return out;
}

// --- ft: FasterTransformer. kernels/formats/fastertransformer.cc describes the tensors ---

constexpr int kFtWidths[] = {4, 8};

absl::Status EncodeFt(HostWeight weight, const EncodeOptions&, EncodedLinear* out) {
  AWQD_ASSIGN_OR_RETURN(FasterTransformerWeight made, ToFasterTransformer(weight));
  out->tensors.push_back(
      MadeTensor("weight", "I8", {weight.k, weight.n * made.bits / 8}, std::move(made.weight)));
  out->tensors.push_back(MadeTensor("weight_scale", TypeName(made.scale_dtype), CellShape(weight),
                                    std::move(made.scales)));
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::ordered_json> FtSettings(const FolderFacts& facts) {
  AWQD_ASSIGN_OR_RETURN(const int bits, OneWidth(facts));
  nlohmann::ordered_json out = {{"quant_method", "fastertransformer"}, {"bits", bits}};
  // Groups that the settings say nothing of are equal.
  if (const auto group_size = OneGroupSize(facts); group_size.ok()) {
    out["group_size"] = *group_size;
  }
  SetQuantizer(facts, &out);
  return out;
}

// --- dense: the tensor "weight" [N, K], each element rounded once to its type ---
//
// FP32 keeps every bit. A weight's factor is in it, as one more rounding to FP32.

absl::Status EncodeDense(HostWeight given, const EncodeOptions& options, EncodedLinear* out) {
  const DType type = FloatTypeNamed(options.dtype);
  const auto weight = std::make_shared<const HostWeight>(std::move(given));
  out->facts.dense = true;
  out->tensors.push_back(DenseTensor(options.dtype, weight->n, weight->k,
                                     [weight, type](int64_t begin, int64_t end, uint8_t* to) {
                                       return FillRows(*weight, type, begin, end, to);
                                     }));
  return absl::OkStatus();
}

}  // namespace

absl::Status FillRows(const HostWeight& weight, DType type, int64_t begin, int64_t end,
                      uint8_t* to) {
  constexpr int64_t kTile = 16;  // in-features whose elements are turned around at a time
  const int64_t k = weight.k, columns = end - begin, size = SizeOf(type);
  // A column range starts at a whole byte of codes.
  const int64_t first = begin / 8 * 8;
  RowReader rows(&weight, first, end);
  std::vector<float> tile(kTile * (end - first));
  for (int64_t row = 0; row < k; row += kTile) {
    const int64_t count = std::min(kTile, k - row);
    for (int64_t i = 0; i < count; ++i) rows.Read(row + i, tile.data() + i * (end - first));
    for (int64_t col = 0; col < columns; ++col) {
      float values[kTile];
      for (int64_t i = 0; i < count; ++i) {
        values[i] = tile[i * (end - first) + begin - first + col];
      }
      if (StoreFloats(values, count, type, to + (col * k + row) * size)) continue;
      const auto* const most = std::max_element(
          values, values + count, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
      return BadValue("elements",
                      absl::StrCat(*most, " at [", row + (most - values), ", ", begin + col, "]"),
                      absl::StrCat("numbers within the range of ", TypeName(type)));
    }
  }
  return absl::OkStatus();
}

const Target kAwqTarget = {.name = "awq",
                           .format = "awq",
                           .widths = kAwqWidths,
                           .n_multiple = 8,
                           .limits = {.widths = kAwqWidths},
                           .encode = EncodeAwq,
                           .settings = AwqSettings};

const Target kGemliteTarget = {.name = "gemlite",
                               .format = "gemlite",
                               .widths = kGemliteWidths,
                               .limits = {.widths = kGemliteHolds,
                                          .scales = kAnyScale,
                                          .real_zeros = true,
                                          .short_group = true},
                               .encode = EncodeGemlite,
                               .settings = GemliteSettings};

const Target kFasterTransformerTarget = {.name = "ft",
                                         .format = "fastertransformer",
                                         .widths = kFtWidths,
                                         .asymmetric = false,
                                         .k_multiple = 64,
                                         .n_multiple = 64,
                                         .limits = {.widths = kFtWidths},
                                         .encode = EncodeFt,
                                         .settings = FtSettings};

const Target kDenseTarget = {.name = "dense", .encode = EncodeDense};

}  // namespace awqd::tools
