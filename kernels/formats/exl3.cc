// Format "exl3", as ExLlamaV3 writes it: tiles of a trellis, and signs with scales of either side.
//
//   trellis I16 [K / 16, N / 16, 16 * bits], bits 1 to 8 (base/trellis.h); K and N multiples of 128
//   suh F16 [K], svh F16 [N]; or as older files have them su I16 [K / 16], sv I16 [N / 16]: signs,
//       the first in the lowest bit, 1 for -1
//   mcg or mul1 I32 [], the multiplier of that codebook; without, it is 3INST
//   bias [N], optional
//
//   W = diag(suh) H trellis H diag(svh)
//
// where H has Sylvester's Hadamard matrices of 128 times 1 / sqrt(128) on its diagonal. The first H
// becomes the weight's transform and suh its factor; the scheme has the other H, and svh is its
// outer. Each linear has its own bits: those of the settings are a mean. K and N that were padded
// stay padded.
//
// Source: exllamav3 1.4.1, modules/quant/exl3.py and exllamav3_ext/quant. Its reconstruct rounds
// entries of the trellis as here, and FP16 after each of its transforms, which here are FP32.
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"trellis", "suh", "svh",  "su",
                                           "sv",      "mcg", "mul1", "bias"};
constexpr auto kOptional = absl::MakeSpan(kSuffixes).subspan(1);
constexpr absl::string_view kCommon[] = {"bias"};
constexpr absl::string_view kCodebook = "codebook", kSettings[] = {kCodebook};
constexpr int64_t kBlock = kTrellisTransform.size;

// The tensor without which a linear of this codebook would be read by another; empty: none.
absl::string_view MultiplierOf(const Setting& settings) {
  const Setting* const codebook = FindSetting(settings, kCodebook);
  if (codebook == nullptr || (codebook->text != "mcg" && codebook->text != "mul1")) return "";
  return codebook->text;
}

absl::string_view Lacks(const Setting& settings, HasTensor has) {
  const absl::string_view multiplier = MultiplierOf(settings);
  if (!multiplier.empty() && !has(multiplier)) return multiplier;
  if (!has("suh") && !has("su")) return "suh";
  return has("svh") || has("sv") ? "" : "svh";
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckWord(config, kCodebook, {"3inst", "mcg", "mul1"}));
  return OneRule(config, OnlySettings(config, kSettings));
}

// Elements of two bytes in the last dimension: a request has two of them as one I32.
int64_t Halves(const TensorView& tensor) {
  return tensor.shape.back() * (tensor.dtype == "I32" ? 2 : 1);
}

// Sets k, n and the bits of the scheme.
absl::Status ReadShape(const TensorView& trellis, HostWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckTensor("trellis", trellis, {"I16", "I32"}, 3));
  const auto bad = [&](absl::string_view expected) {
    return BadTensor("trellis", absl::StrCat("shape ", ShapeText(trellis.shape)), expected);
  };
  const int64_t halves = Halves(trellis);
  if (halves % kTrellisTile != 0 || halves > 8 * kTrellisTile) {
    return bad("I16 [K/16, N/16, 16 * bits] with 1 to 8 bits");
  }
  if (trellis.shape[0] % (kBlock / kTrellisTile) != 0 ||
      trellis.shape[1] % (kBlock / kTrellisTile) != 0) {
    return bad("[K/16, N/16, 16 * bits] with K and N multiples of 128");
  }
  out->k = trellis.shape[0] * kTrellisTile;
  out->n = trellis.shape[1] * kTrellisTile;
  out->scheme.bits = static_cast<int>(halves / kTrellisTile);
  return absl::OkStatus();
}

