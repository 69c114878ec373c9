// Format "gemlite": the codes of a Gemlite CUDA product, in the order of its pack_warped_int32.
//
//   qweight I32, W_q [N, K] of codes 0 .. 2^bits-1 in the order below: [N, words of a row], or all
//     words in one dimension
//   scales F16, BF16 or F32: [1], [N] or [groups, N]; without it 1
//   zeros U8, I8, I32, F16, BF16 or F32: [1], [N] or [groups, N]; without it 0
//   bias [N], optional
//
//   W[k, n] = (W_q[n, k] - zeros) / scales    scale_mode "divide", as Gemlite has it; 1 / scales is
//   W[k, n] = (W_q[n, k] - zeros) * scales    "multiply"                    rounded to FP32, once
//
// A word holds step = 32 / bits codes, 10 of 3 bits. Every row of W_q is padded with zeros to a
// multiple of `step`, and the rows lie one after the other, padded at the end to a multiple of 32 *
// step. Of those, code f is in word f / (32 * step) * 32 + f % 32, at bit 32 - bits * (1 + f / 32 %
// step): the 32 lanes of a warp read 32 words at once, and each word's codes lie 32 apart.
// Facts: the README and the packer of Gemlite's CUDA version (fc7aafe), which has 8, 4 and 2 bits,
// one zero and one scale.
#include "kernels/formats/gemlite.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/nibbles.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"qweight", "scales", "zeros", "bias"};
constexpr absl::string_view kOptional[] = {"scales", "zeros", "bias"};
constexpr absl::string_view kCodeTypes[] = {"I32"};
constexpr absl::string_view kSettings[] = {"bits", "group_size", "in_features", "out_features",
                                           "scale_mode"};

constexpr int kLanes = 32;
constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();

bool IsWidth(int64_t bits) { return bits >= 1 && (bits <= 4 || bits == 8); }

// Where the codes of a weight [N, K] lie.
struct Packing {
  int bits;
  int64_t row_words;  // of a row of W_q
  int64_t words;      // of all

  Packing(int bits, int64_t k, int64_t n)
      : bits(bits), row_words(CeilDiv(k, step())), words(RoundUp(row_words * n, kLanes)) {}

  int step() const { return 32 / bits; }
  // Index of its word and its lowest bit.
  std::pair<int64_t, int> PlaceOfCode(int64_t row, int64_t k) const {
    const int64_t flat = row * row_words * step() + k;
    return {flat / (kLanes * step()) * kLanes + flat % kLanes,
            32 - bits * static_cast<int>(1 + flat / kLanes % step())};
  }
};

// --- Settings ---

struct Settings {
  int bits = 0;
  int64_t group_size = 0;   // -1: all of K; 0: not said
  int64_t in_features = 0;  // 0: not said
  int64_t out_features = 0;
  bool divide = true;
};

absl::StatusOr<bool> ReadScaleMode(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string mode, ReadWord(object, "scale_mode"));
  if (mode.empty() || mode == "divide") return true;
  if (mode == "multiply") return false;
  return BadValue("scale_mode", Quoted(mode), "\"divide\" or \"multiply\"");
}

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 8));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto k, ReadInteger(object, "in_features", 1, kMostFeatures));
  AWQD_ASSIGN_OR_RETURN(const auto n, ReadInteger(object, "out_features", 1, kMostFeatures));
  AWQD_ASSIGN_OR_RETURN(out.divide, ReadScaleMode(object));
  if (!bits || !IsWidth(*bits)) {
    return BadValue("bits", bits ? absl::StrCat(*bits) : "nothing", "1, 2, 3, 4 or 8");
  }
  out.bits = static_cast<int>(*bits);
  out.in_features = k.value_or(0);
  out.out_features = n.value_or(0);
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(ReadSettings(config).status());
  return OneRule(config, OnlySettings(config, kSettings), {});
}

// --- Codes ---

