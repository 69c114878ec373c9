// Model: the weights of one checkpoint on devices, found by path; and what a failed device costs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"
#include "server/model/path_index.h"
#include "server/model/placed_weight.h"
#include "server/model/weight_stack.h"

namespace awqd::model {

// A loaded model. Immutable: requests in flight keep the version they started on alive.
struct Model {
  std::string name;
  int64_t version = 0;  // counts the loads under this name, from 1
  std::string quant_method;
  std::map<std::string, std::shared_ptr<const PlacedWeight>, std::less<>> weights;  // by path
  // The experts among them once more, by the stack's path; where they make none, why.
  std::map<std::string, absl::StatusOr<std::shared_ptr<const WeightStack>>, std::less<>> stacks;
  PathIndex weight_paths, stack_paths;  // of the two
  int ignored_tensors = 0;
  int64_t device_bytes = 0;                   // on all devices
  std::map<const Device*, int64_t> bytes_on;  // on each that holds any of it
  int64_t load_ms = 0;

  // NOT_FOUND naming up to five similar paths. The path of a stack is NOT_FOUND too; the message
  // says which call takes it.
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
