// Checks of GPTQ's tensors, and what the zero points become.
#include "kernels/formats/gptq_linear.h"

#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/formats/group_index.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr int64_t kMostFeatures = std::numeric_limits<int32_t>::max();  // an order is of int32

// K, which qweight tells up to the codes that fit in its last word, and g_idx exactly.
absl::StatusOr<int64_t> InFeatures(const GptqLinear& settings, const TensorView& qweight,
                                   const TensorView* g_idx) {
  const int bits = settings.bits;
  const int64_t rows = qweight.shape[0], most = rows * 32 / bits;
  if (most > kMostFeatures) {
    return BadTensor("qweight", absl::StrCat("K = ", most),
                     absl::StrCat("at most ", kMostFeatures));
  }
  if (g_idx == nullptr) {
    if (rows * 32 % bits == 0) return most;
    return BadTensor("qweight", absl::StrCat(rows, " rows"),
                     absl::StrCat("a multiple of ", bits == 3 || bits == 6 ? 3 : bits,
                                  " rows of words with codes of ", bits, " bits"));
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("g_idx", *g_idx, {"I32"}, 1));
  const int64_t k = g_idx->shape[0];
  if (k <= most && WordsOfCodes(k, bits) == rows) return k;
  return BadTensor("g_idx", absl::StrCat("shape [", k, "]"),
                   absl::StrCat("[", most, "] (K of ", rows, " rows of \"qweight\" with codes of ",
                                bits, " bits)"));
}

absl::Status CheckPlanes(const GptqLinear& settings, int64_t k, int64_t n) {
  if (settings.words != GptqWords::kPlanes || (k % 32 == 0 && n % 32 == 0)) {
    return absl::OkStatus();
  }
  return BadTensor("qweight", absl::StrCat("K = ", k, ", N = ", n),
                   "multiples of 32: a bit plane holds 32 codes");
}

// --- Zero points ---

absl::Status DecodeZeros(const GptqLinear& settings, const TensorView& qzeros, int64_t groups,
                         HostWeight* out) {
  const int bits = settings.bits, middle = 1 << (bits - 1), less = settings.zeros_less_one ? 1 : 0;
  AWQD_RETURN_IF_ERROR(CheckShape("qzeros", qzeros, {groups, WordsOfCodes(out->n, bits)},
                                  ExplainWords("qzeros", out->n, bits, qzeros.shape[1])));
  out->zeros = UnpackGptqColumns(qzeros.bytes, groups, out->n, bits, settings.words, less);
  if (!settings.sym.value_or(false)) return absl::OkStatus();
  const auto other = absl::c_find_if(out->zeros, [&](uint8_t zero) { return zero != middle; });
  if (other != out->zeros.end()) {
    const int64_t at = other - out->zeros.begin();
    return BadTensor(
        "qzeros", absl::StrCat("zero point ", *other, " at [", at / out->n, ", ", at % out->n, "]"),
        absl::StrCat(middle, ", stored as ", middle - less, ", as sym is true"));
  }
  out->zeros.clear();
  out->scheme = Symmetric(bits, out->scheme.block_rows, *out->scheme.scale_dtype);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HostWeight> DecodeGptqLinear(const GptqLinear& settings,
                                            const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight,
                        NeedTensor(tensors, "qweight", "I32 [K*bits/32, N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qzeros,
                        NeedTensor(tensors, "qzeros", "I32 [groups, N*bits/32]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales,
                        NeedTensor(tensors, "scales", "F16 or BF16 [groups, N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("qweight", *qweight, {"I32"}, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("qzeros", *qzeros, {"I32"}, 2));
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("scales", *scales, 2, false));
  const TensorView* const g_idx = FindTensor(tensors, "g_idx");
  HostWeight out;
  const int64_t groups = scales->shape[0];
  out.n = scales->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape("qweight", *qweight, {qweight->shape[0], out.n},
                                  absl::StrCat("N = ", out.n, " of tensor \"scales\"")));
  AWQD_ASSIGN_OR_RETURN(out.k, InFeatures(settings, *qweight, g_idx));
  AWQD_RETURN_IF_ERROR(CheckPlanes(settings, out.k, out.n));
  // A group may be larger than a small layer.
  const int64_t said = settings.group_size > out.k ? -1 : settings.group_size;
  AWQD_ASSIGN_OR_RETURN(const int64_t rows, GroupRows(said, out.k, groups, "scales", true));
  out.scheme = Asymmetric(settings.bits, BlockRows(rows, out.k), type);
  const GroupIndex index = {"g_idx", "scales", settings.desc_act, "desc_act is true",
                            "desc_act is false"};
  AWQD_ASSIGN_OR_RETURN(const std::vector<int32_t> place,
                        PlacesByGroup(index, g_idx, out.k, groups, rows));
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, *qzeros, groups, &out));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.order = OrderOfPlaces(place);
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  if (qweight->unread()) return out;
  out.codes = UnpackGptqRows(qweight->bytes, out.k, out.n, settings.bits, settings.words, place);
  return out;
}

}  // namespace awqd
