// Format: how a checkpoint spells a quantised linear. Load time only, host only.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/formats/settings.h"
#include "kernels/weight.h"

namespace awqd {

// A tensor as a file or a request holds it. Does not own its bytes.
struct TensorView {
  std::string dtype;           // safetensors spelling: "I32", "F16", "BF16", "F32", ...
  std::vector<int64_t> shape;  // row-major
  absl::Span<const uint8_t> bytes;
  // How many experts the tensors of a checkpoint hold that this one is from, cut or not; 0 where
  // that is not known.
  int64_t experts = 0;
  // Ways in which the rows of codes [N, K] may be those of several projections, each as the numbers
  // of their rows, which add up to N. The first is by projections, such as q, k and v. Empty where
  // the checkpoint does not tell.
  std::vector<std::vector<int64_t>> fused = {};
  // The checkpoint may tell more of codes than their tensor: in and out features, 0 where it does
  // not, and JSON that the file has on the weight (Format::metadata).
  int64_t in_features = 0;
  int64_t out_features = 0;
  std::string metadata = {};

  // Whether its size is known and its bytes are not: `bytes` points nowhere. Of codes only.
  bool unread() const { return bytes.data() == nullptr && !bytes.empty(); }
};

// The tensors of one quantised linear by their suffix: "qweight", "qzeros", "scales", "bias".
using LinearTensors = std::map<std::string, TensorView, std::less<>>;

// Whether a linear has a tensor of that suffix.
using HasTensor = absl::FunctionRef<bool(absl::string_view suffix)>;

// Some modules of a checkpoint by their paths, "model.layers.0.mlp.up_proj". Components that a
// wrapper puts before a path ("model.language_model.") do not count for kPath and kContains.
struct ModulePattern {
  enum class Kind {
    kEvery,     // every module
    kPath,      // the module `text`, and all beneath it
    kContains,  // every module whose path has the components `text`, and all beneath it
    kRegex,     // `text` is a regular expression that the beginning of the path matches
  };
  Kind kind = Kind::kEvery;
  std::string text;

  friend bool operator==(const ModulePattern&, const ModulePattern&) = default;
};

// A path, or a wildcard over all of one: "*" stands for any characters, "?" for one.
ModulePattern WildcardPattern(absl::string_view text);

struct Format;

// The settings of some linears.
struct LinearRule {
  std::vector<ModulePattern> targets;  // of the linears that it is for: any of these
  Setting settings;                    // Format::settings of `format`, and no others
  const Format* format = nullptr;      // null: the one that read it. FindFormat puts it in
  // The reason that its settings are not read: no linear of its targets is served. UNIMPLEMENTED or
  // INVALID_ARGUMENT; OK for settings that are read.
  absl::Status unread = absl::OkStatus();
};

// The settings of a checkpoint as a format reads them: which linears are quantised, and how.
struct QuantConfig {
  // A linear belongs to the first one that matches it and whose format has its tensors.
  std::vector<LinearRule> rules;
  // Settings that linears have beside those of their rules, of transforms of activations; a linear
  // may have those of several. `unread` holds for its linears whatever their rules are.
  struct Addition {
    LinearRule rule;
    std::vector<ModulePattern> left_out;
  };
  std::vector<Addition> additions;
  // Linears that the settings call not quantised. Their tensors decide: where these are codes with
  // their scales, the rules hold.
  std::vector<ModulePattern> left_out;
  std::string note;  // for the log: what of the settings has no effect here
};

// INVALID_ARGUMENT beyond 10,000: each rule has settings of its own, which take memory.
absl::Status CheckRules(size_t rules);

// One rule for every linear but those that `config` leaves out by these lists.
absl::StatusOr<QuantConfig> OneRule(const Setting& config, Setting settings,
                                    std::initializer_list<absl::string_view> left_out = {
                                        "modules_to_not_convert"});

struct Format {
  // Unique. PackedWeight.format, WeightInfo.format, and the folder of its goldens.
  absl::string_view name;
  // As quantization_config.quant_method says it. Several formats may have the same.
  absl::string_view quant_method;
  // Another name that it has there; empty without.
  absl::string_view other_quant_method;