// A tensor of scales F16 [count], or the one of signs.
absl::StatusOr<std::vector<float>> ReadSide(const LinearTensors& tensors, absl::string_view scales,
                                            absl::string_view signs, int64_t count) {
  const TensorView* const packed = FindTensor(tensors, signs);
  if (packed == nullptr) {
    AWQD_ASSIGN_OR_RETURN(const TensorView* side,
                          NeedTensor(tensors, scales, absl::StrCat("F16 [", count, "]")));
    AWQD_RETURN_IF_ERROR(CheckTensor(scales, *side, {"F16"}, 1));
    AWQD_RETURN_IF_ERROR(CheckShape(scales, *side, {count}, "as \"trellis\" says"));
    return ToFloats(scales, *side);
  }
  if (FindTensor(tensors, scales) != nullptr) {
    return BadTensor(signs, "one", absl::StrCat("none beside \"", scales, "\""));
  }
  AWQD_RETURN_IF_ERROR(CheckTensor(signs, *packed, {"I16", "I32"}, 1));
  if (Halves(*packed) * 16 != count) {
    return BadTensor(signs, absl::StrCat("shape ", ShapeText(packed->shape)),
                     absl::StrCat("I16 [", count / 16, "], as \"trellis\" says"));
  }
  std::vector<float> out(count);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = (packed->bytes[i / 8] >> (i % 8) & 1) != 0 ? -1.0f : 1.0f;
  }
  return out;
}

// Whether there is the tensor of a codebook, whose multiplier has to be `expected`.
absl::StatusOr<bool> HasCodebook(const LinearTensors& tensors, absl::string_view name,
                                 uint32_t expected) {
  const TensorView* const tensor = FindTensor(tensors, name);
  if (tensor == nullptr) return false;
  const size_t rank = tensor->shape.size() == 1 ? 1 : 0;
  AWQD_RETURN_IF_ERROR(CheckTensor(name, *tensor, {"I32"}, rank));
  if (rank == 1) AWQD_RETURN_IF_ERROR(CheckShape(name, *tensor, {1}, "one number"));
  const uint32_t multiplier = LoadWord(tensor->bytes.data());
  if (multiplier == expected) return true;
  return BadTensor(name, absl::StrCat("multiplier 0x", absl::Hex(multiplier)),
                   absl::StrCat("0x", absl::Hex(expected)));
}

absl::StatusOr<HostWeight> Decode(const Setting& settings, const LinearTensors& tensors) {
  if (const absl::string_view name = MultiplierOf(settings); !name.empty()) {
    AWQD_RETURN_IF_ERROR(NeedTensor(tensors, name, "I32 []").status());
  }
  AWQD_ASSIGN_OR_RETURN(const TensorView* trellis,
                        NeedTensor(tensors, "trellis", "I16 [K/16, N/16, 16 * bits]"));
  HostWeight out;
  AWQD_RETURN_IF_ERROR(ReadShape(*trellis, &out));
  AWQD_ASSIGN_OR_RETURN(const bool mcg, HasCodebook(tensors, "mcg", kMcgMultiplier));
  AWQD_ASSIGN_OR_RETURN(const bool mul1, HasCodebook(tensors, "mul1", kMul1Multiplier));
  if (mcg && mul1) return BadTensor("mul1", "one", "none beside \"mcg\"");
  out.scheme = Trellis(mcg    ? TrellisCode::kMcg
                       : mul1 ? TrellisCode::kMul1
                              : TrellisCode::k3Inst,
                       out.scheme.bits);
  out.scheme.outer = OuterKind::kColumn;
  AWQD_ASSIGN_OR_RETURN(out.factor, ReadSide(tensors, "suh", "su", out.k));
  AWQD_ASSIGN_OR_RETURN(out.outer, ReadSide(tensors, "svh", "sv", out.n));
  out.hadamard = kTrellisTransform;
  if (!trellis->unread()) out.codes.assign(trellis->bytes.begin(), trellis->bytes.end());
  return out;
}

}  // namespace

const Format kExl3Format = {.name = "exl3",
                            .quant_method = "exl3",
                            .suffixes = kSuffixes,
                            .optional_suffixes = kOptional,
                            .lacks = Lacks,
                            .common_suffixes = kCommon,
                            .code_rank = 3,
                            .settings = kSettings,
                            .read = Read,
                            .decode_parts = Decode};

}  // namespace awqd
