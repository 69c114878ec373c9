// Model: a folder as the tools see it, quantised or dense, and every tensor in its files.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/model_folder.h"

namespace awqd::tools {

// The files beside config.json that may hold settings of quantisation.
inline constexpr absl::string_view kSettingsFiles[] = {"quant_config.json", "quantize_config.json",
                                                       "hf_quant_config.json"};

using Folder = model::ModelFolder;

// All of a small file of the folder. NOT_FOUND without it, INVALID_ARGUMENT when it is larger than
// any that is read here.
absl::StatusOr<std::string> ReadText(const Folder& folder, absl::string_view file);

// Every tensor of a folder's safetensors files, or of its GGUF files. Move-only; locations point
// into it.
class Tensors {
 public:
  // INVALID_ARGUMENT naming file and tensor. Headers together are within the limits of one file, as
  // for a server.
  static absl::StatusOr<Tensors> Open(const Folder& folder);
  // The tensors of a checkpoint, whose headers are not read again. It outlives them.
  static Tensors FromCheckpoint(const model::Checkpoint& checkpoint);

  using Map = std::map<absl::string_view, model::TensorLocation>;
  const Map& all() const { return tensors_; }
  // Null when there is none of that name.
  const model::TensorLocation* Find(absl::string_view name) const;
  // Names in the order of their place on disk.
  std::vector<std::string> InOrder() const;
  // In the folder, sorted.
  std::vector<std::string> FileNames() const;
  // The first file, which has the metadata of a GGUF model in parts.
  const model::File& first_file() const { return files_.front()->file(); }
  int64_t total_bytes() const;
  bool gguf() const { return gguf_; }
  // INVALID_ARGUMENT when a file has changed since Open.
  absl::Status CheckUnchanged() const;

 private:
  bool gguf_ = false;
  std::vector<std::shared_ptr<const model::TensorFile>> files_;
  model::RespelledTensors respelled_;
  Map tensors_;  // keys live in files_, and in respelled_ or the checkpoint
};

// Fills `out` from byte `at` of a tensor on; the tensor has that many.
absl::Status ReadPart(const model::TensorLocation& place, int64_t at, absl::Span<uint8_t> out);

// Whether two tensors, or two files, are alike: type, shape and bytes.
absl::StatusOr<bool> SameBytes(const model::TensorLocation& a, const model::TensorLocation& b);
absl::StatusOr<bool> SameBytes(const model::File& a, const model::File& b);

// Bytes done and bytes in all, some of the way through.
using Progress = std::function<void(int64_t done, int64_t total)>;

// Whether a tensor is floating-point numbers that a dense linear's weight may be: F16, BF16, F32.
bool IsFloatType(absl::string_view dtype);

// A folder, its checkpoint, and which tensor is part of what. Move-only.
class Model {
 public:
  // Errors are those of a folder or of tensors that cannot be opened. A quantised checkpoint that
  // does not load is no error here: checkpoint() says why.
  static absl::StatusOr<Model> Open(const std::string& path);

  const Folder& folder() const { return folder_; }
  const Tensors& tensors() const { return tensors_; }
  // Whether the folder has settings of quantisation.
  bool quantised() const { return quantised_; }
  // The checkpoint of its settings and tensors. FAILED_PRECONDITION where it is not quantised.
  const absl::StatusOr<model::Checkpoint>& checkpoint() const { return checkpoint_; }

  // Whether a tensor is part of one of the checkpoint's linears.
  bool IsPart(absl::string_view tensor) const { return linear_of_.contains(tensor); }
  // Whether a tensor is part of one of these, or of a quantised linear that cannot be read.
  bool IsQuantised(absl::string_view tensor) const;
  // INVALID_ARGUMENT or UNIMPLEMENTED with the reason of the first quantised linear, or tensor with
  // codes of one, that cannot be read, and of a tensor in two files.
  absl::Status CheckAllRead() const;
  // The quantised linear of that path, or null.
  const model::LinearLocation* FindLinear(absl::string_view path) const;
  // The linears that a tensor is the codes of: none, one, or one for each expert.
  std::vector<const model::LinearLocation*> LinearsWithCodes(absl::string_view tensor) const;
  // The path of a dense linear, whose weight is a tensor "<path>.weight" of two dimensions and of
  // floating-point numbers that is part of no quantised linear. Empty for other tensors.
  std::string DensePath(absl::string_view tensor) const;
  // Why a tensor, part of no linear, is not quantised.
  std::string WhyNotQuantised(absl::string_view tensor) const;

  // INVALID_ARGUMENT when a file has changed since Open.
  absl::Status CheckUnchanged() const;

 private:
  void OpenCheckpoint();

  Folder folder_;
  Tensors tensors_;
  bool quantised_ = false;
  absl::StatusOr<model::Checkpoint> checkpoint_;
  // By the name of a tensor: indices into checkpoint_->linears() where it is the codes, else none.
  absl::flat_hash_map<std::string, std::vector<int64_t>> linear_of_;
  absl::flat_hash_map<std::string, int64_t> by_path_;  // index into checkpoint_->linears()
};

}  // namespace awqd::tools
