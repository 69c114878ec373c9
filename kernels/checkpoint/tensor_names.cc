// Taking names of tensors apart.
#include "kernels/checkpoint/tensor_names.h"

#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace awqd::model {
namespace {

// Scales of activations and of the cache of keys and values, and what a router adds to its product.
constexpr absl::string_view kWithoutEffect[] = {"e_score_correction_bias",
                                                "expert_bias",
                                                "tid2eid",
                                                "input_scale",
                                                "input_scale_ub",
                                                "input_scale_inv",
                                                "input_zero_point",
                                                "input_global_scale",
                                                "output_scale",
                                                "output_zero_point",
                                                "output_global_scale",
                                                "activation_scale",
                                                "q_scale",
                                                "k_scale",
                                                "v_scale",
                                                "kv_scale",
                                                "k_bias",
                                                "v_bias",
                                                "prob_scale",
                                                "q_zero_point",
                                                "k_zero_point",
                                                "v_zero_point",
                                                "q_global_scale",
                                                "k_global_scale",
                                                "v_global_scale"};
constexpr absl::string_view kIntegerTypes[] = {"U8", "I8", "U16", "I16", "U32", "I32"};
// The beginnings of the types of GGUF whose tensors are blocks of codes.
constexpr absl::string_view kBlockTypes[] = {"Q", "IQ", "TQ", "MXFP", "NVFP", "type "};
constexpr absl::string_view kNamesOfCodes[] = {
    "weight", "qweight", "weight_packed", "weight_q", "W_q",   "codes",        "blocks",
    "B",      "qdata",   "q_weight",      "trellis",  "Qidxs", "_weight_qdata"};
// Families that add something to the tensors of another stand before that one.
constexpr Family kFamilies[] = {{"comfy_quant", "ComfyUI", false, true},
                                {"scaled_fp8", "ComfyUI", false, true},
                                {".scale_weight", "ComfyUI", false, true},
                                {"._weight_qdata", "PyTorch's torchao", true},
                                {".weight._data", "Optimum Quanto", true},
                                {".weight._data._data", "Optimum Quanto", true},
                                {".biases", "Apple's MLX", true},
                                {".codebooks", "AQLM"},
                                {".centroids.weight", "Microsoft's VPTQ"},
                                {".Qidxs", "QuIP#"},
                                {".q_weight", "ExLlamaV2"},
                                {".trellis", "ExLlamaV3", true},
                                {".weight_packed", "compressed-tensors", true},
                                {".qweight", "AWQ, GPTQ or AutoRound", true},
                                {".weight.absmax", "bitsandbytes", true},
                                {".SCB", "bitsandbytes", true},
                                {".W_q", "HQQ", true},
                                {".weight_scale_2", "ModelOpt", true},
                                {".weight_scale_inv", "FP8", true},
                                {".weight_scale", "FP8, INT8 or FP4", true},
                                {"_blocks", "MXFP4", true}};
constexpr absl::string_view kEndingsOfCodes[] = {"_packed", "_blocks", "_qweight", "_qdata"};

// --- Renaming and retyping entries of a checkpoint's tensors ---

using Tensors = std::map<absl::string_view, TensorLocation>;

constexpr absl::string_view kScale = "weight_scale";
constexpr absl::string_view kBlockScale = "scale_inv";
// Behind '_', and what it becomes.
constexpr std::pair<absl::string_view, absl::string_view> kRespelledSuffixes[] = {
    {kScale, kScale},
    {"weight_scale_2", "weight_scale_2"},
    {kBlockScale, "weight_scale_inv"},
    {"input_scale", "input_scale"},
    {"pre_quant_scale", "pre_quant_scale"},
    {"bias", "bias"}};
constexpr absl::string_view kStorageTypes[] = {"F16", "BF16", "F32", "F64",
                                               "I8",  "I16",  "I32", "I64"};

// Whether scales of blocks [E, N / block, K / block] are those of the codes of all experts.
bool AreOfBlocks(const TensorInfo& codes, const TensorInfo& scales) {
  return codes.dtype == "F8_E4M3" && codes.shape.size() == 3 && scales.shape.size() == 3 &&
         codes.shape[0] == scales.shape[0];
}

// Whether scales [E, N, groups] show that the codes of all experts are [E, N, ...]. Codes [E, K, N]
// have fewer rows of scales than rows, or more groups than the row has codes.
bool AreByOutFeature(const TensorInfo& codes, const TensorInfo& scales) {
  return codes.shape.size() == 3 && scales.shape.size() == 3 && codes.shape[0] == scales.shape[0] &&
         codes.shape[1] == scales.shape[1] && scales.shape[2] < codes.shape[2];
}

void Rename(absl::string_view from, std::string to, Tensors* tensors, RespelledTensors* kept) {
  const auto it = tensors->find(from);
  if (it == tensors->end() || tensors->contains(to)) return;
  const TensorLocation location = it->second;
  tensors->erase(it);
  tensors->emplace(kept->names.emplace_back(std::move(to)), location);
}

void RespellExperts(Tensors* tensors, RespelledTensors* kept) {
  std::vector<absl::string_view> paths;
  for (const auto& [name, location] : *tensors) {
    if (location.info->shape.size() != 3 || absl::EndsWith(name, ".weight")) continue;
    const auto scales = tensors->find(absl::StrCat(name, "_", kScale));
    const auto blocks = tensors->find(absl::StrCat(name, "_", kBlockScale));
    if ((scales != tensors->end() && AreByOutFeature(*location.info, *scales->second.info)) ||
        (blocks != tensors->end() && AreOfBlocks(*location.info, *blocks->second.info))) {
      paths.push_back(name);
    }
  }
  for (const absl::string_view path : paths) {
    for (const auto& [from, to] : kRespelledSuffixes) {
      Rename(absl::StrCat(path, "_", from), absl::StrCat(path, ".", to), tensors, kept);
    }
    Rename(path, absl::StrCat(path, ".weight"), tensors, kept);
  }
}

void RespellStorage(Tensors* tensors, RespelledTensors* kept) {
  for (const auto& [name, location] : *tensors) {
    absl::string_view weight = name;
    if (!absl::ConsumeSuffix(&weight, ".absmax")) continue;
    const auto codes = tensors->find(weight);
    if (codes == tensors->end() ||
        !absl::c_linear_search(kStorageTypes, codes->second.info->dtype)) {
      continue;
    }
    TensorInfo& bytes = kept->infos.emplace_back(*codes->second.info);
    bytes.dtype = "U8";
    bytes.shape = {bytes.bytes(), 1};
    codes->second.info = &bytes;
  }
}

}  // namespace

