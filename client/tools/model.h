// Model: a folder as the tools see it, quantised or dense.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/folder.h"
#include "kernels/checkpoint/checkpoint.h"

namespace awqd::tools {

// Bytes done and bytes in all, some of the way through.
using Progress = std::function<void(int64_t done, int64_t total)>;

// Whether a tensor is floating-point numbers that a dense linear's weight may be: F16, BF16, F32.
bool IsFloatType(absl::string_view dtype);

// Move-only.
class Model {
 public:
  // Errors are those of a folder or of tensors that cannot be opened. A quantised checkpoint that
  // does not load is no error here: checkpoint() says why.
  static absl::StatusOr<Model> Open(const std::string& path);

  const Folder& folder() const { return folder_; }
  const Tensors& tensors() const { return tensors_; }
  // Whether the folder has settings of quantisation.
  bool quantised() const { return quantised_; }
  // What its settings and tensors make; of one that is not quantised FAILED_PRECONDITION.
  const absl::StatusOr<model::Checkpoint>& checkpoint() const { return checkpoint_; }

  // Whether a tensor is part of one of the checkpoint's linears.
  bool IsPart(absl::string_view tensor) const { return linear_of_.contains(tensor); }
  // The quantised linear of that path, or null.
  const model::LinearLocation* FindLinear(absl::string_view path) const;
  // The linears that a tensor is the codes of: none, one, or one for each expert.
  std::vector<const model::LinearLocation*> LinearsWithCodes(absl::string_view tensor) const;
  // The path of a dense linear's weight: of a tensor "<path>.weight" of two dimensions and of
  // floating-point numbers that is part of no quantised linear. Empty for others.
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