// Sets k and n, from the settings and from the shape of the words.
absl::Status ReadShape(const Settings& settings, const TensorView& words, HostWeight* out) {
  const int64_t step = 32 / settings.bits;
  const bool flat = words.shape.size() == 1;
  if (flat && (settings.in_features == 0 || settings.out_features == 0)) {
    return BadValue(settings.in_features == 0 ? "in_features" : "out_features", "nothing",
                    "a number, as \"qweight\" has one dimension");
  }
  out->k = settings.in_features != 0 ? settings.in_features : words.shape[1] * step;
  out->n = settings.out_features != 0 ? settings.out_features : words.shape[0];
  const Packing packing(settings.bits, out->k, out->n);
  if (flat) return CheckShape("qweight", words, {packing.words}, "a word holds 32 / bits codes");
  if (packing.words != packing.row_words * out->n) {
    return BadTensor("qweight", absl::StrCat("shape ", ShapeText(words.shape)),
                     absl::StrCat("[", packing.words, "]: rows do not fill 32 words together"));
  }
  return CheckShape("qweight", words, {out->n, packing.row_words},
                    "N rows of words with 32 / bits codes each");
}

// Calls each(first, count, word, bit) for the stretches of codes [k, k + count) of a row whose
// words are next to one another: from word `word` on, all at bit `bit`. `first` counts from k.
template <typename Each>
void ForEachStretch(const Packing& packing, int64_t row, int64_t k, int64_t count, Each each) {
  for (int64_t first = 0; first < count;) {
    const auto [word, bit] = packing.PlaceOfCode(row, k + first);
    const int64_t stretch = std::min<int64_t>(count - first, kLanes - word % kLanes);
    each(first, stretch, word, bit);
    first += stretch;
  }
}

void DecodeCodes(int bits, const TensorView& words, HostWeight* out) {
  const Packing packing(bits, out->k, out->n);
  const uint32_t mask = (1u << bits) - 1;
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    ForEachStretch(packing, row, col, count,
                   [&](int64_t first, int64_t stretch, int64_t word, int bit) {
                     const uint8_t* const from = words.bytes.data() + 4 * word;
                     for (int64_t i = 0; i < stretch; ++i) {
                       to[first + i] = static_cast<uint8_t>(LoadWord(from, i) >> bit & mask);
                     }
                   });
  };
  out->codes = PackTransposed(out->n, out->k, bits, read);
}

// Codes [k, k + rows) of columns [n, n + columns), one to a byte, to `block`, in which columns are
// kBlockRows apart. What lies between them is anything.
constexpr int64_t kBlockRows = 256, kBlockColumns = 64;
void UnpackBlock(const HostWeight& weight, int64_t k, int64_t rows, int64_t n, int64_t columns,
                 uint8_t* block) {
  const int place = weight.code_bits();
  uint8_t eight[8][kBlockColumns] = {};
  for (int64_t row = 0; row < rows; row += 8) {
    for (int64_t i = 0; i < std::min<int64_t>(8, rows - row); ++i) {
      const uint8_t* const from = weight.codes.data() + (k + row + i) * weight.row_bytes();
      UnpackStream(from + n * place / 8, columns, place, eight[i]);
    }
    for (int64_t col = 0; col < columns; col += 8) {
      uint64_t turned[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&turned[i], &eight[i][col], sizeof(turned[i]));
      TransposeBytes(turned);
      for (int i = 0; i < 8; ++i) {
        std::memcpy(block + (col + i) * kBlockRows + row, &turned[i], sizeof(turned[i]));
      }
    }
  }
}

// Those codes to their words.
void PackBlock(const HostWeight& weight, const Packing& packing, int64_t k, int64_t n,
               std::vector<uint8_t>* block, std::vector<uint32_t>* out) {
  const int64_t rows = std::min(kBlockRows, weight.k - k);
  const int64_t columns = std::min(kBlockColumns, weight.n - n);
  UnpackBlock(weight, k, rows, n, columns, block->data());
  for (int64_t col = 0; col < columns; ++col) {
    ForEachStretch(packing, n + col, k, rows,
                   [&](int64_t first, int64_t stretch, int64_t word, int bit) {
                     const uint8_t* const from = block->data() + col * kBlockRows + first;
                     uint32_t* const to = out->data() + word;
                     for (int64_t i = 0; i < stretch; ++i) {
                       to[i] |= static_cast<uint32_t>(from[i]) << bit;
                     }
                   });
  }
}

