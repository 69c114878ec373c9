// Format "gguf": linears of llama.cpp's files, in blocks that hold codes and their scales.
//
//   weight [N, K] of a block type, K whole blocks; in a request U8 [N, bytes of a row] with the
//   setting type, for example "q4_k"
//   scale F32 [] or [1], optional: multiplies the whole weight
//   bias [N], optional
//   input_scale, optional: without effect
//
//   Q4_0, Q5_0, Q8_0   32 codes, FP16 d           W[k, n] = (q - 8, 16, 128) * d
//   Q4_1, Q5_1         32 codes, FP16 d and m               q * d + m
//   Q2_K               16 x 16, FP16 d, dmin                q * (d * sc) - dmin * mn
//   Q4_K, Q5_K         8 x 32, FP16 d, dmin                 the same
//   Q3_K, Q6_K         16 x 16, FP16 d                      (q - 4, 32) * (d * sc)
//   IQ4_NL             32, FP16 d                           v[q] * d
//   IQ4_XS             8 x 32, FP16 d                       v[q] * (d * sc)
//   TQ1_0, TQ2_0       256, FP16 d                          (q - 1) * d
//   MXFP4              32, exponent e                       e2m1 * 2^(e - 127)
//   NVFP4              4 x 16, E4M3 d without a sign        e2m1 * d
//   Q1_0               128, FP16 d                          (q - 1/2) * 2d
//   Q2_0, Q2_0_G128    64, 128, FP16 d                      (q - 1) * d
//   IQ1, IQ2, IQ3      256                                  vector codes (base/vector_codes.h)
//
// sc and mn are integers of 6 bits (of Q2_K 4; of Q3_K and IQ4_XS signed; of Q6_K 8, signed); d * sc
// and dmin * mn become FP32 scales and zeros, one rounding each. v is a table of 16 integers. A zero
// of MXFP4 and NVFP4 has no sign, whatever its code.
#include <cstring>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gguf/gguf_blocks.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "scale", "input_scale", "bias"};
constexpr absl::string_view kOptional[] = {"scale", "input_scale", "bias"};
constexpr absl::string_view kSettings[] = {"type"};
constexpr absl::string_view kCodeTypes[] = {
    "Q4_0",      "Q4_1",    "Q5_0",   "Q5_1",  "Q8_0",    "Q2_K",  "Q3_K",  "Q4_K", "Q5_K",
    "Q6_K",      "IQ4_NL",  "IQ4_XS", "TQ1_0", "TQ2_0",   "MXFP4", "NVFP4", "Q1_0", "Q2_0",
    "Q2_0_G128", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"};

absl::StatusOr<QuantConfig> Read(const Setting& config) { return OneRule(config, {}); }

// Null for a type that is not read.
const GgufBlock* BlockNamed(absl::string_view name) {
  for (const GgufBlock& block : GgufBlocks()) {
    if (block.name == name) return &block;
  }
  return nullptr;
}

// The blocks of the tensor: its own type, or that of the setting where it is bytes.
absl::StatusOr<const GgufBlock*> FindBlock(const Setting& settings, const TensorView& weight) {
  const std::string all = absl::StrJoin(kCodeTypes, ", ");
  if (weight.dtype != "U8") {
    const GgufBlock* block = BlockNamed(weight.dtype);
    if (block != nullptr) return block;
    return BadTensor("weight", absl::StrCat("dtype ", weight.dtype),
                     absl::StrCat(all, ", or U8 with a setting type"));
  }
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(settings, "type"));
  const GgufBlock* block = BlockNamed(absl::AsciiStrToUpper(type));
  if (block != nullptr) return block;
  const Setting* got = FindSetting(settings, "type");
  if (got == nullptr) return BadValue("type", "nothing", absl::StrCat(all, ", as weight is U8"));
  return BadSetting("type", *got, all);
}

// N and K of the tensor, whose bytes are just those of its blocks.
absl::Status ReadShape(const GgufBlock& block, const TensorView& weight, HostWeight* out) {
  const auto bad_shape = [&](absl::string_view expected) {
    return BadTensor("weight", absl::StrCat("shape ", ShapeText(weight.shape)), expected);
  };
  if (weight.shape.size() != 2) return bad_shape("rank 2");
  out->n = weight.shape[0];
  const int64_t row = weight.shape[1], unit = weight.dtype == "U8" ? block.bytes : block.codes;
  if (out->n < 1 || row < 1) return bad_shape("dimensions of at least 1");
  if (row % unit != 0) {
    return bad_shape(weight.dtype == "U8"
                         ? absl::StrCat("rows of whole blocks, ", unit, " bytes each")
                         : absl::StrCat("K in blocks of ", unit, " (", block.name, ")"));
  }
  const std::optional<int64_t> k = CheckedMul(row / unit, block.codes);
  std::optional<int64_t> bytes = CheckedMul(row / unit, block.bytes);
  if (bytes) bytes = CheckedMul(*bytes, out->n);
  if (!bytes || !k) return bad_shape("a size below 2^63 bytes");
  out->k = *k;
  if (static_cast<int64_t>(weight.bytes.size()) == *bytes) return absl::OkStatus();
  return BadTensor("weight", absl::StrCat(weight.bytes.size(), " bytes"),
                   absl::StrCat(*bytes, " for ", weight.dtype, " ", ShapeText(weight.shape)));
}

