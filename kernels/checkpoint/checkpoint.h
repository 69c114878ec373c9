// Checkpoint: a directory as it is downloaded from the Hub, a GGUF file or one of ComfyUI -> the
// quantised linears it holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/file.h"
#include "kernels/checkpoint/folder_snapshot.h"
#include "kernels/checkpoint/linear_rules.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/checkpoint/repository_root.h"
#include "kernels/checkpoint/tensor_names.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// One quantised linear: where its tensors are. They may lie in different files.
struct LinearLocation {
  std::string path;                                            // "model.layers.0.mlp.up_proj"
  std::map<std::string, TensorLocation, std::less<>> tensors;  // by suffix
  int64_t bytes = 0;                                           // in the files, all tensors
  const LinearRule* rule = nullptr;                            // what it is decoded with
  // The path of the tensors with all experts that an expert is a slice of,
  // "model.layers.0.mlp.experts.up_proj". Empty for others.
  std::string slice_of;
  int64_t experts = 1;  // that the tensors of that path hold

  const TensorLocation& codes() const {
    return tensors.find(rule->format->suffixes.front())->second;
  }
};

// The remarks of formats, and the number of linears that each is on.
using Remarks = std::map<std::string, int64_t>;
// "12 linears: ...; 1 linear: ..."; empty without remarks.
std::string ToString(const Remarks& remarks);

// Opens and checks every header; reads tensors only when asked. Move-only; locations point into it.
class Checkpoint {
 public:
  // `name`: directory or file beneath the root; a directory is opened once. NOT_FOUND no such
  // entry, UNIMPLEMENTED a format that is not read, INVALID_ARGUMENT anything wrong with the files,
  // each naming file and tensor, or a file that is there twice. One linear that cannot be read
  // refuses no other; the reason of the first is the error where no linear can be. UNAVAILABLE once
  // `cancelled`, of later reads too; null: never. It outlives the checkpoint.
  static absl::StatusOr<Checkpoint> Open(const RepositoryRoot& root, absl::string_view name,
                                         const std::atomic<bool>* cancelled = nullptr);

  // The one that reads its settings. A linear may have another of the same quant_method.
  const Format& format() const { return *found_.format; }
  const std::string& quant_method() const { return found_.quant_method; }
  // For the log: what of its settings has no effect here. Mostly empty.
  const std::string& note() const { return found_.config.note; }
  // The settings of each linear.
  const LinearRules& rules() const { return rules_; }
  // In the order of their names.
  absl::Span<const std::shared_ptr<const TensorFile>> files() const { return files_; }
  // In the order of their place on disk.
  absl::Span<const LinearLocation> linears() const { return linears_; }
  // The others, as far as headers and settings show it: decoding may find more.
  const UnservedLinears& unserved() const { return unserved_; }
  // The account of every tensor, by name: each belongs to a linear above, to one that cannot be
  // read, or is not quantised. Of a tensor that several files have, the one that counts.
  const std::map<absl::string_view, TensorLocation>& tensors() const { return tensors_; }
  // Tensors that are not quantised.
  int ignored_tensors() const;
  int64_t total_bytes() const;  // of all linears

  // Reads and decodes one linear. `scratch` holds the raw tensors and is kept between calls so
  // that its memory is reused; contents on return are unspecified.
  // Format::remark goes to `remarks`, which may be null.
  absl::StatusOr<HostWeight> Read(const LinearLocation& linear, std::vector<uint8_t>* scratch,
                                  Remarks* remarks = nullptr) const {
    return Decode(linear, /*codes=*/true, scratch, remarks);
  }

  // The same without the codes, which are not read: what memory the linear will take follows from
  // it. Reads its other tensors, mostly some hundredths of it.
  absl::StatusOr<HostWeight> Describe(const LinearLocation& linear, std::vector<uint8_t>* scratch,
                                      Remarks* remarks = nullptr) const {
    return Decode(linear, /*codes=*/false, scratch, remarks);
  }

  // INVALID_ARGUMENT when a file that Open read or looked for, settings and index too, was written
  // to, truncated or replaced since, or the folder is another one.
  absl::Status CheckUnchanged(const RepositoryRoot& root) const {
    return read_.CheckUnchanged(root);
  }

 private:
  absl::Status OpenGguf(const FileSource& root, const std::vector<std::string>& paths);
  absl::Status OpenFolder(const FileSource& root);
  // Opens a model of which no settings tell but its tensor files. `nothing`: the error without.
  absl::Status OpenAlone(const FileSource& root, const absl::Status& nothing);
  // `status`: what FindLinears said of the settings `own`, which are those of config.json.
  absl::Status ChooseSettings(const FileSource& root, const QuantSettings& own,
                              const absl::Status& status);
  // The format and the rules of these settings, and with FindLinearsOf the linears, in the place of
  // those that were there.
  absl::Status FindRules(const QuantSettings& settings);
  absl::Status FindLinearsOf(const QuantSettings& settings);
  // Fills the account, linears_ and unserved_.
  class Resolver;
  absl::Status FindLinears();
  // Brings linears_ into the order of their place on disk.
  void SortLinears();

  // TensorView::fused of the linear's codes.
  std::vector<std::vector<int64_t>> FindFused(const LinearLocation& linear) const;
  // Sets the parts of TensorView that tell of the linear's codes beside their tensor.
  void DescribeCodes(const LinearLocation& linear, absl::string_view stored,
                     TensorView* codes) const;
  absl::StatusOr<HostWeight> Decode(const LinearLocation& linear, bool codes,
                                    std::vector<uint8_t>* scratch, Remarks* remarks) const;

  std::string name_;
  const std::atomic<bool>* cancelled_ = nullptr;
  FilesRead read_;
  std::vector<AttentionRows> attention_;  // where fused q, k and v, or a format, need it
  // Sizes that config.json tells, where a format needs them; else 0.
  int64_t hidden_size_ = 0, vocab_size_ = 0;
  FoundFormat found_;
  LinearRules rules_;
  bool by_path_ = false;  // no linear is read by a rule that its path does not match
  // Rules with the settings of additions, by the rule and those.
  using Additions = std::vector<const LinearRule*>;
  std::map<std::pair<const LinearRule*, Additions>, std::unique_ptr<const LinearRule>> added_;
  std::vector<std::shared_ptr<const TensorFile>> files_;
  RespelledTensors respelled_;
  std::map<absl::string_view, TensorLocation> tensors_;  // keys live in files_ and respelled_
  std::deque<TensorInfo> slices_;                        // stay where they are: linears_ point here
  std::vector<LinearLocation> linears_;
  int64_t unmatched_ = 0;     // of those: read by their tensors alone, as no rule's targets match
  UnservedLinears unserved_;  // stay where they are: tensors_ points here
};

}  // namespace awqd::model