// --- Scales and zeros ---

// A tensor [1], [N] or [groups, N].
struct Cells {
  int64_t groups = 1;
  int64_t columns = 1;
  std::vector<float> values;  // [groups, columns]

  bool one() const { return values.size() == 1; }
  float CellAt(int64_t group, int64_t col) const {
    return values[(groups == 1 ? 0 : group) * columns + (columns == 1 ? 0 : col)];
  }
};

absl::StatusOr<Cells> ReadCells(absl::string_view name, const TensorView& tensor, int64_t n) {
  Cells out;
  if (tensor.shape.size() == 2) out.groups = tensor.shape[0];
  if (tensor.shape.size() == 2 || tensor.shape != std::vector<int64_t>{1}) out.columns = n;
  if (tensor.shape.empty() || tensor.shape.size() > 2 || tensor.shape.back() != out.columns) {
    return BadTensor(name, absl::StrCat("shape ", ShapeText(tensor.shape)),
                     absl::StrCat("[1], [", n, "] or [groups, ", n, "] (N)"));
  }
  AWQD_ASSIGN_OR_RETURN(out.values, ToFloats(name, tensor));
  return out;
}

// Scales of groups become the scheme's, others its outer scale.
absl::Status DecodeScales(const TensorView& tensor, bool divide, const Cells& cells,
                          HostWeight* out) {
  std::vector<float> scales = cells.values;
  for (float& scale : scales) {
    if (divide && scale == 0) return BadTensor("scales", "0", "other numbers, to divide by");
    if (divide) scale = 1.0f / scale;
  }
  QuantizationScheme& scheme = out->scheme;
  if (cells.groups == 1) {
    scheme.outer = cells.one() ? OuterKind::kOne : OuterKind::kColumn;
    out->outer = std::move(scales);
    return absl::OkStatus();
  }
  if (!divide) {
    scheme.scale_dtype = FloatType(tensor);
    out->scales.assign(tensor.bytes.begin(), tensor.bytes.end());
    return absl::OkStatus();
  }
  scheme.scale_dtype = DType::kFp32;
  out->scales.resize(scales.size() * sizeof(float));
  std::memcpy(out->scales.data(), scales.data(), out->scales.size());
  return absl::OkStatus();
}

bool AllAlike(const Cells& cells) {
  return absl::c_all_of(cells.values, [&](float value) { return value == cells.values[0]; });
}

bool IsInteger(float value, int most) {
  return value >= 0 && value <= static_cast<float>(most) && value == std::floor(value);
}

// One zero for each of `groups` x `columns` blocks: integers where all of them are codes.
void DecodeZeros(const Cells& cells, int64_t groups, int64_t columns, HostWeight* out) {
  QuantizationScheme& scheme = out->scheme;
  const int most = (1 << scheme.bits) - 1;
  if (cells.one() && IsInteger(cells.values[0], 255)) {
    scheme.zero_kind = ZeroKind::kConstant;
    scheme.zero = static_cast<int>(cells.values[0]);
    return;
  }
  const bool integers =
      absl::c_all_of(cells.values, [&](float zero) { return IsInteger(zero, most); });
  scheme.zero_kind = integers ? ZeroKind::kStored : ZeroKind::kRealBefore;
  scheme.zero_dtype = integers ? DType::kFp16 : DType::kFp32;
  const int64_t size = integers ? 1 : sizeof(float);
  out->zeros.resize(groups * columns * size);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t col = 0; col < columns; ++col) {
      const float zero = cells.CellAt(group, col);
      const auto code = static_cast<uint8_t>(integers ? zero : 0);
      std::memcpy(out->zeros.data() + (group * columns + col) * size,
                  integers ? static_cast<const void*>(&code) : &zero, size);
    }
  }
}