// Scales and zeros of every block, [N, groups] as stored and then by group.
absl::Status DecodeCells(const GgufBlock& block, const TensorView& weight, HostWeight* out) {
  const int64_t groups = out->groups(), cells = out->n * groups,
                per_block = block.codes / block.group;
  const int64_t scale_bytes = out->scheme.scale_bytes();
  const int64_t zero_bytes = out->scheme.zero_bytes();
  std::vector<uint8_t> scales(cells * scale_bytes), zeros(cells * zero_bytes);
  const int64_t blocks = cells / per_block;
  for (int64_t i = 0; i < blocks; ++i) {
    const uint8_t* const from = weight.bytes.data() + i * block.bytes;
    const int64_t at = i * per_block;
    if (block.cells(from, scales.data() + at * scale_bytes, zeros.data() + at * zero_bytes)) {
      continue;
    }
    return BadTensor("weight",
                     absl::StrCat("a scale that is no number in block ", at % groups / per_block,
                                  " of column ", at / groups),
                     "finite numbers");
  }
  out->scales = Transposed(scales, out->n, groups, scale_bytes);
  std::vector<uint8_t>().swap(scales);  // before the zeros take as much
  if (zero_bytes > 0) out->zeros = Transposed(zeros, out->n, groups, zero_bytes);
  return absl::OkStatus();
}

// Blocks [N, blocks of a row] as [blocks of a row, N].
std::vector<uint8_t> TransposeBlocks(const GgufBlock& block, const TensorView& weight, int64_t n,
                                     int64_t count) {
  std::vector<uint8_t> out = AllocateCodes(static_cast<int64_t>(weight.bytes.size()));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out.data() + (i * n + row) * block.bytes,
                  weight.bytes.data() + (row * count + i) * block.bytes, block.bytes);
    }
  }
  return out;
}

std::vector<uint8_t> DecodeCodes(const GgufBlock& block, const TensorView& weight, int64_t n,
                                 int64_t k) {
  if (block.code == CodeKind::kVector) return TransposeBlocks(block, weight, n, k / block.codes);
  const int64_t row_bytes = k / block.codes * block.bytes;
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    for (int64_t at = col; at < col + count; at += kGgufRun, to += kGgufRun) {
      const uint8_t* const from =
          weight.bytes.data() + row * row_bytes + at / block.codes * block.bytes;
      block.run(from, static_cast<int>(at % block.codes / kGgufRun), to);
    }
  };
  return PackTransposed(n, k, block.bits, read);
}

absl::StatusOr<HostWeight> Decode(const Setting& settings, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight,
                        NeedTensor(tensors, "weight", "blocks [N, K], or U8 [N, bytes of a row]"));
  AWQD_ASSIGN_OR_RETURN(const GgufBlock* block, FindBlock(settings, *weight));
  HostWeight out;
  AWQD_RETURN_IF_ERROR(ReadShape(*block, *weight, &out));
  out.scheme = block->code == CodeKind::kVector
                   ? Vectors(block->vector)
                   : QuantizationScheme{.code = block->code,
                                        .bits = block->bits,
                                        .block_rows = BlockRows(block->group, out.k),
                                        .zero_kind = block->zero_kind,
                                        .zero = block->zero,
                                        .zero_dtype = block->zero_dtype,
                                        .scale_dtype = block->scale_dtype};
  out.table.assign(block->table.begin(), block->table.end());
  if (const TensorView* const scale = FindTensor(tensors, "scale")) {
    AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber("scale", *scale));
    out.scheme.outer = OuterKind::kOne;
    out.outer = {number};
  }
  if (weight->unread()) return out;
  AWQD_RETURN_IF_ERROR(DecodeCells(*block, *weight, &out));
  out.codes = DecodeCodes(*block, *weight, out.n, out.k);
  return out;
}

}  // namespace

const Format kGgufFormat = {.name = "gguf",
                            .quant_method = "gguf",
                            .suffixes = kSuffixes,
                            .optional_suffixes = kOptional,
                            .code_dtypes = kCodeTypes,
                            .settings = kSettings,
                            .read = Read,
                            .decode_parts = Decode};

}  // namespace awqd
