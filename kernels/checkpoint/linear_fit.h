// Fitting a linear's tensors to a rule: which tensors of a path are its codes, scales and the rest,
// and what is missing, doubtful or not read among them.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/checkpoint.h"

namespace awqd::model {

// A path's tensors as a rule reads them.
struct LinearFit {
  LinearLocation linear;
  std::vector<TensorLocation*> entries;  // of its tensors
};

// The tensors of a checkpoint by the paths that their names begin with.
class PathTensors {
 public:
  using Tensors = std::map<absl::string_view, TensorLocation>;
  // `model` is for errors. All outlive this.
  PathTensors(const std::string& model, Tensors* tensors, const std::atomic<bool>* cancelled)
      : model_(model), tensors_(*tensors), cancelled_(cancelled) {}

  // Null where there is no tensor of that name.
  TensorLocation* Find(absl::string_view name) const;

  // Companions without the tensor that marks a linear: a linear that lost its codes, unless only
  // one of several is there, which an unquantised module may well call "scales".
  bool HasCompanions(const Format& format, absl::string_view path) const;

  // Calls `visit` for each tensor beside the linear's codes, with its name behind the path and the
  // separator, until it returns an error. UNAVAILABLE once cancelled.
  absl::Status VisitBeside(
      absl::string_view path, absl::string_view separator,
      absl::FunctionRef<absl::Status(absl::string_view last, TensorLocation& entry)> visit) const;

  // The codes of the linear, of a type that the format has, or INVALID_ARGUMENT.
  absl::Status CheckCodes(absl::string_view path, const Format& format) const;

  // INVALID_ARGUMENT where a tensor is missing, in two files, or not known to the rule's format;
  // UNIMPLEMENTED where an adapter is added to the product.
  absl::StatusOr<LinearFit> Fit(absl::string_view path, const LinearRule& rule) const;

  // An error that names the model and the path.
  absl::Status Error(absl::string_view path, absl::StatusCode code, absl::string_view what) const;
  template <typename... What>
  absl::Status Broken(absl::string_view path, const What&... what) const {
    return Error(path, absl::StatusCode::kInvalidArgument, absl::StrCat(what...));
  }

 private:
  absl::Status CheckNoneUnread(absl::string_view path, const Format& format) const;

  const std::string& model_;
  Tensors& tensors_;
  const std::atomic<bool>* const cancelled_;
};

}  // namespace awqd::model
