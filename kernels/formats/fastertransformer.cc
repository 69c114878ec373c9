// Format "fastertransformer": what its preprocess_weights_for_mixed_gemm makes for Turing and
// Ampere, int8 and int4, symmetric.
//
//   weight I8 or U8: [K, N] with 8 bits, [K, N/2] with 4; the bytes in the order below
//   weight_scale F16 or BF16 [N], or [K / group_size, N]
//   bias [N], optional
//
// Signed codes become unsigned by 2^(bits-1). A 32-bit word holds 4 codes of 8 bits or 8 of 4, of
// one column. Word by word:
//
//   for each 2 columns (8 bits) or 4 (4 bits)
//     for each 64 rows
//       for each of those columns
//         16 or 8 words: the 64 rows, in the order of Row() below
//
// Within a word, places from the low bits on hold the elements 0 2 1 3, or 0 2 4 6 1 3 5 7.
// Facts: cutlass_preprocessors.cc and mixed_gemm_B_layout.h of FasterTransformer.
#include "kernels/formats/fastertransformer.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale", "bias"};
constexpr absl::string_view kOptional[] = {"bias"};
constexpr absl::string_view kCodeTypes[] = {"I8", "U8"};
constexpr absl::string_view kSettings[] = {"bits", "group_size"};

constexpr int64_t kTileRows = 64;  // of one column that lie together
constexpr int64_t kMultiple = 64;  // of K and of N

template <int kBits>
struct Order {
  static constexpr int kInWord = 32 / kBits;           // elements of a word
  static constexpr int kColumns = kBits == 8 ? 2 : 4;  // that are interleaved
  static constexpr int kMmaRows = 128 / kBits;         // that are permuted among themselves

  // The row, within 64, of element `at` of a column's 64.
  static constexpr int Row(int at) {
    const int tile = at % kMmaRows;
    return at - tile + 8 * (tile % kInWord / 2) + tile % 2 + 2 * (tile / kInWord);
  }
  // Where in its word an element is: even ones first.
  static constexpr int Place(int element) { return element / 2 + element % 2 * (kInWord / 2); }
};

// Calls each(row, col, bit): the code of that element is the kBits bits from `bit` on.
template <int kBits, typename Each>
void Walk(int64_t k, int64_t n, Each each) {
  using O = Order<kBits>;
  for (int64_t row = 0; row < k; row += kTileRows) {
    for (int64_t col = 0; col < n; ++col) {
      const int64_t codes = col / O::kColumns * O::kColumns * k  // of the columns before
                            + row * O::kColumns                  // of the rows before
                            + col % O::kColumns * kTileRows;
      for (int at = 0; at < kTileRows; ++at) {
        const int64_t word = (codes + at) / O::kInWord;
        each(row + O::Row(at), col, 32 * word + kBits * O::Place(at % O::kInWord));
      }
    }
  }
}

// `from` in the format's order and the result in rows, or the other way around.
template <int kBits>
std::vector<uint8_t> Reordered(absl::Span<const uint8_t> from, int64_t k, int64_t n, bool to_rows) {
  constexpr int kMask = (1 << kBits) - 1;
  std::vector<uint8_t> out(from.size());
  Walk<kBits>(k, n, [&](int64_t row, int64_t col, int64_t bit) {
    const int64_t in_rows = (row * n + col) * kBits;
    const int64_t at = to_rows ? bit : in_rows, to = to_rows ? in_rows : bit;
    const int code = from[at / 8] >> (at % 8) & kMask;
    out[to / 8] |= static_cast<uint8_t>(code << (to % 8));
  });
  return out;
}

std::vector<uint8_t> Reordered(absl::Span<const uint8_t> from, int64_t k, int64_t n, int bits,
                               bool to_rows) {
  return bits == 8 ? Reordered<8>(from, k, n, to_rows) : Reordered<4>(from, k, n, to_rows);
}

// --- Settings ---

struct Settings {
  int bits = 0;
  int64_t group_size = 0;  // -1: all of K; 0: not said
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 4, 8));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  if (!bits) return BadValue("bits", "nothing", "8 or 4");
  if (*bits != 8 && *bits != 4) return BadValue("bits", *bits, "8 or 4");
  out.bits = static_cast<int>(*bits);
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(ReadSettings(config).status());
  return OneRule(config, OnlySettings(config, kSettings), {});
}

