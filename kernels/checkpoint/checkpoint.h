// Checkpoint: a directory as it is downloaded from the Hub, or a GGUF file -> the quantised linears
// it holds.
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
#include "kernels/checkpoint/repository_root.h"
#include "kernels/checkpoint/shard_index.h"
#include "kernels/formats/format.h"

namespace awqd::model {

struct TensorLocation {
  const TensorFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

// One quantised linear: where its tensors are. They may lie in different files.
struct LinearLocation {
  std::string path;                                            // "model.layers.0.mlp.up_proj"
  std::map<std::string, TensorLocation, std::less<>> tensors;  // by suffix
  int64_t bytes = 0;                                           // in the files, all tensors
  const LinearRule* rule = nullptr;                            // what it is decoded with
  // Of an expert that is a slice of tensors with all experts: the path that those are under,
  // "model.layers.0.mlp.experts.up_proj". Else empty.
  std::string slice_of;
  int64_t experts = 1;  // that the tensors of that path hold

  const TensorLocation& codes() const {
    return tensors.find(rule->format->suffixes.front())->second;
  }
};

// Opens and checks every header; reads tensors only when asked. Move-only; locations point into it.
class Checkpoint {
 public:
  // `name`: directory or GGUF file beneath the root; a directory is opened once. NOT_FOUND no such
  // entry, UNIMPLEMENTED a format that is not read, INVALID_ARGUMENT anything wrong with the files,
  // each naming file and tensor, or a file that is there twice. UNAVAILABLE once `cancelled`, of
  // later reads too; null: never. It outlives the checkpoint.
  static absl::StatusOr<Checkpoint> Open(const RepositoryRoot& root, absl::string_view name,
                                         const std::atomic<bool>* cancelled = nullptr);

  // The one that reads its settings. A linear may have another of the same quant_method.
  const Format& format() const { return *found_.format; }
  const std::string& quant_method() const { return found_.quant_method; }
  // For the log: what of its settings has no effect here. Mostly empty.
  const std::string& note() const { return found_.config.note; }
  // Which linears are quantised, by its settings.
  const LinearRules& rules() const { return rules_; }
  // In the order of their names.
  absl::Span<const std::shared_ptr<const TensorFile>> files() const { return files_; }
  // In the order of their place on disk.
  absl::Span<const LinearLocation> linears() const { return linears_; }
  // Tensors that belong to no quantised linear.
  int ignored_tensors() const { return ignored_tensors_; }
  int64_t total_bytes() const;  // of all linears

  // Reads and decodes one linear. `scratch` holds the raw tensors and is kept between calls so
  // that its memory is reused; contents on return are unspecified.
  absl::StatusOr<HostWeight> Read(const LinearLocation& linear,
                                  std::vector<uint8_t>* scratch) const;

  // The same without the codes, which are not read: what memory the linear will take follows from
  // it. Reads its other tensors, mostly some hundredths of it.
  absl::StatusOr<HostWeight> Describe(const LinearLocation& linear,
                                      std::vector<uint8_t>* scratch) const;

  // INVALID_ARGUMENT when a file that Open read or looked for, settings and index too, was written
  // to, truncated or replaced since, or the folder is another one.
  absl::Status CheckUnchanged(const RepositoryRoot& root) const;

 private:
  absl::Status FindConfig(const FileSource& root);
  absl::Status OpenFiles(const FileSource& root);
  absl::Status OpenGgufFile(const FileSource& root, const std::string& path);
  absl::Status AddFile(std::shared_ptr<const TensorFile> opened);
  absl::Status CheckIndex(const ShardIndex& index) const;
  absl::Status FindLinears();
  absl::Status AddTensor(const Format& format, absl::string_view name,
                         const TensorLocation& location);
  absl::StatusOr<LinearLocation> Locate(absl::string_view path, const LinearRule& rule) const;
  // One linear, or one for each expert where its tensors hold several.
  absl::Status AddLinear(LinearLocation linear);
  absl::Status CheckExpertsOnce() const;
  // Brings linears_ into the order of their place on disk.
  void SortLinears();
  absl::Status CheckNoOrphan(const Format& format, absl::string_view path,
                             absl::string_view suffix) const;
  absl::Status CheckNoneUnread(const Format& format, absl::string_view name) const;
  // Whether the tensor that marks a linear of that path is there, and every tensor that it needs
  // beside its codes.
  bool HasCodes(const Format& format, absl::string_view path) const;
  bool HasCompanions(const Format& format, absl::string_view path) const;

  absl::StatusOr<HostWeight> Decode(const LinearLocation& linear, bool codes,
                                    std::vector<uint8_t>* scratch) const;

  std::string name_;
  const std::atomic<bool>* cancelled_ = nullptr;
  FilesRead read_;
  FoundFormat found_;
  LinearRules rules_;
  std::vector<std::shared_ptr<const TensorFile>> files_;
  std::map<absl::string_view, TensorLocation> tensors_;  // keys live in files_
  std::deque<TensorInfo> slices_;                        // stay where they are: linears_ point here
  std::vector<LinearLocation> linears_;
  int ignored_tensors_ = 0;
};

}  // namespace awqd::model
