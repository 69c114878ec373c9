// What the name of a model of the inference protocol stands for, of what is loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/repository/model_store.h"
#include "server/services/env.h"
#include "server/wire/oip/name.h"

namespace awqd::services::oip {

// A model of awqd.v1. INVALID_ARGUMENT about `field` when `name` is no name; NOT_FOUND unknown, or
// another version than `version`, which may be empty; UNAVAILABLE still loading.
absl::StatusOr<std::shared_ptr<const model::Model>> FindModel(const Env& env,
                                                              const std::string& name,
                                                              absl::string_view version,
                                                              absl::string_view field);

// The shape of what MODEL/WEIGHT is, and facts about it.
struct Found {
  wire::oip::ModelName name;
  int64_t version = 0;
  int64_t k = 0, n = 0;
  bool experts = false;  // requests name them
  std::string format, scheme, devices;
};

// As FindModel, and NOT_FOUND for a weight, a stack or an MLP that the model has not.
absl::StatusOr<Found> FindNamed(const Env& env, const std::string& name, absl::string_view version);

}  // namespace awqd::services::oip
