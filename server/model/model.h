// Model: the weights of one checkpoint on devices, found by path; and what a failed device costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "server/model/placed_weight.h"

namespace awqd::model {

// Finds the paths that are most like one that is missing, without looking at all of them.
//
// A client that mistypes a path is told similar ones. Models have 100,000 paths, and anybody may
// ask, so a search costs a few binary searches and a constant number of comparisons.
class PathIndex {
 public:
  // MostLike returns so many paths, and compares the wanted one with kLooks others.
  static constexpr size_t kMost = 5;
  static constexpr size_t kLooks = 64;

  PathIndex() = default;
  // `paths`: in ascending order. The index does not own their bytes.
  explicit PathIndex(std::vector<absl::string_view> paths);

  // The most similar ones first, and of equally similar ones those that sort first. Two paths are
  // as similar as they have bytes in common at both ends. The paths that are compared share the
  // longest beginnings and the longest ends with `wanted`, where there are more than kLooks.
  std::vector<absl::string_view> MostLike(absl::string_view wanted) const;

 private:
  std::vector<absl::string_view> by_beginning_;
  std::vector<absl::string_view> by_end_;  // in the order of the reversed paths
};

// A loaded model. Immutable: requests in flight keep the version they started on alive.
struct Model {
  std::string name;
  int64_t version = 0;  // counts the loads under this name, from 1
  std::string quant_method;
  std::map<std::string, std::shared_ptr<const PlacedWeight>, std::less<>> weights;  // by path
  // The experts among them once more, by the stack's path; where they make none, why.
  std::map<std::string, absl::StatusOr<std::shared_ptr<const WeightStack>>, std::less<>> stacks;
  PathIndex weight_paths, stack_paths;  // of the two
  int ignored_tensors = 0;              // that are not quantised
  // The quantised linears of the checkpoint that could not be read, by path, with the reason.
  std::map<std::string, absl::Status, std::less<>> unserved;
  int64_t device_bytes = 0;                   // on all devices
  std::map<const Device*, int64_t> bytes_on;  // on each that holds any of it
  int64_t load_ms = 0;
  Arenas arenas;  // empty where nothing is lent

  // For people: how many quantised weights are not served, and the reason of the first. Empty where
  // all are.
  std::string UnservedMessage() const;
  // OK where all quantised weights are served, else the reason of the first that is not.
  absl::Status CheckAllServed() const;

  // NOT_FOUND naming up to five similar paths. The path of a stack is NOT_FOUND too; the message
  // says which call takes it. UNIMPLEMENTED or INVALID_ARGUMENT with the reason for one that is in
  // the checkpoint and not served.
  absl::StatusOr<std::shared_ptr<const PlacedWeight>> FindWeight(absl::string_view path) const;
  // NOT_FOUND likewise; the path of one weight is NOT_FOUND and the message names its stack.
  // FAILED_PRECONDITION, as MakeStack has it, when the experts of that path make no stack.
  absl::StatusOr<std::shared_ptr<const WeightStack>> FindStack(absl::string_view path) const;
};

// The part of a loaded model that is lost with devices that have failed since.
struct Losses {
  std::string devices;  // of the model that have failed, "cuda:1"; empty: none
  int64_t weights = 0;  // that cannot be served any more

  // For people; empty where nothing is lost.
  std::string Message() const;
};

// A weight is lost when every device that has it whole, or one of those that it is partitioned
// among, has failed.
Losses FindLosses(const Model& model);

}  // namespace awqd::model