absl::Status DecodeBlocks(const Settings& settings, const LinearTensors& tensors, HostWeight* out) {
  const TensorView* scale_tensor = FindTensor(tensors, "scales");
  const TensorView* zero_tensor = FindTensor(tensors, "zeros");
  Cells scales, zeros = {.values = {0.0f}};
  if (scale_tensor != nullptr) {
    AWQD_RETURN_IF_ERROR(
        CheckScales("scales", *scale_tensor, scale_tensor->shape.size(), true).status());
    AWQD_ASSIGN_OR_RETURN(scales, ReadCells("scales", *scale_tensor, out->n));
  }
  if (zero_tensor != nullptr) {
    AWQD_ASSIGN_OR_RETURN(zeros, ReadCells("zeros", *zero_tensor, out->n));
    if (AllAlike(zeros)) zeros = {.values = {zeros.values[0]}};
  }
  if (scales.groups > 1 && zeros.groups > 1 && scales.groups != zeros.groups) {
    return BadTensor("zeros", absl::StrCat(zeros.groups, " groups"),
                     absl::StrCat(scales.groups, ", as the scales, or 1"));
  }
  const int64_t groups = std::max(scales.groups, zeros.groups);
  int64_t rows = out->k;
  if (groups > 1) {
    AWQD_ASSIGN_OR_RETURN(rows, GroupRows(settings.group_size, out->k, groups,
                                          scales.groups > 1 ? "scales" : "zeros", true));
  }
  // Without scales in blocks, one real zero is one block.
  const bool one_block = scales.groups == 1 && zeros.one() && !IsInteger(zeros.values[0], 255);
  out->scheme = {.bits = settings.bits,
                 .block_rows = BlockRows(rows, out->k),
                 .block_cols = one_block ? 0 : 1,
                 .scale_dtype = std::nullopt};
  if (scale_tensor != nullptr) {
    AWQD_RETURN_IF_ERROR(DecodeScales(*scale_tensor, settings.divide, scales, out));
  }
  DecodeZeros(zeros, groups, one_block ? 1 : out->n, out);
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* words,
                        NeedTensor(tensors, "qweight", "I32 [N, K*bits/32]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *words, {"I32"}, words->shape.size() == 1 ? 1 : 2));
  HostWeight out;
  AWQD_RETURN_IF_ERROR(ReadShape(settings, *words, &out));
  AWQD_RETURN_IF_ERROR(DecodeBlocks(settings, tensors, &out));
  if (words->unread()) return out;
  DecodeCodes(settings.bits, *words, &out);
  return out;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> PackWarpedInt32(const HostWeight& weight) {
  AWQD_RETURN_IF_ERROR(Validate(weight));
  const QuantizationScheme& scheme = weight.scheme;
  if (!scheme.is_integer() || !IsWidth(scheme.bits)) {
    return BadValue("code", ToString(scheme), "w1, w2, w3, w4 or w8");
  }
  if (!weight.order.empty()) return BadValue("order", "one", "none");
  const Packing packing(scheme.bits, weight.k, weight.n);
  std::vector<uint32_t> out(packing.words);
  std::vector<uint8_t> block(kBlockRows * kBlockColumns);
  for (int64_t n = 0; n < weight.n; n += kBlockColumns) {
    for (int64_t k = 0; k < weight.k; k += kBlockRows) {
      PackBlock(weight, packing, k, n, &block, &out);
    }
  }
  return out;
}

const Format kGemliteFormat = {.name = "gemlite",
                               .quant_method = "gemlite",
                               .suffixes = kSuffixes,
                               .optional_suffixes = kOptional,
                               .code_dtypes = kCodeTypes,
                               .spare_bytes_per_code = 1,
                               .settings = kSettings,
                               .read = Read,
                               .decode_parts = Decode};

}  // namespace awqd
