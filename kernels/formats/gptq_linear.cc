// Checks of GPTQ's tensors, and what g_idx and the zero points become.
#include "kernels/formats/gptq_linear.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
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

// --- Groups ---

std::vector<int32_t> Integers(const TensorView& tensor) {
  std::vector<int32_t> out(tensor.shape[0]);
  std::memcpy(out.data(), tensor.bytes.data(), out.size() * sizeof(int32_t));
  return out;
}

// That group j has `rows` rows, and the last one what is left.
absl::Status CheckCounts(const std::vector<int32_t>& group_of, int64_t groups, int64_t rows) {
  std::vector<int64_t> counts(groups);
  for (int32_t group : group_of) ++counts[group];
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t left = static_cast<int64_t>(group_of.size()) - group * rows;
    const int64_t expected = std::min(rows, left);
    if (counts[group] == expected) continue;
    return BadTensor(
        "g_idx", absl::StrCat(counts[group], " in-features of group ", group),
        absl::StrCat(expected, ": groups are of ", rows, ", but for a short last one"));
  }
  return absl::OkStatus();
}

// Where each in-feature's row goes: behind those before it of its group. Empty when it stays.
absl::StatusOr<std::vector<int32_t>> Places(const GptqLinear& settings, const TensorView* g_idx,
                                            int64_t k, int64_t groups, int64_t rows) {
  if (g_idx == nullptr) {
    if (groups == 1 || !settings.desc_act.value_or(false)) return std::vector<int32_t>();
    return BadTensor("g_idx", "nothing", "I32 [K], as desc_act is true");
  }
  const std::vector<int32_t> group_of = Integers(*g_idx);
  int64_t moved = -1;  // the first that is not where k / group_size has it
  bool zeros = true;
  for (int64_t i = 0; i < k; ++i) {
    if (group_of[i] < 0 || group_of[i] >= groups) {
      return BadTensor("g_idx", absl::StrCat(group_of[i], " at index ", i),
                       absl::StrCat("0 to ", groups - 1, ", a row of \"scales\""));
    }
    if (moved < 0 && group_of[i] != i / rows) moved = i;
    zeros &= group_of[i] == 0;
  }
  // Writers that have no use for it may leave it at 0.
  if (moved < 0 || (zeros && !settings.desc_act.value_or(false))) return std::vector<int32_t>();
  if (!settings.desc_act.value_or(true)) {
    return BadTensor("g_idx", absl::StrCat(group_of[moved], " at index ", moved),
                     absl::StrCat(moved / rows, ", index / group_size, as desc_act is false"));
  }
  AWQD_RETURN_IF_ERROR(CheckCounts(group_of, groups, rows));
  std::vector<int64_t> next(groups);
  for (int64_t group = 0; group < groups; ++group) next[group] = group * rows;
  std::vector<int32_t> out(k);
  for (int64_t i = 0; i < k; ++i) out[i] = static_cast<int32_t>(next[group_of[i]]++);
  return out;
}

// --- Zero points ---

absl::Status DecodeZeros(const GptqLinear& settings, const TensorView& qzeros, int64_t groups,
                         HostWeight* out) {
  const int bits = settings.bits, middle = 1 << (bits - 1), less = settings.zeros_less_one ? 1 : 0;
  AWQD_RETURN_IF_ERROR(CheckShape("qzeros", qzeros, {groups, WordsOfCodes(out->n, bits)},
                                  absl::StrCat("[groups, words of N codes of ", bits, " bits]")));
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
  out->description = Symmetric(bits, out->description.block_rows, *out->description.scale_dtype);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HostWeight> DecodeGptqLinear(const GptqLinear& settings,
                                            const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* qweight,
                        NeedTensor(tensors, "qweight", "I32 [words of K, N]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* qzeros,
                        NeedTensor(tensors, "qzeros", "I32 [groups, words of N]"));
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
  out.description = Asymmetric(settings.bits, BlockRows(rows, out.k), type);
  AWQD_ASSIGN_OR_RETURN(const std::vector<int32_t> place,
                        Places(settings, g_idx, out.k, groups, rows));
  AWQD_RETURN_IF_ERROR(DecodeZeros(settings, *qzeros, groups, &out));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.order.resize(place.size());
  for (size_t i = 0; i < place.size(); ++i) out.order[place[i]] = static_cast<int32_t>(i);
  out.scales.assign(scales->bytes.begin(), scales->bytes.end());
  out.codes = UnpackGptqRows(qweight->bytes, out.k, out.n, settings.bits, settings.words, place);
  return out;
}

}  // namespace awqd