// --- Tensors ---

absl::Status CheckMultiple(absl::string_view axis, int64_t got) {
  if (got % kMultiple == 0) return absl::OkStatus();
  return BadTensor("weight", absl::StrCat(axis, " = ", got),
                   "a multiple of 64: FasterTransformer tiles both axes");
}

absl::Status DecodeScales(const Settings& settings, const TensorView& scale, HostWeight* out) {
  const size_t rank = scale.shape.size() == 1 ? 1 : 2;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("weight_scale", scale, rank, false));
  const int64_t groups = rank == 1 ? 1 : scale.shape[0];
  if (scale.shape.back() != out->n) {
    return BadTensor("weight_scale", absl::StrCat("shape ", ShapeText(scale.shape)),
                     absl::StrCat("[", out->n, "] or [groups, ", out->n, "] (N)"));
  }
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(settings.group_size, out->k, groups, "weight_scale", false));
  out->scheme = Symmetric(settings.bits, BlockRows(rows, out->k), type);
  out->scales.assign(scale.bytes.begin(), scale.bytes.end());
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, "weight", "I8 or U8 [K, N * bits / 8]"));
  AWQD_ASSIGN_OR_RETURN(
      const TensorView* scale,
      NeedTensor(tensors, "weight_scale", "F16 or BF16 [N] or [K / group_size, N]"));
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"I8", "U8"}, 2));
  HostWeight out;
  out.k = weight->shape[0];
  out.n = weight->shape[1] * (8 / settings.bits);
  AWQD_RETURN_IF_ERROR(CheckMultiple("K", out.k));
  AWQD_RETURN_IF_ERROR(CheckMultiple("N", out.n));
  AWQD_RETURN_IF_ERROR(DecodeScales(settings, *scale, &out));
  if (weight->unread()) return out;
  out.codes = Reordered(weight->bytes, out.k, out.n, settings.bits, /*to_rows=*/true);
  return out;
}

absl::Status CheckExportable(const HostWeight& weight) {
  AWQD_RETURN_IF_ERROR(Validate(weight));
  const QuantizationScheme& d = weight.scheme;
  const bool codes = d.is_integer() && d.symmetric() && (d.bits == 8 || d.bits == 4);
  const bool scales = (d.scale_dtype == DType::kFp16 || d.scale_dtype == DType::kBf16) &&
                      d.outer == OuterKind::kNone && d.block_cols == 1 &&
                      weight.k % weight.group_rows() == 0;
  if (!codes || !scales) {
    return BadValue("scheme", ToString(d),
                    "w8 or w4, c or g, s, scales FP16 or BF16, whole groups");
  }
  if (!weight.order.empty() || weight.transforms_input()) {
    const char* const part = !weight.order.empty()    ? "order"
                             : !weight.factor.empty() ? "factor"
                                                      : "transform";
    return BadValue(part, "one", "none");
  }
  AWQD_RETURN_IF_ERROR(CheckMultiple("K", weight.k));
  return CheckMultiple("N", weight.n);
}

}  // namespace

absl::StatusOr<FasterTransformerWeight> ToFasterTransformer(const HostWeight& weight) {
  AWQD_RETURN_IF_ERROR(CheckExportable(weight));
  const int bits = weight.scheme.bits;
  return FasterTransformerWeight{
      .k = weight.k,
      .n = weight.n,
      .bits = bits,
      .group_rows = weight.group_rows(),
      .weight = Reordered(weight.codes, weight.k, weight.n, bits, /*to_rows=*/false),
      .scale_dtype = *weight.scheme.scale_dtype,
      .scales = weight.scales,
      .bias = weight.bias};
}

const Format kFasterTransformerFormat = {.name = "fastertransformer",
                                         .quant_method = "fastertransformer",
                                         .suffixes = kSuffixes,
                                         .optional_suffixes = kOptional,
                                         .code_dtypes = kCodeTypes,
                                         .settings = kSettings,
                                         .read = Read,
                                         .decode_parts = Decode};

}  // namespace awqd
