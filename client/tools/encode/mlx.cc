// Target "mlx": MLX's affine codes, mxfp4, nvfp4 and mxfp8; what none of them holds is a dense tensor.
// kernels/formats/mlx.cc describes the tensors. Target "gguf" stands here too: its tensors are those
// of a file as a whole (to_gguf.h).
#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "client/tools/elements.h"
#include "client/tools/encode/target.h"
#include "kernels/formats/codes.h"

namespace awqd::tools {
namespace {

constexpr int kMlxWidths[] = {2, 3, 4, 5, 6, 8};
constexpr int kGgufWidths[] = {4, 8};
constexpr int64_t kGroupSizes[] = {128, 64, 32};  // that MLX's kernels take
constexpr float kMostOfNvfp4 = 6 * 448;           // the largest E2M1 times the largest E4M3

struct FloatMode {
  absl::string_view name;
  CodeKind code;
  DType scale;
  int64_t group_size;
};
constexpr FloatMode kFloatModes[] = {{"mxfp4", CodeKind::kE2m1, DType::kE8m0, 32},
                                     {"nvfp4", CodeKind::kE2m1, DType::kE4m3, 16},
                                     {"mxfp8", CodeKind::kE4m3, DType::kE8m0, 32}};

// Words of codes [N, K], of `stored` bits each.
NewTensor CodeWords(const HostWeight& weight, int stored) {
  std::vector<uint8_t> codes;
  if (CodeBits(stored) == stored) {
    codes = CodesByColumn(weight, stored, -1);
  } else {
    codes = BytesOf(DenseWords(CodesByColumn(weight, 8, -1), weight.n, weight.k, stored));
  }
  return MadeTensor("weight", "U32", {weight.n, weight.k * stored / 32}, std::move(codes));
}

// The number that gives `outer` when MLX divides it by kMostOfNvfp4, if there is one.
std::optional<float> GlobalScale(float outer) {
  const float near = outer * kMostOfNvfp4;
  for (const float one : {near, std::nextafter(near, 0.0f), std::nextafter(near, HUGE_VALF)}) {
    if (one / kMostOfNvfp4 == outer) return one;
  }
  return std::nullopt;
}

// The weight in one of the modes of floating-point codes; false where none holds it.
bool EncodeFloats(const HostWeight& weight, EncodedLinear* out) {
  const QuantizationScheme& d = weight.scheme;
  const auto* const mode = absl::c_find_if(kFloatModes, [&](const FloatMode& known) {
    return known.code == d.code && known.scale == d.scale_dtype &&
           weight.group_rows() == known.group_size;
  });
  if (mode == std::end(kFloatModes) || d.block_cols != 1 || d.zero_kind != ZeroKind::kConstant ||
      d.zero != 0 || weight.k % 32 != 0) {
    return false;
  }
  std::optional<float> global_scale;
  if (d.outer != OuterKind::kNone) {
    const bool known = mode->scale == DType::kE4m3 && d.outer == OuterKind::kOne;
    if (known) global_scale = GlobalScale(weight.outer[0]);
    if (!global_scale) return false;
  }
  out->tensors.push_back(CodeWords(weight, d.bits));
  out->tensors.push_back(MadeTensor("scales", "U8", {weight.n, weight.groups()},
                                    Transposed(weight.scales, weight.groups(), weight.n, 1)));
  if (global_scale) {
    out->tensors.push_back(RoundedTensor("global_scale", "F32", {1}, {*global_scale}));
  }
  out->facts.mode = mode->name;
  out->facts.global_scale = global_scale.has_value();
  return true;
}

// The scale and the bias of a cell, with which `code * scale + bias` has the bits of the weight's
// own formula for every code; nothing where there are none.
struct Affine {
  float scale = 0, bias = 0;
};
std::optional<Affine> AffineOf(const HostWeight& weight, int64_t group, int64_t col) {
  const QuantizationScheme& d = weight.scheme;
  const float scale = d.scale_dtype ? weight.Scale(group, col) : weight.Outer(col);
  if (d.zero_kind == ZeroKind::kRealAfter) return Affine{scale, -weight.RealZero(group, col)};
  const float zero = ZeroOf(weight, group, col);
  const auto exact = [](double value) {
    return std::isfinite(value) && static_cast<double>(static_cast<float>(value)) == value;
  };
  // Every code times the scale is exact where the scale has so many zeros at its end.
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  const uint32_t last = (1u << d.bits) - 1;
  const bool product = (bits & last) == 0 && std::isfinite(scale * static_cast<float>(last));
  const double bias = -double{zero} * double{scale};
  if (!product || !exact(bias) || !exact(-double{zero}) ||
      !exact(static_cast<double>(last) - double{zero})) {
    return std::nullopt;
  }
  return Affine{scale, static_cast<float>(bias)};
}

bool EncodeAffine(const HostWeight& weight, EncodedLinear* out) {
  const QuantizationScheme& d = weight.scheme;
  if (!d.is_integer() || (d.scale_dtype && d.outer != OuterKind::kNone)) return false;
  const int64_t k = weight.k, n = weight.n, rows = weight.group_rows();
  const auto* const group_size =
      absl::c_find_if(kGroupSizes, [&](int64_t size) { return rows % size == 0; });
  if (group_size == std::end(kGroupSizes) || k % rows != 0) return false;
  std::vector<Affine> cells(n * weight.groups());  // [N, groups]
  for (int64_t group = 0; group < weight.groups(); ++group) {
    for (int64_t col = 0; col < n; ++col) {
      const std::optional<Affine> cell = AffineOf(weight, group, col);
      if (!cell) return false;
      cells[col * weight.groups() + group] = *cell;
    }
  }
  const auto holds = [&](DType type) {
    return absl::c_all_of(cells, [&](const Affine& cell) {
      return RoundTo(type, cell.scale) == cell.scale && RoundTo(type, cell.bias) == cell.bias;
    });
  };
  // As the scales are stored, where that is possible.
  std::vector<DType> types(std::begin(kAnyScale), std::end(kAnyScale));
  if (d.scale_dtype == DType::kBf16) std::swap(types[0], types[1]);
  const auto type = absl::c_find_if(types, holds);
  if (type == types.end()) return false;  // NaN
  const int64_t repeat = rows / *group_size, size = SizeOf(*type);
  std::vector<uint8_t> scales(cells.size() * repeat * size), biases(scales.size());
  for (size_t i = 0; i < cells.size() * repeat; ++i) {
    StoreRounded(cells[i / repeat].scale, *type, scales.data() + i * size);
    StoreRounded(cells[i / repeat].bias, *type, biases.data() + i * size);
  }
  const int stored = *absl::c_find_if(kMlxWidths, [&](int bits) { return bits >= d.bits; });
  const std::vector<int64_t> shape = {n, k / *group_size};
  out->tensors.push_back(CodeWords(weight, stored));
  out->tensors.push_back(MadeTensor("scales", TypeName(*type), shape, std::move(scales)));
  out->tensors.push_back(MadeTensor("biases", TypeName(*type), shape, std::move(biases)));
  out->facts.mode = "affine";
  out->facts.bits = stored;
  out->facts.group_rows = *group_size;
  return true;
}

absl::Status EncodeMlx(HostWeight weight, const EncodeOptions& options, EncodedLinear* out) {
  const bool plain = weight.order.empty() && !weight.transforms_input();
  if (plain && (EncodeFloats(weight, out) || EncodeAffine(weight, out))) return absl::OkStatus();
  return kDenseTarget.encode(std::move(weight), options, out);
}

// The settings that most linears have, and by path those of the others, which take nothing of them.
absl::StatusOr<nlohmann::ordered_json> MlxSettings(const FolderFacts& facts) {
  using Json = nlohmann::ordered_json;
  const auto settings = [](const LinearFacts& linear) {
    Json out = {{"group_size", linear.group_rows}, {"bits", linear.bits}, {"mode", linear.mode}};
    if (linear.global_scale) out["global_scale"] = true;
    return out;
  };
  std::map<Json, int64_t> counts;
  Json paths = Json::object();
  for (const std::string& path : facts.dense) paths[path] = false;
  for (const auto& [path, linear] : facts.linears) ++counts[settings(linear)];
  if (counts.empty()) return Json();
  Json out = absl::c_max_element(counts, [](const auto& a, const auto& b) {
               return a.second < b.second;
             })->first;
  for (const auto& [path, linear] : facts.linears) {
    if (settings(linear) != out) paths[path] = settings(linear);
  }
  out.update(paths);
  return out;
}

}  // namespace

const Target kMlxTarget = {.name = "mlx",
                           .format = "mlx",
                           .widths = kMlxWidths,
                           .real_zeros = true,
                           .k_multiple = 32,
                           .group_size = 64,
                           .group_sizes = kGroupSizes,
                           .settings_key = "quantization",
                           .encode = EncodeMlx,
                           .settings = MlxSettings};

const Target kGgufTarget = {.name = "gguf",
                            .format = "gguf",
                            .widths = kGgufWidths,
                            .asymmetric = false,
                            .group_size = 32,
                            .group_sizes = absl::MakeConstSpan(kGroupSizes).last(1)};

}  // namespace awqd::tools
