// Names of tensors: which linear a tensor is of, and what it is of it, as a format spells them.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "kernels/checkpoint/containers/safetensors.h"
#include "kernels/formats/format.h"

namespace awqd::model {

struct SplitName {
  absl::string_view path;
  absl::string_view suffix;  // empty for a tensor that is none of the format's
};

// The path and the longest of the format's suffixes that the tensor's name ends with.
SplitName SplitTensorName(const Format& format, absl::string_view tensor);

std::string TensorName(const Format& format, absl::string_view path, absl::string_view suffix);

bool IsOptional(const Format& format, absl::string_view suffix);
bool IsCommon(const Format& format, absl::string_view suffix);

// Whether a tensor of that suffix tells of a linear, its codes there or not: a needed one, or,
// where those are all common, any that is not.
bool TellsOfLinear(const Format& format, absl::string_view suffix);

// Whether a tensor of that suffix marks a linear as quantised in this format.
bool IsMarker(const Format& format, absl::string_view suffix, const TensorInfo& tensor);

// Whether the last part of a tensor's name is that of a scale of activations or of the cache of
// keys and values, or of a router, which says nothing of a weight.
bool IsWithoutEffect(absl::string_view last);

// A tensor that holds the codes of a quantised linear, or the scales of one, in whatever format:
// told by its type and name alone.
struct Codes {
  absl::string_view path;  // of the linear; empty where the tensor is none of these
  // Whether that is certain. Else the tensor holds codes only where there are scales beside it.
  bool certain = false;
};
Codes ParseCodes(absl::string_view name, const TensorInfo& tensor);

// Whether the last part of a tensor's name is that of scales of a weight.
bool IsNameOfScales(absl::string_view last);

// A family of checkpoints that names of tensors tell of where there are no settings.
struct Family {
  absl::string_view ending;  // of the name of such a tensor
  absl::string_view name;    // for people: "ComfyUI"
  bool read = false;         // whether its linears are read, once there are settings
  bool alone = false;        // or in a file of its own
};
// The first family, in the order of a table, that one of the tensors is of, and that tensor's name.
// Null where there is none.
std::pair<const Family*, absl::string_view> FindFamily(
    const std::map<absl::string_view, TensorLocation>& tensors);

// --- Tensors that some writers spell in other ways than formats know ---

// Names and types in the formats' way. Tensors point here, so it outlives them.
struct RespelledTensors {
  std::deque<std::string> names;
  std::deque<TensorInfo> infos;
};

// Changes the entries of `tensors`, whose bytes stay where they are:
//
//   - "experts.up_proj" with "experts.up_proj_weight_scale", as ModelOpt writes all experts of a
//     projection, become "experts.up_proj.weight" and "experts.up_proj.weight_scale". So do the
//     other tensors of that linear. Only where the scales show that the codes are [E, N, K]: some
//     models have [E, K, N]. "experts.up_proj_scale_inv", transformers' scales of FP8 in blocks,
//     always stand beside [E, N, K].
//   - "PATH.weight" of floats or signed integers with "PATH.weight.absmax" becomes U8: bitsandbytes
//     stores its 4-bit codes as any type (bnb_4bit_quant_storage).
void RespellTensors(std::map<absl::string_view, TensorLocation>* tensors, RespelledTensors* kept);

}  // namespace awqd::model