SplitName SplitTensorName(const Format& format, absl::string_view tensor) {
  SplitName out;
  for (absl::string_view suffix : format.suffixes) {
    absl::string_view path = tensor;
    if (suffix.size() <= out.suffix.size() || !absl::ConsumeSuffix(&path, suffix)) continue;
    if (path.empty() || absl::ConsumeSuffix(&path, format.separator)) out = {path, suffix};
  }
  return out;
}

std::string TensorName(const Format& format, absl::string_view path, absl::string_view suffix) {
  return absl::StrCat(path, format.separator, suffix);
}

bool IsOptional(const Format& format, absl::string_view suffix) {
  return absl::c_linear_search(format.optional_suffixes, suffix);
}

bool IsCommon(const Format& format, absl::string_view suffix) {
  return absl::c_linear_search(format.common_suffixes, suffix);
}

bool TellsOfLinear(const Format& format, absl::string_view suffix) {
  if (IsCommon(format, suffix)) return false;
  if (format.common_suffixes.empty()) return !IsOptional(format, suffix);
  const auto needed = [&](absl::string_view other) {
    return other != format.suffixes.front() && !IsOptional(format, other);
  };
  return needed(suffix) || absl::c_all_of(format.suffixes, [&](absl::string_view other) {
           return !needed(other) || IsCommon(format, other);
         });
}

bool IsMarker(const Format& format, absl::string_view suffix, const TensorInfo& tensor) {
  if (suffix != format.suffixes.front()) return false;
  return format.code_dtypes.empty() || absl::c_linear_search(format.code_dtypes, tensor.dtype);
}

bool IsWithoutEffect(absl::string_view last) {
  return absl::c_any_of(kWithoutEffect, [&](absl::string_view name) {
    return last == name || absl::EndsWith(last, absl::StrCat("_", name));
  });
}

bool IsNameOfScales(absl::string_view last) {
  return !IsWithoutEffect(last) &&
         (absl::StrContains(last, "scale") || absl::StrContains(last, "absmax") || last == "SCB" ||
          last == "qzeros" || last == "biases");
}

Codes ParseCodes(absl::string_view name, const TensorInfo& tensor) {
  const absl::string_view dtype = tensor.dtype;
  const auto begins = [&](absl::string_view with) { return absl::StartsWith(dtype, with); };
  const bool floats = begins("F8") || begins("F6") || begins("F4");
  const bool blocks = absl::c_any_of(kBlockTypes, begins);
  const bool integers = absl::c_linear_search(kIntegerTypes, dtype);
  if (!(floats || blocks || integers) || (!blocks && tensor.shape.size() < 2)) return {};
  const size_t dot = name.rfind('.');
  const absl::string_view last = dot == name.npos ? name : name.substr(dot + 1);
  const absl::string_view module = dot == name.npos ? name : name.substr(0, dot);
  if (IsWithoutEffect(last)) return {};
  if (IsNameOfScales(last)) return {module, true};
  if (absl::c_linear_search(kNamesOfCodes, last)) return {module, true};
  for (absl::string_view ending : kEndingsOfCodes) {
    absl::string_view path = name;
    if (absl::ConsumeSuffix(&path, ending)) return {path, true};
  }
  return {name, floats || blocks};
}

std::pair<const Family*, absl::string_view> FindFamily(
    const std::map<absl::string_view, TensorLocation>& tensors) {
  for (const Family& family : kFamilies) {
    for (const auto& [name, tensor] : tensors) {
      if (absl::EndsWith(name, family.ending)) return {&family, name};
    }
  }
  return {};
}

void RespellTensors(std::map<absl::string_view, TensorLocation>* tensors, RespelledTensors* kept) {
  RespellExperts(tensors, kept);
  RespellStorage(tensors, kept);
}

}  // namespace awqd::model
