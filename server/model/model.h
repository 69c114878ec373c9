// What a loaded model has lost with devices that have failed since.
#pragma once

#include <cstdint>
#include <string>

#include "server/model/model_store.h"

namespace awqd::model {

struct Losses {
  std::string devices;  // of the model that have failed, "cuda:1"; empty: none
  int64_t weights = 0;  // that cannot be served any more

  // For people; empty where nothing is lost.
  std::string Message() const;
};

// A weight is lost when every device that has it whole, or one of those that it is cut among, has
// failed.
Losses LossesOf(const Model& model);

}  // namespace awqd::model