  // Suffixes of the tensors that make up one linear. The first is that of the codes: it marks a
  // linear as quantised.
  absl::Span<const absl::string_view> suffixes;
  // Those of the suffixes whose tensors may be missing.
  absl::Span<const absl::string_view> optional_suffixes;
  // Returns an optional suffix whose tensor a linear with these settings needs all the same and has
  // not; empty when there is none. Null: they may all be missing.
  absl::string_view (*lacks)(const Setting& settings, HasTensor has) = nullptr;
  // And those that modules have too which are not quantised. Without the tensor of codes the others
  // are what is left of a linear that lost it; these say nothing.
  absl::Span<const absl::string_view> common_suffixes;
  // Types of a tensor of codes. Of another type it belongs to a linear that is not quantised, which
  // matters where the suffix is as common as "weight". Empty: any.
  absl::Span<const absl::string_view> code_dtypes;
  // Dimensions of the tensor of codes of one linear; one more where it holds all experts.
  int code_rank = 2;
  // The text between a linear's path and a suffix.
  absl::string_view separator = ".";
  // Those of the suffixes whose tensor is one for all experts where the others are cut.
  absl::Span<const absl::string_view> uncut_suffixes;
  // Suffixes of further tensors of a linear that say nothing of its weight. A tensor beside its
  // codes that has neither these nor those above refuses the linear.
  absl::Span<const absl::string_view> suffixes_without_effect;
  // The name behind a linear's path under which the metadata of a file tell of its weight; empty
  // where a writer has no such metadata.
  absl::string_view metadata;
  // Whether tensors alone may not tell K and N, which TensorView::in_features then does.
  bool needs_features = false;
  // Bytes for each code that Decode takes for a while, beside the tensors and its result.
  int spare_bytes_per_code = 0;
  // Names of the settings that Decode knows, which are those of an inline weight.
  absl::Span<const absl::string_view> settings;

  // The settings of a checkpoint of this quant_method. UNIMPLEMENTED saying what of them this
  // format does not read; INVALID_ARGUMENT when no format could.
  absl::StatusOr<QuantConfig> (*read)(const Setting& config);

  // Decodes one linear. INVALID_ARGUMENT naming the setting, or the tensor by its suffix, what was
  // found and what was expected. Where the codes are unread, HostWeight::codes is empty and all
  // else is as it would be with them: what a weight will take is known before it is read. Scales
  // and zeros that lie among the codes are empty too.
  absl::StatusOr<HostWeight> Decode(const Setting& settings, const LinearTensors& tensors) const;
  // Does it, but for the name of the format and the bias. Settings that it does not read may be
  // UNIMPLEMENTED.
  absl::StatusOr<HostWeight> (*decode_parts)(const Setting& settings, const LinearTensors& tensors);

  // For the log: what Decode reads in another way than the settings say, for a linear that it
  // decodes. Mostly empty; null: nothing ever.
  std::string (*remark)(const Setting& settings, const LinearTensors& tensors) = nullptr;
};

extern const Format kAwqFormat;                 // awq/awq.cc
extern const Format kIntQuantizedFormat;        // compressed_tensors/int_quantized.cc
extern const Format kPlainFormat;               // plain.cc
extern const Format kFasterTransformerFormat;   // fastertransformer.cc
extern const Format kGemliteFormat;             // gemlite.cc
extern const Format kFp8Format;                 // fp8.cc
extern const Format kBlockwiseInt8Format;       // fp8.cc
extern const Format kModelOptFormat;            // modelopt.cc
extern const Format kMxfp4Format;               // mxfp4.cc
extern const Format kBitsAndBytesFormat;        // bitsandbytes.cc
extern const Format kBitsAndBytesInt8Format;    // bitsandbytes.cc
extern const Format kHqqFormat;                 // hqq.cc
extern const Format kGptqFormat;                // gptq/gptq.cc
extern const Format kAutoRoundFormat;           // gptq/auto_round.cc
extern const Format kPackQuantizedFormat;       // compressed_tensors/pack_quantized.cc
extern const Format kFloatQuantizedFormat;      // compressed_tensors/float_quantized.cc
extern const Format kNvfp4PackQuantizedFormat;  // compressed_tensors/fp4_pack_quantized.cc
extern const Format kMxfp4PackQuantizedFormat;  // compressed_tensors/fp4_pack_quantized.cc
extern const Format kQServeFormat;              // qserve.cc
extern const Format kAwqGemvFormat;             // awq/gemv.cc
extern const Format kAwqGemvFastFormat;         // awq/gemv.cc
extern const Format kAwqMarlinFormat;           // awq/marlin.cc
extern const Format kGptqMarlinFormat;          // awq/marlin.cc
extern const Format kGgufFormat;                // gguf/gguf.cc
extern const Format kQuarkFormat;               // quark.cc
extern const Format kMlxFormat;                 // mlx.cc
extern const Format kFpQuantFormat;             // fp_quant.cc
extern const Format kComfyFormat;               // comfy.cc
extern const Format kTorchAoFormat;             // torchao.cc
extern const Format kExl3Format;                // exl3.cc
extern const Format kQuantoFormat;              // quanto.cc
extern const Format kQuantoPackedFormat;        // quanto.cc

// Every format, in the order they are tried.
absl::Span<const Format* const> AllFormats();

// The format of that name, or null.
const Format* FormatNamed(absl::string_view name);

// The first format that reads a checkpoint with that quantization_config, or some of its rules, and
// what it made of it. UNIMPLEMENTED with what was found and what each format of that quant_method
// missed, the nearest first.
struct FoundFormat {
  const Format* format = nullptr;
  std::string quant_method;
  QuantConfig config;
};
absl::StatusOr<FoundFormat> FindFormat(const Setting& config);

}  // namespace awqd
